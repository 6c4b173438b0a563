"""Soak test: asks all kinds of questions for minutes, and checks the answers and that no process keeps growing.

    python -m bench.soak --minutes 10
    python -m bench.soak --minutes 1 --concurrency 2      # smoke test

Starts ``triptych serve``, and asks what the clients of walks ask (``triptych.measure.chaos.questions``): each answer
must be as the first time. A process's memory is the PSS of its anonymous and shared memory, sampled once a second.
Mapped files are left out, because their share depends on other processes. After the first third, in which caches
fill, a line is fitted against the number of answers. A slope above the limit fails with exit code 1, and so do files,
sockets, threads and processes that weren't there at the end of the first third, and a wrong answer.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from triptych.measure.chaos.bench import fresh_salt
from triptych.measure.chaos.load import Client, End, Outcome, asking, send
from triptych.measure.chaos.media_server import HOST, media_server
from triptych.measure.chaos.questions import Question
from triptych.measure.chaos.target import Held, held
from triptych.measure.chaos.walking import SERVER_FAULTS, Answer, described, questions
from triptych.measure.load.processes import descendants, named_children

MODEL = "soak"
LIMIT_MIB = 1.0
"""Per 1000 requests."""
SETTLE_SECONDS = 15.0


def processes(supervisor: int) -> dict[int, str]:
    """Return the names of all processes of a service by process id."""
    named = named_children(supervisor)
    found = {supervisor: "serve"} | {pid: name for name, pid in named.items()}
    found |= {one: f"worker of {name}" for name, pid in named.items() for one in descendants(pid)}
    return found | dict.fromkeys(descendants(supervisor, without=found), "worker of serve")


def pss_mib(pid: int) -> float:
    found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, found)) / 1024


async def held_idle(pid: int, url: str) -> Held:
    """Return what the service holds once it is idle."""
    await asyncio.sleep(SETTLE_SECONDS)
    return await held(pid, [url])


class Soak:
    """A service under load, and what was seen of it."""

    def __init__(self, url: str, pid: int, concurrency: int, asked: Sequence[Question]) -> None:
        self.client = Client(url, MODEL, concurrency)
        self.pid = pid
        self.asked = asked
        self.done = 0
        self.bad: list[str] = []
        self.seen: dict[str, list[tuple[int, float]]] = {}
        """(answers so far, MiB) of every process, once a second."""

    async def learn(self) -> None:
        """Learn the right answers."""
        outcomes = await send(self.client, self.asked, fresh_salt())
        self.right = {one.question.number: Answer.of(one) for one in outcomes}
        self.bad += [described(one) for one in outcomes if one.end is End.HUNG or one.status >= SERVER_FAULTS]

    async def run(self, seconds: float) -> None:
        """Ask for so long."""
        end = time.monotonic() + seconds
        async with asking(self.client) as ask:

            async def client_loop(number: int) -> None:
                rng = random.Random(number)
                while time.monotonic() < end:
                    one = rng.choice(self.asked)
                    self.judge(await ask(one, one.body(MODEL, fresh_salt())))

            await asyncio.gather(self._look(end), *(client_loop(one) for one in range(self.client.concurrency)))

    def judge(self, outcome: Outcome) -> None:
        self.done += 1
        if Answer.of(outcome) != self.right[outcome.question.number]:
            self.bad.append(described(outcome))

    async def _look(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(1)
            for process, name in processes(self.pid).items():
                try:
                    self.seen.setdefault(f"{name} ({process})", []).append((self.done, pss_mib(process)))
                except OSError:
                    continue  # it has ended


async def load(url: str, pid: int, minutes: float, concurrency: int, asked: Sequence[Question]) -> bool:
    """Ask for minutes, and print what was seen. Return whether nothing grew and all answers were right."""
    soak = Soak(url, pid, concurrency, asked)
    await soak.learn()
    await soak.run(20 * minutes)
    before = await held_idle(pid, url)
    soak.seen.clear()
    await soak.run(40 * minutes)
    more = (await held_idle(pid, url)).more_than(before)
    flat = report(soak.seen)
    for line in (*soak.bad, *(f"still held: {one}" for one in more)):
        print(line)
    print(f"{soak.done} requests, {len(soak.bad)} wrong or lost, {len(more)} kinds of things more")
    return flat and not soak.bad and not more


def show_trouble(lines: Iterable[str]) -> None:
    """Print warnings and errors. Reading also keeps the pipe from filling up."""
    for line in lines:
        if any(word in line for word in ("WARNING", "ERROR", "Error", "Traceback")):
            print(line, end="", flush=True)


def report(seen: dict[str, list[tuple[int, float]]]) -> bool:
    """Print a line per process. Returns whether none of them grows."""
    flat = True
    for name, samples in seen.items():
        later = np.array(samples)
        if len(later) < 2 or later[-1, 0] == later[0, 0]:
            continue
        slope = 1000 * np.polyfit(later[:, 0], later[:, 1], 1)[0]
        flat &= bool(slope < LIMIT_MIB)
        print(
            f"{name:28} {later[0, 1]:8.1f} → {later[-1, 1]:8.1f} MiB over {int(later[-1, 0] - later[0, 0])} requests: "
            f"{slope:+.2f} MiB per 1000"
        )
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--topology", default="1E1PD")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=4)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "triptych", "serve", arguments.model, "--topology", arguments.topology]
    # small enough to be full soon
    command += ["--port", "0", "--served-model-name", MODEL, "--encode-cache-mb", "8", "--kv-cache-tokens", "16384"]
    command += ["--dtype", "float32"]  # in other formats a token may depend on the other requests of a step
    return 0 if asyncio.run(serve_and_load(command, arguments)) else 1


async def serve_and_load(command: list[str], arguments: argparse.Namespace) -> bool:
    async with media_server() as media:
        command += ["--allowed-media-domains", media.removeprefix("http://"), "--allowed-media-networks", f"{HOST}/32"]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        assert server.stdout is not None
        try:
            lines = iter(server.stdout.readline, "")
            ready = (match[0] for line in lines if (match := re.search(r"http://[\d.]+:\d+", line)) and "ready" in line)
            url = await asyncio.to_thread(next, ready)
            threading.Thread(target=show_trouble, args=[server.stdout], daemon=True).start()
            return await load(url, server.pid, arguments.minutes, arguments.concurrency, questions(media))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
