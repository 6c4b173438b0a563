"""Instances that are forked from a process that has imported what they need."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.commands import FAST, picture_answer, triptych
from tests.support.serving import wait_for
from tests.support.tiny import make_tiny
from triptych import exit_codes
from triptych.cluster.child import Child, ChildSpec
from triptych.cluster.forks import InstanceForkServer
from triptych.cluster.launcher import LocalLauncher
from triptych.server.fork_messages import ForkInstance
from triptych.topology import Role

Start = Callable[..., Awaitable[Child]]


def spec(written: bytes = b"no settings", name: str = "e0", threads: int = 1) -> ChildSpec:
    """An instance that fails at once, unless it gets its settings. There is no model to import the code of."""
    fork = ForkInstance(name, "/no/model")
    return ChildSpec(name, Role.E, "", lambda _: written, {"OMP_NUM_THREADS": str(threads)}, fork=fork)


def run(test: Callable[[LocalLauncher, Start, list[str]], Awaitable[None]]) -> None:
    async def run() -> None:
        launcher, lines = LocalLauncher(), list[str]()

        async def start(of: ChildSpec | None = None) -> Child:
            child = await launcher.start(of or spec(), 1, lines.append)
            assert isinstance(child, Child)
            return child

        try:
            await test(launcher, start, lines)
        finally:
            launcher.close()

    before = os.listdir("/proc/self/fd")
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert not [one for one in psutil.Process().children() if "triptych.server.fork_server" in one.cmdline()]


def server_of(launcher: LocalLauncher) -> psutil.Process:
    [server] = [one for one in psutil.Process().children() if "triptych.server.fork_server" in one.cmdline()]
    return server


def test_output_and_exit_code_are_those_of_the_process() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        first, second = await start(), await start(spec(b"none either"))
        for child in (first, second):
            ended = await child.wait()
            assert ended.code == exit_codes.CONFIG
            assert "can't be read" in child.last_line
            assert child.pid != os.getpid()
        assert first.pid != second.pid
        assert [line[:4] for line in lines] == ["[e0]"] * 2
        assert not server_of(launcher).children()

    run(test)


def test_a_signal_before_the_process_exists_ends_it() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        child = await start()
        child.send(signal.SIGTERM)
        assert child.pid == 0
        assert (await child.wait()).code == -signal.SIGTERM
        after = await start()
        assert (await after.wait()).code == exit_codes.CONFIG
        assert not server_of(launcher).children()

    run(test)


def test_the_next_process_gets_a_new_server_after_the_end_of_one() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start()).wait()
        first = server_of(launcher)
        first.suspend()
        lost = await start()
        first.kill()
        assert (await lost.wait()).code == exit_codes.FAILED
        assert "was killed by SIGKILL" in lost.last_line
        assert (await (await start()).wait()).code == exit_codes.CONFIG
        assert server_of(launcher).pid != first.pid

    run(test)


def test_a_process_that_ends_with_the_server_is_lost_and_not_to_blame() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        assert not (await (await start()).wait()).lost
        read, write = os.pipe()
        with os.fdopen(read, "rb"), os.fdopen(write, "wb"):
            server = InstanceForkServer(spec().environment)
            process = server.fork(ForkInstance("e0", "/no/model"), read, write)  # waits for its settings
            while not process.pid:
                await asyncio.sleep(0.01)
            parent = psutil.Process(process.pid).parent()
            assert parent is not None
            parent.kill()
            assert await process.wait() == -signal.SIGKILL
            assert process.lost

    run(test)


@pytest.mark.slow
def test_new_code_gets_a_new_server() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start()).wait()
        first = server_of(launcher)
        launcher.renew()
        await (await start()).wait()
        assert server_of(launcher).pid != first.pid

    run(test)


def test_a_long_message_is_an_error_of_the_start() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        with pytest.raises(OSError, match="too long"):
            await start(replace(spec(), fork=ForkInstance("e0", "/" * 2**20)))

    run(test)


def test_a_signal_just_after_the_fork_ends_the_process() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start()).wait()
        read, write = os.pipe()
        with os.fdopen(read, "rb"), os.fdopen(write, "wb"):
            server = InstanceForkServer(spec().environment)
            process = server.fork(ForkInstance("e0", "/no/model"), read, write)  # waits for its settings
            while not process.pid:
                await asyncio.sleep(0)
            process.send(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await process.wait() == -signal.SIGTERM
            server.close()

    run(test)


def test_the_server_goes_on_after_signals_to_all_processes() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start()).wait()
        server = server_of(launcher)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            server.send_signal(number)
        assert (await (await start()).wait()).code == exit_codes.CONFIG
        assert server_of(launcher) == server

    run(test)


def test_an_end_is_seen_while_the_server_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.cluster.forks.REPORT_SECONDS", 0.1)

    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        read, write = os.pipe()
        with os.fdopen(read, "rb"), os.fdopen(write, "wb"):
            server = InstanceForkServer(spec().environment)
            process = server.fork(ForkInstance("e0", "/no/model"), read, write)
            while not process.pid:
                await asyncio.sleep(0.01)
            server_of(launcher).suspend()
            process.send(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            assert not server.can_fork
            server.close()
            assert server.has_ended

    run(test)


def test_one_idle_server_at_most() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start(spec(threads=1))).wait()
        first = server_of(launcher)
        await (await start(spec(threads=2))).wait()
        assert server_of(launcher) != first

    run(test)


def test_an_uncaught_error_is_logged_as_everywhere(folder: Path) -> None:
    """As an error of a program of its own: in one line of JSON, with the exception."""
    code = """
import sys
from triptych.observe import logs
from triptych.server import fork_server, instance_main

def main(is_forked):
    logs.set_up(logs.LogSettings("json"))
    raise RuntimeError("planted")

instance_main.main = main
fork_server._run_instance()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == exit_codes.FAILED
    [line] = (ended.stdout + ended.stderr).splitlines()
    assert json.loads(line)["level"] == "critical"
    assert "planted" in json.loads(line)["exception"]


@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("phi4_multimodal", marks=pytest.mark.slow)])
def test_what_instances_import(family: str, tmp_path: Path) -> None:
    """A process that has preloaded a model imports nothing more when it loads the towers, and never Transformers."""
    code = f"""
import sys
from pathlib import Path
from triptych.server.preload import preload

folder = Path({str(make_tiny(tmp_path / family, family))!r})
preload(folder)
assert {{"torch", "triptych.server.instance_process", "triptych.server.instance_main"}} <= {{*sys.modules}}
before = {{*sys.modules}}
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.server.model_bundle import ModelBundle

ModelBundle(Checkpoint(folder), EngineConfig(device="cpu", dtype="float32")).load_encoder()
print(*sorted(name for name in {{*sys.modules}} - before if name.startswith("torch")))
assert not {{"transformers", "torch._dynamo"}} & {{*sys.modules}}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ended.stdout.split()


@pytest.mark.slow
def test_what_is_prepared_is_imported_before_the_first_instance(folder: Path) -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        launcher.prepare(replace(spec(), fork=ForkInstance("pd0", str(folder))))
        maps = Path(f"/proc/{server_of(launcher).pid}/maps")
        async with asyncio.timeout(60):
            while "libtorch_cpu" not in maps.read_text():
                await asyncio.sleep(0.05)
        assert not server_of(launcher).children()
        assert (await (await start()).wait()).code == exit_codes.CONFIG

    run(test)


@pytest.mark.slow
def test_instances_end_with_the_server_and_come_back(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1E1PD") as command:
        url = command.wait_until_ready()
        [server] = [one for one in command.descendants if "triptych.server.fork_server" in one.cmdline()]
        instances = server.children()
        assert len(instances) == 2
        assert "libtorch" in Path(f"/proc/{server.pid}/maps").read_text()
        server.kill()
        wait_for(lambda: not any(one.is_running() for one in instances))
        wait_for(lambda: command.text.count("has this instance: ready") == 4, 60)
        assert picture_answer(url, "tiny")
