"""Cost of the frontend: CPU per text request and per 1080p image request, and with many concurrent streams.

    python -m bench.frontend --requests 300 --streams 500 --out bench/results/frontend.json

The frontend runs in its own process. Instead of instances, a peer in this process answers at once, over the real
channel. So the measurement covers parsing, fetching, planning, templates, tokens, routing, detokenizing and
streaming, but no model.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

from triptych.clock import SystemClock
from triptych.config import EngineConfig
from triptych.demo import MODEL_DIR
from triptych.messages.channel import Channel, endpoint
from triptych.messages.rows import RowLayout
from triptych.messages.work import Capacity, Generate, Heartbeat, Register, Stop, Tokens
from triptych.models.registry import identity_of
from triptych.topology import Role

CHAT = "/v1/chat/completions"
WORD = 300
"""A token that decodes to a word."""


class Peer:
    """Replaces an EPD instance, in a thread. Each request gets its tokens ``gap`` seconds apart, in step with one of
    ``groups``."""

    def __init__(self, control: str, gap: float, groups: int = 1) -> None:
        host, _, port = control.rpartition(":")
        self._frontend = endpoint(host, port)
        self._channel = Channel(SystemClock())
        self._gap = gap / groups
        self._groups = groups
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        self._channel.close()

    def _run(self) -> None:
        capacity, model = Capacity(2**10, 2**10), identity_of(MODEL_DIR)
        layout = RowLayout(model.digest, "float32", 4, 16)
        peer = Register("peer", Role.EPD, self._channel.address, [layout], os.getpid(), 1, capacity, 2**20, model=model)
        self._channel.send(self._frontend, peer)
        left: dict[Any, int] = {}
        made: Counter[Any] = Counter()
        turn = 0
        beat = step = time.monotonic()
        while not self._ended.is_set():
            wait = self._gap if left else 0.2
            for message in self._channel.receive(max(0.0, min(wait, step + wait - time.monotonic()))):
                if isinstance(message, Generate):
                    left[message.request] = message.sampling.max_tokens
                elif isinstance(message, Stop):
                    return
            now = time.monotonic()
            if now - beat > 0.3:
                self._channel.send(self._frontend, Heartbeat(self._channel.address))
                beat = now
            if now - step >= self._gap:
                step = now
                turn = (turn + 1) % self._groups
                for request in [one for one in left if hash(one) % self._groups == turn]:
                    left[request] -= 1
                    reason = None if left[request] else "length"
                    self._channel.send(self._frontend, Tokens(request, [WORD], made[request], finish_reason=reason))
                    made[request] += 1
                    if reason:
                        del left[request], made[request]


def picture(seed: int) -> str:
    """Return a 1920 × 1080 JPEG of a smooth random pattern, as a data: URL."""
    small = np.random.default_rng(seed).integers(0, 256, (27, 48, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((1920, 1080), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def body(content: Any, tokens: int, stream: bool) -> bytes:
    """Return a request body, encoded in advance."""
    request = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    return json.dumps(request | {"stream": stream, "ignore_eos": True}).encode()


async def one_by_one(client: httpx.AsyncClient, frontend: psutil.Process, bodies: list[bytes]) -> dict[str, float]:
    """Send requests one by one. Returns the frontend's CPU time and the latency per request, in ms."""
    for request in bodies[: len(bodies) // 10 + 1]:
        (await client.post(CHAT, content=request)).raise_for_status()
    before, took = cpu(frontend), []
    for request in bodies:
        began = time.monotonic()
        (await client.post(CHAT, content=request)).raise_for_status()
        took.append(time.monotonic() - began)
    used = cpu(frontend) - before
    return {
        "requests": len(bodies),
        "body_kib": round(sum(map(len, bodies)) / len(bodies) / 1024, 1),
        "cpu_ms": round(1000 * used / len(bodies), 3),
        "latency_ms_p50": round(1000 * statistics.median(took), 3),
    }


async def streams(client: httpx.AsyncClient, frontend: psutil.Process, count: int, tokens: int) -> dict[str, Any]:
    """Run ``count`` streams that start together."""
    gaps: list[float] = []
    request = body("Tell me something long.", tokens, stream=True)

    async def read() -> None:
        last = time.monotonic()
        async with client.stream("POST", CHAT, content=request) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

    before, began = cpu(frontend), time.monotonic()
    await asyncio.gather(*(read() for _ in range(count)))
    took, used = time.monotonic() - began, cpu(frontend) - before
    gaps.sort()
    return {
        "streams": count,
        "tokens_each": tokens,
        "seconds": round(took, 2),
        "cores_of_frontend": round(used / took, 3),
        "cpu_us_per_token": round(1e6 * used / (count * tokens), 1),
        "gap_ms_p50": round(1000 * gaps[len(gaps) // 2], 1),
        "gap_ms_p99": round(1000 * gaps[int(0.99 * len(gaps))], 1),
        "memory_mib": round(frontend.memory_info().rss / 2**20, 1),
    }


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def start_frontend(max_queue: int, checkout: Path | None = None) -> tuple[subprocess.Popen[str], str, str]:
    """Start a frontend process, of another ``checkout`` if one is given. Returns it with its URL and its control
    address."""
    command = [sys.executable, "-m", "triptych", "serve", "demo", "--role", "frontend", "--port", "0"]
    command += ["--max-queue", str(max_queue), "--max-num-seqs", str(max_queue), "--lease-expiry", "20"]
    env = {**os.environ, "PYTHONPATH": str(checkout)} if checkout else os.environ
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=checkout)
    assert process.stdout is not None
    url = control = ""
    for line in process.stdout:
        if line.startswith("ready: "):
            url = line.split(" on ")[1].strip().removesuffix("/v1")
        if "--join" in line:
            control = line.split("--join ")[1].split()[0]
            break
    return process, url, control


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    process, url, control = start_frontend(max(options.streams + 16, EngineConfig().max_num_seqs))
    drain: Callable[[], object] = lambda: [None for _ in process.stdout or ()]  # noqa: E731
    threading.Thread(target=drain, daemon=True).start()
    frontend = psutil.Process(process.pid)
    limits = httpx.Limits(max_connections=None)
    try:
        results: dict[str, Any] = {"memory_mib_idle": round(frontend.memory_info().rss / 2**20, 1)}
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as client:
            peer = Peer(control, gap=0.0005)
            while not (await client.get("/v1/models")).json()["data"][0]["max_model_len"] or not await joined(client):
                await asyncio.sleep(0.05)
            texts = [body(f"What is {number} plus one? " * 8, 1, stream=False) for number in range(options.requests)]
            results["text"] = await one_by_one(client, frontend, texts)
            urls = [picture(seed) for seed in range(min(options.requests, 100))]
            question = {"type": "text", "text": "What is in the picture?"}
            images = [body([{"type": "image_url", "image_url": {"url": one}}, question], 1, False) for one in urls]
            results["image_1080p"] = await one_by_one(client, frontend, images)
            peer.close()
            peer = Peer(control, gap=options.gap)
            while not await joined(client):
                await asyncio.sleep(0.05)
            results["streams"] = await streams(client, frontend, options.streams, options.tokens)
            peer.close()
        return results
    finally:
        process.terminate()
        process.wait(20)


async def joined(client: httpx.AsyncClient) -> bool:
    return (await client.post(CHAT, content=body("x", 1, stream=False))).status_code == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between a stream's tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = json.dumps(asyncio.run(measure(options)), indent=2)
    print(result)
    if options.out:
        options.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
