"""The clock of timeouts, and the event loop by it."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from triptych import running_time
from triptych.running_time import STILL_SECONDS, RunningClock


def test_time_that_passes_between_two_readings_counts_up_to_a_bound() -> None:
    now = 100.0
    clock = RunningClock(lambda: now)
    began = clock()
    for seconds in (0.1, STILL_SECONDS, 0.5):
        now += seconds
        clock()
    assert clock() - began == pytest.approx(STILL_SECONDS + 0.6)
    now += 3600.0
    assert clock() - began == pytest.approx(2 * STILL_SECONDS + 0.6)


def test_threads_count_a_pause_once() -> None:
    now = 0.0
    clock = RunningClock(lambda: now)
    for pause in range(1, 20):
        now += 100.0
        threads = [threading.Thread(target=clock) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert clock() == pytest.approx(pause * STILL_SECONDS)


def test_what_came_during_a_pause_is_read_before_any_timeout_passes() -> None:
    async def main() -> bytes:
        read, write = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
        )
        waiting = asyncio.create_task(reader.readexactly(1))
        asyncio.get_running_loop().call_later(0.1, os.write, write, b"x")  # due with the timeout, after the pause
        asyncio.get_running_loop().call_later(0.05, time.sleep, STILL_SECONDS + 2.0)
        try:
            async with asyncio.timeout(STILL_SECONDS + 1.0):
                return await waiting
        finally:
            transport.close()
            os.close(write)

    assert running_time.run(main()) == b"x"


def test_a_loop_without_work_keeps_time() -> None:
    began = time.monotonic()
    running_time.run(asyncio.sleep(STILL_SECONDS * 2.5))
    assert time.monotonic() - began < STILL_SECONDS * 2.5 + 0.9


def test_all_event_loops_of_the_package_count_the_time_that_they_run() -> None:
    """In one of another kind, which doesn't read the clock of timeouts, that clock would lose time."""
    package = Path(running_time.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    assert len(sources) > 100
    other = re.compile(r"asyncio\.(run|new_event_loop)\(")
    assert [str(path) for path, source in sources.items() if other.search(source)] == []


PROGRAM = """
import asyncio, time
from triptych import running_time
async def main():
    began = time.monotonic()
    print("ready", flush=True)
    await asyncio.sleep(2.0)
    print(time.monotonic() - began, flush=True)
running_time.run(main())
"""


def test_a_stopped_process_waits_for_as_long_as_it_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(SIGSTOP)
        time.sleep(3.0)
        process.send_signal(SIGCONT)
        assert float(process.stdout.readline()) >= 3.0 + 2.0 - STILL_SECONDS - 0.2


IDLE = """
import asyncio, os, sys
from triptych import running_time
class Connection(asyncio.Protocol):
    def connection_made(self, transport):
        self.timeout = asyncio.get_running_loop().call_later(1.0, os._exit, 1)
        print("ready", flush=True)
    def data_received(self, data):
        self.timeout.cancel()
        os._exit(0)
async def main():
    await asyncio.get_running_loop().connect_read_pipe(Connection, sys.stdin)
    await asyncio.sleep(60)
running_time.run(main())
"""


def test_what_came_while_a_wait_was_stopped_is_read_before_its_timeout_passes() -> None:
    with subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        time.sleep(0.9)
        process.send_signal(SIGSTOP)
        process.stdin.write(b"x")
        process.stdin.flush()
        time.sleep(STILL_SECONDS / 2)
        process.send_signal(SIGCONT)
        assert process.wait(10) == 0
