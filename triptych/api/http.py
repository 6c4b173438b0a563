"""HTTP as uvicorn speaks it, but with bounds on what comes before the first byte of a body, and with answers for
clients that have closed their side."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triptych.api.errors import error_body
from triptych.api.half_closed import HalfClosed, can_tell

MAX_HEAD = 32 * 2**10
"""Bytes of a request line with all headers."""
HEAD_SECONDS = 10.0
"""For a request's head, from the connection, or from its first byte on a connection that goes on."""
_STEP = 4096


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose request line and headers are too long, or take too long to come. uvicorn takes a client
    that closes its side for one that has gone away; here it gets its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfClosed | None = None
        self._expect_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for the answer to a whole request. HTTP/1.0 has nothing to ask a client with."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or cycle.scope["http_version"] != "1.1":
            return False
        if self._half_closed is None:
            if not can_tell(self.transport):
                return False
            cycle.keep_alive = False  # it is the last one
            self._half_closed = HalfClosed(self.transport, self._may_write)
        return True

    def _may_write(self) -> bool:
        return not (self.pipeline or self.cycle.response_started or self.flow.write_paused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            in_head = self._in_head
            # a head in small steps, so that it is refused before much of it is parsed
            piece = data[:_STEP] if in_head else data
            data = data[len(piece) :]
            super().data_received(piece)
            if in_head and self._in_head:
                self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD:
                self._refuse(431, f"the request's head exceeds {MAX_HEAD} bytes")
            elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_head()  # or the rest of a body that was refused before its end

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1")

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, "the request's head didn't come")

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """In the shape of all errors, whoever can't read it."""
        codes: dict[int, tuple[str, str]] = {
            400: ("Bad Request", "bad_request"),
            408: ("Request Timeout", "head_too_slow"),
            431: ("Request Header Fields Too Large", "head_too_large"),
        }
        phrase, code = codes[status]
        body: dict[str, Any] = error_body(message, "invalid_request_error", code)
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        if self.transport.is_closing():
            return
        if self._in_head:
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + content)
        self.transport.close()
