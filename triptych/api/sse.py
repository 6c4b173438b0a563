"""Server-sent events and other bodies in pieces: a response that closes its source when the client disconnects."""

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.errors import body_of
from triptych.errors import TriptychError

log = logging.getLogger(__name__)


def event(data: Any) -> bytes:
    """Return an event with a JSON payload."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """Return an event with a name and a JSON payload."""
    return b"event: " + name.encode() + b"\n" + event(data)


def error_event(error: TriptychError) -> bytes:
    """Return the event that ends a stream with an error, in the format of an error response."""
    return event(body_of(error))


def packed_part(part: bytes) -> bytes:
    """Return a part of a gzip stream compressed, without its header. It refers to nothing before it, so that streams
    that begin at different times can share it."""
    packer = zlib.compressobj(level=1, wbits=-zlib.MAX_WBITS)
    return packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH)


GZIP_HEADER = bytes.fromhex("1f8b0800000000000003")
"""What a stream without a name and a time begins with (RFC 1952)."""
DONE = b"data: [DONE]\n\n"
LAST_EVENT = 0.2
"""Seconds for the rest of a stream that its source has ended."""


class BodyStream(Response):
    """Sends events, or pieces of another body, one at a time: a slow client only slows down its own stream.

    Ends the stream when a send blocks for ``send_timeout`` seconds: the client is then considered disconnected. A
    source that ends at once when ``ended`` is set may give it, so that a client that reads nothing can't hold it."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        send_timeout: float,
        ended: asyncio.Event | None = None,
        *,
        encoding: str = "",
        media_type: str = "text/event-stream",
    ) -> None:
        """``encoding`` is the events' content encoding; empty for none."""
        headers = {"Content-Encoding": encoding, "Vary": "Accept-Encoding"} if encoding else {}
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=own | headers, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._send_timeout = send_timeout
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        disconnect = asyncio.create_task(disconnected(receive))
        tasks = [sending, disconnect]
        if self._ended is not None:
            tasks.append(asyncio.create_task(_wait(self._ended)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not (sending.done() or disconnect.done()):
                await asyncio.wait({sending, disconnect}, timeout=LAST_EVENT, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not disconnect.done():
                sending.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in events:
                try:
                    async with asyncio.timeout(self._send_timeout):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    log.info("a stream's client read nothing for %g s", self._send_timeout)
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
