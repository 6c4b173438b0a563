"""What a client waits beside another that misbehaves, in each way of the table in docs/security.md.

    python -m bench.neighbour demo --out bench/results/neighbour.json
    python -m bench.neighbour demo --only bodies,fetches --requests 20

A client asks one question after the other, half of them about a picture. It does so alone, then beside a process that
misbehaves with another API key. Both are done in turns for each way, ``--repeat`` times. It fails with exit code 1 if
the 99th percentile beside exceeds ``--limit`` times that alone, a question isn't answered, or the other process ends.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from triptych.cli import flags
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.load.client import Sample, closed_loop, percentile
from triptych.measure.load.pictures import animation, data_url, picture
from triptych.measure.load.questions import chat_body, content, words
from triptych.topology import Topology

GOOD, BAD = "good-key-0123456789", "bad-key-0123456789"
MODEL = "model"
DRIP = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
DRIP_SECONDS = 0.5
SETTLE_SECONDS = 2.0
"""Seconds before questions are asked beside a client, and after it has gone."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a service is, for one that misbehaves."""

    host: str
    port: int
    control: int
    drip: int
    """Port of a web server that never finishes its answers."""

    def head(self, path: str, *more: str, method: str = "POST") -> bytes:
        lines = (f"{method} {path} HTTP/1.1", f"Host: {self.host}", f"Authorization: Bearer {BAD}", *more)
        return "\r\n".join([*lines, "", ""]).encode()


Way = Callable[[Place, httpx.AsyncClient, Iterator[int]], Awaitable[int | None]]
"""Misbehaves once; numbers are unique. It is done again when it ends, also with an error. Returns the first digit of an
answer's status, if it reads one."""

OUTCOMES = ("begun", "broken off", "2xx", "3xx", "4xx", "5xx")


def chat(**more: Any) -> Callable[[object], dict[str, Any]]:
    fields = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, **more}
    return lambda message: fields | {"messages": [{"role": "user", "content": message}]}


def posts(body: Callable[[Place, int], object], path: str = "/v1/chat/completions") -> Way:
    """Post JSON and read the answer."""

    async def way(place: Place, http: httpx.AsyncClient, numbers: Iterator[int]) -> int:
        answer = await http.post(path, json=body(place, next(numbers)))
        await asyncio.sleep(0.0 if answer.is_success else 0.1)
        return answer.status_code // 100

    return way


def sends(head: Callable[[Place], bytes], piece: bytes = b"", pause: float = 60.0) -> Way:
    """Send bytes on a connection, then the same piece again and again; read nothing."""

    async def way(place: Place, _: httpx.AsyncClient, __: Iterator[int]) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (place.host, place.port))
            await loop.sock_sendall(connection, head(place))
            while True:
                await asyncio.sleep(pause)
                await loop.sock_sendall(connection, piece)

    return way


async def is_silent(place: Place, _: httpx.AsyncClient, __: Iterator[int]) -> None:
    """Connect to the control port and say nothing."""
    with socket.socket() as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (place.host, place.control))
        await asyncio.sleep(3.0)


def video(number: int) -> list[dict[str, Any]]:
    return [{"type": "video_url", "video_url": {"url": data_url(animation(number, 60, 320, 240), "video/gif")}}]


def links(place: Place, number: int) -> list[dict[str, Any]]:
    urls = (f"http://{place.host}:{place.drip}/{number}/{index}" for index in range(8))
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def schema(number: int) -> dict[str, Any]:
    """A grammar that takes long to compile, and that no other request has."""
    names = [f"field_{number}_{index}" for index in range(300)]
    form = {"type": "object", "properties": {name: {"type": "string", "maxLength": 90} for name in names}}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": form | {"required": names}}}


def with_length(body: bytes) -> tuple[str, str]:
    return "Content-Type: application/json", f"Content-Length: {len(body)}"


def unread(place: Place) -> bytes:
    """A request whose answer is long: log probabilities of all its tokens."""
    body = json.dumps(chat(stream=True, max_tokens=1500, logprobs=True, top_logprobs=20)("hello")).encode()
    return place.head("/v1/chat/completions", *with_length(body)) + body


LARGE = data_url(np.random.default_rng(0).bytes(6 * 2**20))
"""No picture, in 8 MiB of base64."""

WAYS: Mapping[str, tuple[str, int, Way]] = {
    "queue": ("queue of requests", 300, posts(lambda _, n: chat(n=4)(words(n, 40)))),
    "instances": ("share of instances", 64, posts(lambda _, n: chat(max_tokens=400)(words(n, 400)))),
    "memory": ("memory of bodies, media and unread answers", 16, posts(
        lambda _, n: chat()([{"type": "image_url", "image_url": {"url": LARGE}}] * 3))),
    "uuids": ("media kept by `uuid`", 16, posts(
        lambda _, n: chat()([content([picture(n)], "?")[0] | {"uuid": f"bad-{n}"}]))),
    "heads": ("sending a head", 200, sends(lambda place: place.head("/v1/models", method="GET")[:-2], b"X: y\r\n", 1)),
    "bodies": ("sending a body", 200, sends(
        lambda place: place.head("/v1/chat/completions", "Content-Length: 9000000"), bytes(1000), 0.2)),
    "fetches": ("fetching media", 64, posts(lambda place, n: chat()(links(place, n)))),
    "grammars": ("threads for planning and for checks of grammars", 16, posts(
        lambda _, n: chat(response_format=schema(n))(words(n, 2000)))),
    "videos": ("preparing media on encode instances", 16, posts(lambda _, n: chat()(video(n)))),
    "streams": ("reading a stream", 64, sends(unread)),
    "viewers": ("snapshots of `/ui`", 64, sends(lambda place: place.head("/ui/events", method="GET"))),
    "stored": ("stored responses", 16, posts(
        lambda _, n: {"model": MODEL, "input": words(n, 2000), "max_output_tokens": 4, "store": True},
        "/v1/responses")),
    "control": ("connections to the control port", 200, is_silent),
}  # fmt: skip
"""For each way: the line of the table, how often it is done at once, and how."""


def misbehave(place: Place, name: str, counts: Any) -> None:
    """Run as a process that is killed when it is over. ``counts``, in shared memory, has one number for each of
    ``OUTCOMES``. Errors other than of its connections end the process."""

    async def run() -> None:
        _, times, way = WAYS[name]
        numbers = itertools.count(10**6)
        limits = httpx.Limits(max_connections=None)
        auth = {"Authorization": f"Bearer {BAD}"}
        base = f"http://{place.host}:{place.port}"
        async with httpx.AsyncClient(base_url=base, headers=auth, trust_env=False, timeout=60, limits=limits) as http:

            async def again() -> None:
                while True:
                    counts[0] += 1
                    try:
                        if (digit := await way(place, http, numbers)) is not None:
                            counts[digit] += 1
                    except (OSError, httpx.HTTPError):
                        counts[1] += 1
                        await asyncio.sleep(0.1)

            await asyncio.gather(*(again() for _ in range(times)))

    asyncio.run(run())


async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write(DRIP)
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(DRIP_SECONDS)


async def questions(url: str, numbers: Iterator[int], count: int) -> list[Sample]:
    """Ask as the client that behaves."""
    bodies = []
    for number in itertools.islice(numbers, count):
        message = content([picture(number)], "What is this?") if number % 2 else words(number, 60)
        bodies.append(chat_body(MODEL, message, 8))
    auth = {"Authorization": f"Bearer {GOOD}"}
    async with httpx.AsyncClient(base_url=url, headers=auth, trust_env=False, timeout=120) as http:
        return await closed_loop(http, bodies, 1)


async def beside(
    place: Place, url: str, name: str, numbers: Iterator[int], count: int
) -> tuple[list[Sample], Counter[str]]:
    """Return the answers, and what the other one got. Raises RuntimeError if it has ended."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", len(OUTCOMES), lock=False)
    process = context.Process(target=misbehave, args=[place, name, counts], daemon=True)
    process.start()
    try:
        while not counts[0] and process.is_alive():
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_SECONDS)
        answers = await questions(url, numbers, count)
        if not process.is_alive():
            raise RuntimeError(f"the process that misbehaves in the way {name} has ended")
        return answers, Counter(dict(zip(OUTCOMES, counts, strict=True)))
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        await asyncio.sleep(SETTLE_SECONDS)


def compared(alone: Sequence[Sample], other: Sequence[Sample]) -> dict[str, Any]:
    """Times in seconds; the ratio is of the 99th percentiles."""
    one, two = ([sample.total for sample in samples if not sample.error] for samples in (alone, other))
    refused = sorted({sample.error for sample in (*alone, *other) if sample.error})
    p99 = [percentile(times, 0.99) if times else float("nan") for times in (one, two)]
    p50 = [statistics.median(times) if times else float("nan") for times in (one, two)]
    return {"p50_s": p50, "p99_s": p99, "ratio": p99[1] / p99[0], "refused": refused}


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"{GOOD}\n{BAD}\n")
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = ServeConfig(
        model=flags.model_folder(arguments.model),
        engine=EngineConfig(threads=1, kv_cache_tokens=65536),
        frontend=FrontendConfig.of(port=0),
    ).having({
        "served_model_name": MODEL, "api_key_file": keys, "response_store": str(folder / "responses"),
        "allowed_media_domains": (f"127.0.0.1:{port}",), "allowed_media_networks": ("127.0.0.1/32",),
    })  # fmt: skip
    lines: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    async with server, Service(config, Topology.parse(arguments.topology), lines.append) as service:
        await service.wait_until_ready()
        url, numbers = service.url, itertools.count(1)
        place = Place("127.0.0.1", httpx.URL(url).port or 0, int(service.control.rpartition(":")[2]), port)
        await questions(url, numbers, arguments.requests // 2)
        for name in arguments.only:
            alone: list[Sample] = []
            other: list[Sample] = []
            total: Counter[str] = Counter()
            for _ in range(arguments.repeat):
                alone += await questions(url, numbers, arguments.requests)
                answers, counts = await beside(place, url, name, numbers, arguments.requests)
                other, total = other + answers, total + counts
            found[name] = compared(alone, other) | {"misbehaved": total}
            print(f"{name:10} {json.dumps(found[name])}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--topology", default="1E1PD")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--requests", type=int, default=20, help="questions in a row")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(arguments, Path(folder)))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    bad = [name for name, one in found.items() if not one["ratio"] <= arguments.limit or one["refused"]]
    print("beyond the limit:", ", ".join(bad) or "none")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
