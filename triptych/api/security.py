"""Who may ask: API keys and CORS, around all endpoints, before anything of a request is read."""

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api.errors import error_body
from triptych.config import FrontendConfig
from triptych.errors import ConfigError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask without a key."""
EXPOSED_HEADERS = ("Retry-After", "X-Correlation-ID", "X-Request-ID")
"""What pages may read of an answer beyond what all may: OpenAI's client obeys the first and tells of the last."""
MAX_KEY = 512


class ApiKeys:
    """Keeps digests alone, under a key of this process: what is in memory can't be used to ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises ConfigError, without the key, for one that no header can carry."""
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(_checked(key)) for key in keys]

    def name_of(self, authorization: str) -> str | None:
        """What the key of an ``Authorization`` header is called here, the same for as long as this process lives; None
        for a key that isn't one. Takes the same time for all of them."""
        scheme, _, key = authorization.partition(" ")
        digest = self._digest(key.strip().encode("utf-8", "surrogateescape"))
        known = False
        for one in self._digests:
            known |= hmac.compare_digest(one, digest)
        return digest.hex() if known and scheme.lower() == "bearer" else None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


class RequireKey:
    """Answers 401 for whoever has no key. For the others, ``scope["state"]["api_key"]`` says which of them asks."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        name = self._keys.name_of(Headers(scope=scope).get("authorization", ""))
        if name is None:
            await _refuse(send)
            return
        scope.setdefault("state", {})["api_key"] = name
        await self._app(scope, receive, send)


def secured(app: ASGIApp, config: FrontendConfig) -> ASGIApp:
    """The app behind what the settings ask for. Raises ConfigError for keys that can't be used."""
    if keys := config.auth.api_keys():
        app = RequireKey(app, ApiKeys(keys))
    if config.cors.allowed_origins:
        # outermost: a browser asks without a key whether it may ask with one
        app = CORSMiddleware(
            app,
            allow_origins=config.cors.allowed_origins,
            allow_methods=config.cors.allowed_methods,
            allow_headers=config.cors.allowed_headers,
            expose_headers=EXPOSED_HEADERS,
            allow_credentials=config.cors.allow_credentials,
        )
    return app


def _checked(key: str) -> bytes:
    if not 0 < len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"an API key is 1 to {MAX_KEY} printable ASCII characters without spaces")
    return key.encode()


async def _refuse(send: Send) -> None:
    message = "this service needs an API key that it knows, as in Authorization: Bearer KEY"
    body = json.dumps(error_body(message, "invalid_request_error", "invalid_api_key")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"www-authenticate", b"Bearer"),
        # a body that nobody reads
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
