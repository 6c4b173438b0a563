"""Sends questions to a service over HTTP, many at once, and records what came when."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import httpx

from triptych.measure.chaos.questions import Question
from triptych.measure.load.client import ErrorAnswer, chunks, said

HUNG_SECONDS = 120.0
"""Seconds without an end after which a request counts as hung."""
RETRIES = 20
RETRY_SECONDS = 0.1
"""Seconds between two attempts of a client whose connection ended."""


class End(StrEnum):
    """How a request ended."""

    WHOLE = "whole"
    """Answered, to the end."""
    ERROR = "error"
    """The service answered with an error, or the stream ended with one."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    HUNG = "hung"
    LEFT = "left"
    """The client disconnected, as it was meant to."""


@dataclass
class Outcome:
    """What a client got. Times are seconds since the run began."""

    question: Question
    sent: float
    end: End = End.BROKEN
    first_token: float | None = None
    ended: float = 0.0
    longest_gap: float = 0.0
    """Seconds between two pieces of the answer, at most."""
    error: str = ""
    """The error's code, or what the client noticed."""
    status: int = 0
    """The HTTP status of an error."""
    text: str = ""
    broken: int = 0
    """Earlier attempts whose connection broke."""

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


@dataclass(frozen=True)
class Client:
    """How questions are sent."""

    url: str
    model: str
    concurrency: int
    """Requests at once; each further one is sent when an earlier one ends."""
    retries: bool = False
    """Whether a client whose connection ends asks again."""
    hung_seconds: float = HUNG_SECONDS
    """Seconds without an end after which a request counts as hung; each attempt has them."""


@dataclass
class _Run:
    client: httpx.AsyncClient
    settings: Client
    began: float

    @property
    def now(self) -> float:
        return time.monotonic() - self.began


async def send(client: Client, questions: Sequence[Question], salt: str, began: float | None = None) -> list[Outcome]:
    """Send all questions and return their outcomes, in the same order. ``salt`` must differ from that of earlier runs,
    so that nothing that they left in a cache is used. ``began`` is as in ``asking``."""
    slots = asyncio.Semaphore(client.concurrency)
    bodies = [question.body(client.model, salt) for question in questions]
    async with asking(client, began) as ask:

        async def one(question: Question, body: bytes) -> Outcome:
            async with slots:
                return await ask(question, body)

        return await asyncio.gather(*map(one, questions, bodies))


@contextlib.asynccontextmanager
async def asking(
    client: Client, began: float | None = None
) -> AsyncIterator[Callable[[Question, bytes], Awaitable[Outcome]]]:
    """Yield what sends one question with its body, on a connection of its own. ``began`` is when the run began by
    ``time.monotonic``, now if it is None."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=client.url, trust_env=False, timeout=None, limits=limits) as http:
        run = _Run(http, client, time.monotonic() if began is None else began)
        yield lambda question, body: _ask(run, question, body)


async def _ask(run: _Run, question: Question, body: bytes) -> Outcome:
    outcome = Outcome(question, run.now)
    try:
        async with asyncio.timeout(question.leaves_after or run.settings.hung_seconds) as limit:
            await _attempts(run, outcome, body, limit)
    except TimeoutError:
        outcome.end = End.HUNG if question.leaves_after is None else End.LEFT
    outcome.ended = run.now
    return outcome


async def _attempts(run: _Run, outcome: Outcome, body: bytes, limit: asyncio.Timeout) -> None:
    while True:
        try:
            await _attempt(run, outcome, body)
            return
        except httpx.TransportError as error:
            outcome.end, outcome.error = End.BROKEN, type(error).__name__
        if not run.settings.retries or outcome.broken >= RETRIES:
            return
        outcome.broken += 1
        outcome.text, outcome.first_token = "", None
        await asyncio.sleep(RETRY_SECONDS)
        if outcome.question.leaves_after is None:  # the service counts from the new request
            limit.reschedule(asyncio.get_running_loop().time() + run.settings.hung_seconds)


async def _attempt(run: _Run, outcome: Outcome, body: bytes) -> None:
    """Send a request and read its answer. Raises httpx.TransportError when the connection ends first."""
    last = run.now
    try:
        async for chunk in chunks(run.client, body):
            if text := said(chunk):
                now = run.now
                if outcome.first_token is None:
                    outcome.first_token = now
                else:
                    outcome.longest_gap = max(outcome.longest_gap, now - last)
                last = now
                outcome.text += text
    except ErrorAnswer as error:
        outcome.end, outcome.error, outcome.status = End.ERROR, error.code, error.status
        return
    outcome.end, outcome.error = End.WHOLE, ""
