"""Streams chat requests to an OpenAI-compatible server, and records when each piece of an answer came."""

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMELINE = {"x-triptych-timeline": "true"}
"""Header that asks Triptych for the request's timeline; other servers ignore it."""
STREAMED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
"""Fields of a request whose answer's tokens are counted, with or without text of their own. A server that ignores the
usage so far, such as llama.cpp, is taken to send a token in each chunk with text."""


class ErrorAnswer(Exception):
    """The server answered with an error, or the stream of its answer ended with one."""

    def __init__(self, status: int, body: str) -> None:
        """``body`` is the error in OpenAI's form; of anything else the beginning is the message."""
        self.status, self.code, message = status, "", body[:200]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(body)["error"]
            self.code, message = str(error["code"]), str(error["message"])
        super().__init__(f"{status}: {message}")


@dataclass
class Sample:
    """One answer as the client saw it. Times in seconds since the request began; ``token_times`` has one per chunk that
    brought tokens, the first of them ``first_tokens``."""

    token_times: list[float] = field(default_factory=list)
    tokens: int = 0
    first_tokens: int = 1
    prompt_tokens: int = 0
    total: float = 0.0
    error: str = ""
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0]

    @property
    def tpot(self) -> float:
        """Time per output token after those that came first."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, self.tokens - self.first_tokens)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


async def chunks(
    http: httpx.AsyncClient, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Send a chat request that streams, given as JSON, and yield the objects of its answer. Raises ErrorAnswer, and
    httpx.TransportError when the connection ends before the answer does."""
    sent = {"content-type": "application/json", **(headers or {})}
    async with http.stream("POST", "/v1/chat/completions", content=body, headers=sent) as response:
        if response.status_code != httpx.codes.OK:
            raise ErrorAnswer(response.status_code, (await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                chunk = json.loads(text)
                if "error" in chunk:
                    raise ErrorAnswer(response.status_code, text)
                yield chunk
    raise httpx.RemoteProtocolError("the stream ended early")


async def ask(http: httpx.AsyncClient, body: bytes) -> Sample:
    """Send one request, given as JSON, and return its answer; a failure is the sample's ``error``."""
    sample = Sample()
    began = time.perf_counter()
    try:
        async for chunk in chunks(http, body, TIMELINE):
            _take(sample, chunk, time.perf_counter() - began)
    except (ErrorAnswer, TimeoutError) as error:
        sample.error = str(error)
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.total = time.perf_counter() - began
    if not sample.token_times and not sample.error:
        sample.error = "no token came"
    return sample


async def closed_loop(http: httpx.AsyncClient, bodies: Sequence[bytes], concurrency: int) -> list[Sample]:
    """Keep ``concurrency`` requests running until all are done."""
    waiting: Iterator[bytes] = iter(bodies)

    async def worker() -> list[Sample]:
        return [await ask(http, body) for body in waiting]

    return [sample for samples in await asyncio.gather(*(worker() for _ in range(concurrency))) for sample in samples]


async def open_loop(http: httpx.AsyncClient, bodies: Sequence[bytes], times: Sequence[float]) -> list[Sample]:
    """Send each request at its time, in seconds from now, whether or not earlier ones are done."""
    began, running = time.perf_counter(), []
    async with asyncio.TaskGroup() as group:  # a caller that is cancelled leaves no request behind
        for body, at in zip(bodies, times, strict=True):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            running.append(group.create_task(ask(http, body)))
    return [one.result() for one in running]


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """Return the seconds at which ``count`` requests are sent, ``rate`` a second on average; the first at 0."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least that share of the values doesn't exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def text_of(chunk: Mapping[str, Any]) -> str:
    """Return the text that a chunk of an answer adds."""
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def said(chunk: Mapping[str, Any]) -> str:
    """Return all that a chunk of an answer adds: text, and calls of functions."""
    calls = (call["function"] for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or ())
    return text_of(chunk) + "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)


def _take(sample: Sample, chunk: dict[str, Any], now: float) -> None:
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    usage, before = chunk.get("usage"), sample.tokens
    if usage:
        sample.tokens, sample.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    elif any("content" in delta and "role" not in delta for delta in deltas):
        sample.tokens += 1
    if deltas and sample.tokens > before:
        if not sample.token_times:
            sample.first_tokens = sample.tokens - before
        sample.token_times.append(now)
    sample.timeline = chunk.get("timeline", sample.timeline)
