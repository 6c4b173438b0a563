"""Requests per second of one and of two frontends over the same stub instances: text, and 1080p pictures.

    python -m bench.frontends [--quick] [--out bench/results/frontends.json]

Each frontend is a process of its own. Instances are replaced by one peer in this process that holds a lease with each
frontend and answers at once, so no model runs. The load comes from processes of their own, a closed loop with the same
number of connections for each frontend. Frontends, peer and load share the machine's cores: with fewer cores than
processes, the figures are a lower bound of what a second frontend adds, and ``cores_of_frontends`` says how much of the
machine the frontends got.
"""

import argparse
import asyncio
import multiprocessing
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.frontend import CHAT, WORD, body, cpu, picture, start_frontend
from bench.measuring import report
from triptych.clock import SystemClock
from triptych.config import LeaseConfig
from triptych.demo import MODEL_DIR
from triptych.errors import TriptychError
from triptych.messages.channel import Channel
from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Capacity, Generate, Register, Tokens
from triptych.models.registry import identity_of
from triptych.server.frontends import Frontends
from triptych.topology import Role

MAX_REQUESTS = 512
HEARTBEAT = 0.3


class Stub:
    """Replaces an EPD instance, in a thread. Its leases and credits are those of a real instance."""

    def __init__(self, controls: list[str]) -> None:
        self._channel = Channel(SystemClock())
        self._ended = threading.Event()
        capacity, model = Capacity(2**10, 2**10), identity_of(MODEL_DIR)
        layout = RowLayout(model.digest, "float32", 4, 16)
        register = Register(
            "stub", Role.EPD, self._channel.address, [layout], os.getpid(), 1, capacity, 2**20, model=model
        )
        self._frontends = Frontends(
            controls,
            self._channel,
            LeaseConfig(heartbeat=HEARTBEAT),
            capacity,
            registration=lambda: register,
            give_up=lambda _: None,
            clock=SystemClock(),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        self._channel.close()

    def _run(self) -> None:
        self._frontends.register()
        beat = time.monotonic()
        while not self._ended.is_set():
            for message in self._channel.receive(HEARTBEAT / 10):
                if isinstance(message, Generate):
                    self._answer(message)
                elif handler := self._frontends.handlers.get(type(message)):
                    handler(message)
            self._frontends.step()
            if time.monotonic() - beat > HEARTBEAT:
                beat = time.monotonic()
                self._frontends.beat(InstanceStats())
        self._frontends.leave(suspect=False)

    def _answer(self, message: Generate) -> None:
        tokens = [WORD] * message.sampling.max_tokens
        try:
            self._channel.send(
                message.reply_to, Tokens(message.request, tokens, len(message.generated), finish_reason="length")
            )
        except TriptychError:
            return  # the frontend has ended


def load(url: str, bodies: list[bytes], connections: int, seconds: float, results: Any) -> None:
    """Send requests over ``connections`` connections, and put the number of answers and the seconds into
    ``results``."""

    async def run() -> int:
        count, deadline = 0, time.monotonic() + seconds
        limits = httpx.Limits(max_connections=connections)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits) as client:

            async def one_after_the_other(number: int) -> None:
                nonlocal count
                while time.monotonic() < deadline:
                    number += 1
                    (await client.post(CHAT, content=bodies[number % len(bodies)])).raise_for_status()
                    count += 1

            await asyncio.gather(*map(one_after_the_other, range(connections)))
        return count

    began = time.monotonic()
    results.put((asyncio.run(run()), time.monotonic() - began))


def measure(urls: list[str], pids: list[int], bodies: list[bytes], options: argparse.Namespace) -> dict[str, float]:
    """Return what all frontends answer together."""
    context = multiprocessing.get_context("spawn")
    results, frontends = context.Queue(), [psutil.Process(pid) for pid in pids]
    arguments = [(url, bodies, options.connections, options.seconds, results) for url in urls]
    processes = [context.Process(target=load, args=each) for each in arguments]
    for process in processes:
        process.start()
    before, began = sum(map(cpu, frontends)), time.monotonic()
    counted = [results.get(timeout=options.seconds + 120) for _ in processes]
    used, took = sum(map(cpu, frontends)) - before, time.monotonic() - began
    for process in processes:
        process.join()
    requests = sum(count for count, _ in counted)
    return {
        "requests_per_second": round(sum(count / seconds for count, seconds in counted), 1),
        "cpu_ms_per_request": round(1000 * used / max(1, requests), 3),
        "cores_of_frontends": round(used / took, 2),
        "requests": requests,
    }


def with_frontends(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure ``number`` frontends."""
    started = [start_frontend(MAX_REQUESTS) for _ in range(number)]
    stub = None
    try:
        for process, _, _ in started:
            threading.Thread(target=_drain, args=[process], daemon=True).start()
        urls, pids = [url for _, url, _ in started], [process.pid for process, _, _ in started]
        stub = Stub([control for _, _, control in started])
        deadline = time.monotonic() + 60
        while any(httpx.get(f"{url}/ready", trust_env=False).status_code != httpx.codes.OK for url in urls):
            assert time.monotonic() < deadline, "the stub instance didn't join"
            time.sleep(0.1)
        texts = [body(f"What is {one} plus one? " * 8, 1, stream=False) for one in range(200)]
        question = {"type": "text", "text": "What is in the picture?"}
        pictures = [
            body([{"type": "image_url", "image_url": {"url": picture(seed)}}, question], 1, False)
            for seed in range(options.pictures)
        ]
        return {
            "frontends": number,
            "text": measure(urls, pids, texts, options),
            "image_1080p": measure(urls, pids, pictures, options),
        }
    finally:
        if stub is not None:
            stub.close()
        for process, _, _ in started:
            process.terminate()
            process.wait(20)


def _drain(process: "subprocess.Popen[str]") -> None:
    for _ in process.stdout or ():
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontends", default="1,2")
    parser.add_argument("--connections", type=int, default=16, help="for each frontend")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pictures", type=int, default=32, help="different ones")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.pictures, options.connections = 3.0, 4, 4
    measured = [with_frontends(number, options) for number in map(int, options.frontends.split(","))]
    report({"cores": os.cpu_count(), "connections": options.connections, "measured": measured}, options.out)


if __name__ == "__main__":
    main()
