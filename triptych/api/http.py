"""uvicorn's HTTP protocol with limits on request heads, and with answers for clients that have closed their side."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych.api.errors import error_body
from triptych.api.half_close import HalfCloseWatcher, can_watch

MAX_HEAD = 32 * 2**10
"""Maximum bytes of a request line and all headers."""
HEAD_TIMEOUT = 10.0
"""Time limit for a request's head, counted from the connection, or from its first byte on a reused connection."""
FIRST_REQUEST = 2.0
"""Seconds from the connection in which a client sends its first request, even if the server ends meanwhile. Clients
don't ask again by themselves when a new connection is closed, as they do on one that was idle."""
_STEP = 4096


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose request heads are too long or too slow.

    uvicorn treats a client that closes its side as disconnected; here it gets its answer. Of a client that leaves, it
    tells only the last of its requests; here also the one that is being answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened = self.loop.time()
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfCloseWatcher | None = None
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered; ``cycle`` is the last that came, which may wait behind it."""
        self._expect_head()

    def end_soon(self, idle: float) -> None:
        """End the connection after its next response or, without one, once it has been idle for ``idle`` seconds. A new
        one stays for ``FIRST_REQUEST``, and one with a part of a head for as long as heads may take.

        Responses that haven't begun say so. Those that have can't, so that the client may send another request."""
        self.timeout_keep_alive = idle  # type: ignore[assignment]  # seconds, which needn't be whole
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            if self._head_timer is None or not self._head_bytes:
                since = self.loop.time() - self._opened
                wait = idle if self.cycle else max(idle, FIRST_REQUEST - since)
                self.timeout_keep_alive_task = self.loop.call_later(wait, self.timeout_keep_alive_handler)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer to a complete request. HTTP/1.0 has no interim response to probe with."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or cycle.scope["http_version"] != "1.1":
            return False
        if self._half_closed is None:
            if not can_watch(self.transport):
                return False
            cycle.keep_alive = False  # no further request can follow
            self._half_closed = HalfCloseWatcher(self.transport, self._may_write)
        return True

    def _may_write(self) -> bool:
        return not (self.pipeline or self.cycle.response_started or self.flow.write_paused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        if (cycle := self._answering) is not None and not cycle.response_complete:
            # uvicorn only tells the last request that came; a stream before it would go on without a client
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            in_head = self._in_head
            # parse a head in small steps, so that an oversized one is refused early
            chunk = data[:_STEP] if in_head else data
            data = data[len(chunk) :]
            super().data_received(chunk)
            if in_head and self._in_head:
                self._head_bytes += len(chunk)
            if self._head_bytes > MAX_HEAD:
                self._refuse(431, f"the request's head exceeds {MAX_HEAD} bytes")
            elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_head()  # also covers the rest of a body that was refused early

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._cancel_head_timer()
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1")

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._refuse, 408, "the request's head took too long")

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Send an error in the API's format, unless a body is under way, and close the connection."""
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
