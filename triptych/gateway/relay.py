"""Sends requests to language servers and passes on their answers. A request goes to another server, or waits, if its
server fails before the client has a part of the answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from triptych.errors import DeadlineExceeded, InstanceLost
from triptych.gateway.answers import (
    MAX_ANSWER_BYTES,
    MAX_ERROR_BYTES,
    ServerAnswer,
    ServerFailed,
    ServerFault,
    is_refusal,
    read_answer,
    read_events,
    refusal,
    without_addresses,
)
from triptych.gateway.servers import Needs, Server, Servers

T = TypeVar("T")

MAX_FAILURES = 3
"""Servers that may fail with one request."""
MAX_LOSSES = 2
"""Servers that may be lost with one request, which may be what ends them."""
FAILURES = (ServerFailed, httpx.HTTPError, httpx.StreamError)


@dataclass(frozen=True)
class Call:
    """A request, as it is sent to a server."""

    path: str
    form: type[ServerAnswer]
    """What is read of its answer."""
    request: str
    """Its id."""
    client: str
    cost: float
    """About its tokens, by which clients are charged for their turns."""
    num_choices: int
    """Answers that it asks for, each of which takes room at a server."""
    needs: Needs
    prepared: "Callable[[str], AbstractContextManager[Prepared]]"
    """Prepares it for a server, given the model's name there. Inside it is at that server."""
    remaining: Callable[[], float]
    """Returns the seconds until its deadline, or raises DeadlineExceeded."""
    hold: Callable[[int], object]
    """Called with bytes of the answer that are kept, negative ones when they aren't any more; it may raise."""
    moved: Callable[[], object]
    """Called when it goes to another server."""


@dataclass(frozen=True)
class Prepared:
    """What a server gets."""

    body: Iterator[bytes]
    """In pieces."""
    failed: "asyncio.Future[None] | None" = None
    """Has an error once the server can't answer for want of rows."""


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer, from a server."""

    data: bytes
    says: ServerAnswer | None
    server: str


class _Attempts:
    """The servers that have failed with a request."""

    def __init__(self, servers: Servers, call: Call) -> None:
        self._servers = servers
        self._call = call
        self.failed: list[Server] = []
        self._lost: set[asyncio.Future[None]] = set()
        """What stands for the lives of servers that ended with the request."""

    async def add(self, one: "_Attempt", failure: Exception, *, begun: bool = False) -> None:
        """Note a failure. Raises InstanceLost if the request can't go to another server."""
        if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
            self._servers.lose(one.server, type(failure).__name__)  # the request hasn't reached it
        else:
            await self._servers.suspect(one.server)
            self.failed.append(one.server)
            if one.lost.done():
                self._lost.add(one.lost)
        if begun or len(self.failed) >= MAX_FAILURES or len(self._lost) >= MAX_LOSSES:
            how = (
                str(failure) if isinstance(failure, ServerFailed) else f"the connection broke: {type(failure).__name__}"
            )
            raise InstanceLost(f"the language server {one.server.name} failed: {how}") from None
        self._call.moved()


@dataclass(frozen=True)
class _Attempt:
    """A request at a server."""

    call: Call
    server: Server
    lost: "asyncio.Future[None]"
    """Done once the server is lost."""
    prepared: Prepared

    async def unless_lost(self, work: Awaitable[T]) -> T:
        """Return the work's result. Raises ServerFailed if the server is lost before, and DeadlineExceeded."""
        working = asyncio.ensure_future(work)
        failed = self.prepared.failed
        first: set[asyncio.Future[Any]] = {working, self.lost, *([failed] if failed else [])}
        try:
            await asyncio.wait(first, timeout=self.call.remaining(), return_when=asyncio.FIRST_COMPLETED)
            if failed is not None and failed.done():
                _raise(failed)
            if working.done():
                return working.result()
            if self.lost.done():
                raise ServerFailed("it was lost")
            raise DeadlineExceeded("the request's deadline passed before it was answered")
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)


class Relay:
    """Passes requests on."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def whole(self, call: Call) -> AnswerPart:
        """Return an answer that isn't streamed. Raises RequestError for a refusal, and ServiceError."""
        attempts = _Attempts(self._servers, call)
        while True:
            async with self._attempt(call, attempts.failed) as one:
                try:
                    return await one.unless_lost(self._whole(one))
                except FAILURES as failure:
                    await attempts.add(one, failure)

    async def streamed(self, call: Call) -> AsyncGenerator[AnswerPart, None]:
        """Yield the events of a streamed answer, as they came. Raises as ``whole``."""
        attempts = _Attempts(self._servers, call)
        while True:
            async with self._attempt(call, attempts.failed) as one:
                begun = False
                try:
                    async with aclosing(self._streamed(one)) as events:
                        async for part in events:
                            begun = True
                            yield part
                    return
                except FAILURES as failure:
                    await attempts.add(one, failure, begun=begun)

    @asynccontextmanager
    async def _attempt(self, call: Call, avoid: Collection[Server]) -> AsyncIterator[_Attempt]:
        turn = self._servers.turn(call.client, call.cost, call.needs, call.num_choices, avoid=avoid)
        try:
            async with asyncio.timeout(call.remaining()):
                server, lost = await turn.__aenter__()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before a language server had room") from None
        try:
            with call.prepared(server.card.model) as prepared:
                yield _Attempt(call, server, lost, prepared)
        finally:
            await turn.__aexit__(None, None, None)

    async def _whole(self, one: _Attempt) -> AnswerPart:
        async with self._asked(one) as response:
            data = await _read(response, MAX_ANSWER_BYTES, one.call.hold)
        says = read_answer(data, one.call.form)
        if not says.choices:
            raise ServerFailed("its answer has no choice")
        return AnswerPart(data, says, one.server.name)

    async def _streamed(self, one: _Attempt) -> AsyncGenerator[AnswerPart, None]:
        asked = self._asked(one)
        response = await one.unless_lost(asked.__aenter__())
        try:
            async with aclosing(read_events(response, one.call.form)) as events:
                begun = False
                while (event := await one.unless_lost(anext(events, None))) is not None:
                    data, says = event
                    if says is not None and says.error is not None:
                        if not begun:
                            raise _first_error(says.error)
                        data = without_addresses(data)
                    begun = begun or says is not None
                    yield AnswerPart(data, says, one.server.name)
        finally:
            await asked.__aexit__(None, None, None)

    @asynccontextmanager
    async def _asked(self, one: _Attempt) -> AsyncIterator[httpx.Response]:
        """Send a request; inside, the server has begun to answer it. Leaving closes the connection unless the answer
        was read to its end, so that the server gives the request up."""
        headers = {"content-type": "application/json", "accept-encoding": "identity", "x-request-id": one.call.request}
        content = _pieces(one.prepared.body)
        url = one.server.url + one.call.path
        async with self._servers.http.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                if not is_refusal(response.status_code):
                    raise ServerFailed(f"it answered {response.status_code}")
                error = read_answer(await _read(response, MAX_ERROR_BYTES, lambda _: None), ServerAnswer).error
                raise refusal(response.status_code, error)
            yield response


def _raise(failed: "asyncio.Future[None]") -> None:
    """Raise why rows are missing: ServerFailed if another attempt may get them."""
    try:
        failed.result()
    except InstanceLost as error:
        raise ServerFailed(str(error)) from None


def _first_error(error: ServerFault) -> Exception:
    """Return what an error means that comes in place of a stream's first part."""
    if isinstance(error.code, int) and is_refusal(error.code):
        return refusal(error.code, error)
    return ServerFailed("it answered with an error")


async def _pieces(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _read(response: httpx.Response, limit: int, hold: Callable[[int], object]) -> bytes:
    """Return a body. Raises ServerFailed if it is longer than ``limit`` bytes, and what ``hold`` raises."""
    data = bytearray()
    try:
        async for piece in response.aiter_raw():
            hold(len(piece))
            data += piece
            if len(data) > limit:
                raise ServerFailed(f"its answer has more than {limit} bytes")
    except BaseException:
        hold(-len(data))
        raise
    return bytes(data)
