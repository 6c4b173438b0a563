"""Middleware that gives every request a record and an id, and reports the record when the request has ended."""

import logging
import re
import secrets
from collections.abc import Callable, Sequence

from blake3 import blake3
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.clock import Clock
from triptych.observe.requests import RequestRecord

log = logging.getLogger(__name__)

_SALT = secrets.token_bytes(32)
"""Key of the digests that stand for clients, so that they mean nothing outside this process."""

REQUEST_ID = "x-request-id"
CORRELATION_ID = "x-correlation-id"
TRACEPARENT = "traceparent"
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

Observer = Callable[[RequestRecord], None]


class RequestRecordMiddleware:
    """ASGI middleware. Sets ``scope["state"]["record"]`` to the request's record.

    Keeps the client's request and correlation ids if they are safe to log and send back. Every response carries its
    request's id, and the client's correlation id if there is one."""

    def __init__(self, app: ASGIApp, clock: Clock, observers: Sequence[Observer], client_header: str = "") -> None:
        """``client_header`` names the client of a request without an API key; empty if its address does."""
        self._app = app
        self._clock = clock
        self._observers = observers
        self._client_header = client_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(
            id=_client_id(headers, REQUEST_ID) or secrets.token_hex(16),
            method=scope["method"] if scope["method"] in METHODS else "other",
            clock=self._clock,
            correlation=_client_id(headers, CORRELATION_ID),
            client=self._client_name(scope, headers),
            traceparent=headers.get(TRACEPARENT, ""),
        )

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                answer = MutableHeaders(scope=message)
                answer[REQUEST_ID] = record.id
                if record.correlation:
                    answer[CORRELATION_ID] = record.correlation
            await send(message)

        scope.setdefault("state", {})["record"] = record
        try:
            await self._app(scope, receive, recording_send)
        except Exception:
            record.status = 500
            raise
        finally:
            record.ending.close()
            record.ended = record.now()
            record.handler = getattr(scope.get("route"), "path", "unknown")
            self._report(record)

    def _client_name(self, scope: Scope, headers: Headers) -> str:
        if name := scope.get("state", {}).get("api_key"):
            return f"key {name}"
        if self._client_header and (given := headers.get(self._client_header)):
            return "key " + blake3(given.encode(), key=_SALT).hexdigest(16)
        client = scope.get("client")
        return "address " + (str(client[0]) if client else "unknown")

    def _report(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except Exception:  # a failing observer must not fail the request
                log.exception("couldn't report request %s", record.id)


def _client_id(headers: Headers, name: str) -> str:
    """Return the id that the client sent in the header, or an empty string if it is missing or unsafe."""
    given = headers.get(name, "")
    return given if _ID.fullmatch(given) else ""
