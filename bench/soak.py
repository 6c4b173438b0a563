"""Soak test: serves unique images for minutes and checks that no process keeps growing.

    python -m bench.soak --minutes 10
    python -m bench.soak --minutes 0.2 --concurrency 2      # smoke test

Starts ``triptych serve``. A process's memory is the PSS of its anonymous and shared memory, sampled once a second.
Mapped files are left out, because their share depends on other processes. After the first third, in which caches
fill, a line is fitted against the number of answers. A slope above the limit fails with exit code 1.
"""

import argparse
import asyncio
import base64
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from triptych.measure.load.processes import descendants, named_children

LIMIT_MIB = 1.0
"""Per 1000 requests."""


def jpeg(number: int, side: int) -> str:
    """Return an image unique to ``number``, as a data: URL."""
    blocks = np.random.default_rng(number).integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(blocks).resize((side, side)).save(out, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def processes(supervisor: int) -> dict[int, str]:
    """Return the names of all processes of a service by process id."""
    named = named_children(supervisor)
    found = {supervisor: "serve"} | {pid: name for name, pid in named.items()}
    found |= {one: f"worker of {name}" for name, pid in named.items() for one in descendants(pid)}
    return found | dict.fromkeys(descendants(supervisor, without=found), "worker of serve")


def pss_mib(pid: int) -> float:
    found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, found)) / 1024


async def ask(client: httpx.AsyncClient, number: int, side: int) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": jpeg(number, side)}},
        {"type": "text", "text": f"What is {number}?"},
    ]
    body = {"model": "soak", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()


async def load(url: str, pid: int, minutes: float, concurrency: int, side: int) -> dict[str, list[tuple[int, float]]]:
    """(answers so far, MiB) of every process, once a second."""
    end = time.monotonic() + 60 * minutes
    numbers = iter(range(10**9))
    done = 0
    seen: dict[str, list[tuple[int, float]]] = {}

    async def client_loop(client: httpx.AsyncClient) -> None:
        nonlocal done
        while time.monotonic() < end:
            await ask(client, next(numbers), side)
            done += 1

    async def look() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(1)
            for process, name in processes(pid).items():
                try:
                    seen.setdefault(f"{name} ({process})", []).append((done, pss_mib(process)))
                except OSError:
                    continue  # it has ended

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        await asyncio.gather(look(), *(client_loop(client) for _ in range(concurrency)))
    return seen


def show_trouble(lines: Iterable[str]) -> None:
    """Print warnings and errors. Reading also keeps the pipe from filling up."""
    for line in lines:
        if any(word in line for word in ("WARNING", "ERROR", "Error", "Traceback")):
            print(line, end="", flush=True)


def report(seen: dict[str, list[tuple[int, float]]]) -> bool:
    """Print a line per process. Returns whether none of them grows."""
    flat = True
    for name, samples in seen.items():
        later = np.array(samples[len(samples) // 3 :])
        if len(later) < 2 or later[-1, 0] == later[0, 0]:
            continue
        slope = 1000 * np.polyfit(later[:, 0], later[:, 1], 1)[0]
        flat &= slope < LIMIT_MIB
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
    parser.add_argument("--side", type=int, default=256, help="of the images, in pixels")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "triptych", "serve", arguments.model, "--topology", arguments.topology]
    # small enough to be full soon
    command += ["--port", "0", "--served-model-name", "soak", "--encode-cache-mb", "8", "--kv-cache-tokens", "16384"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert server.stdout is not None
    try:
        lines = iter(server.stdout.readline, "")
        url = next(match[0] for line in lines if (match := re.search(r"http://[\d.]+:\d+", line)) and "ready" in line)
        threading.Thread(target=show_trouble, args=[server.stdout], daemon=True).start()
        seen = asyncio.run(load(url, server.pid, arguments.minutes, arguments.concurrency, arguments.side))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    return 0 if report(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
