"""API keys, CORS and web pages: middleware around all endpoints, before any of a request's body is read."""

import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api import anthropic_errors
from triptych.api.errors import error_body
from triptych.api.request_keys import keys_of
from triptych.api.ui_access import UiHeaders, is_local
from triptych.api.ui_files import PAGE, ui_files
from triptych.api.web_pages import is_for_another_page, names_this_machine
from triptych.config import FrontendConfig, is_loopback
from triptych.config.security import RIGHTS
from triptych.errors import ConfigError, Forbidden

log = logging.getLogger(__name__)

UNAUTHENTICATED_PATHS = frozenset({"/health", "/ready", f"{PAGE}/", *ui_files()})
"""Paths that need no key: those of probes, and of the page at ``/ui``, which asks for one."""
EXPOSED_HEADERS = ("Retry-After", "X-Correlation-ID", "X-Request-ID")
"""Response headers that web pages may read: OpenAI's client obeys the first and reports the last."""
PAGE_METHODS = ("DELETE", "GET", "POST")
"""Methods that the pages of allowed origins may use: the API's."""
MAX_KEY = 512


class ApiKeys:
    """Set of valid API keys. Keeps keyed digests only, so that no key can be read from memory."""

    def __init__(self, keys: Iterable[str], rights: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        """``rights`` are those of keys that have any. Raises ConfigError, which doesn't quote the key, for a key that
        no header can carry."""
        self._secret = secrets.token_bytes(32)
        given = {self._digest(_checked(key)): frozenset(rights.get(key, ())) for key in keys}
        self._digests = list(given)
        self._rights = {digest.hex(): one for digest, one in given.items()}

    def identify(self, key: str) -> str | None:
        """Return a name for a key, or None if it is not valid.

        A key's name stays the same while this process runs. Takes the same time for every key."""
        digest = self._digest(key.encode("utf-8", "surrogateescape"))
        known = False
        for one in self._digests:
            known |= hmac.compare_digest(one, digest)
        return digest.hex() if known else None

    def rights_of(self, name: str) -> frozenset[str]:
        """Return the rights of the key of that name."""
        return self._rights[name]

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


class RequireKey:
    """ASGI middleware. Answers 401 without a valid key, and sets ``scope["state"]["api_key"]`` to the key's name,
    and ``scope["state"]["rights"]`` to its rights."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNAUTHENTICATED_PATHS:
            await self._app(scope, receive, send)
            return
        names = map(self._keys.identify, keys_of(Headers(scope=scope)))
        if (name := next(filter(None, names), None)) is None:
            message = "a valid API key is required: Authorization: Bearer KEY"
            await _refuse(send, scope["path"], 401, message, "invalid_api_key", (b"www-authenticate", b"Bearer"))
            return
        scope.setdefault("state", {}).update(api_key=name, rights=self._keys.rights_of(name))
        await self._app(scope, receive, send)


class RefusePages:
    """ASGI middleware of a service without keys. Answers 403 to web pages of others.

    At a loopback address, names in ``Host`` that aren't this machine's, nor allowed, are refused as well. Rights are
    for clients on this machine (``is_local``), unless settings say that a proxy or pages of others come that way."""

    def __init__(self, app: ASGIApp, config: FrontendConfig) -> None:
        self._app = app
        self._origins = config.cors.allowed_origins
        self._hosts = frozenset(map(str.lower, config.cors.allowed_hosts))
        self._checks_host = is_loopback(config.http.host)
        self._gives_rights = self._checks_host and not (self._origins or self._hosts)
        self._client_header = config.http.client_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if reason := self._reason(scope):
            await _refuse(send, scope["path"], 403, reason, "page_not_allowed")
            return
        scope.setdefault("state", {})["rights"] = RIGHTS if self._is_own(scope) else frozenset()
        await self._app(scope, receive, send)

    def _is_own(self, scope: Scope) -> bool:
        """Return whether a client on this machine has sent a request, as far as settings and headers tell."""
        if not self._gives_rights or scope["type"] != "http":
            return False
        request = Request(scope)
        return is_local(request) and self._client_header not in request.headers

    def _reason(self, scope: Scope) -> str | None:
        if scope["type"] != "http" or scope["path"] in UNAUTHENTICATED_PATHS or scope["method"] == "OPTIONS":
            return None  # preflight requests have no effect
        if scope["path"].startswith(f"{PAGE}/"):
            return None  # has its own check: ``ui_access.py``
        headers = Headers(scope=scope)
        if is_for_another_page(headers, self._origins):
            return "a page of another site sent this; --allowed-origins names the sites that may, and API keys let all"
        host = headers.get("host")  # of every browser
        if self._checks_host and host is not None and not names_this_machine(host, self._hosts):
            return f"the host {host[:253]!r} isn't this machine; --allowed-hosts names others, and API keys let all"
        return None


def check_right(scope: Scope, right: str) -> None:
    """Raise Forbidden if the client of a request doesn't have a right."""
    if right not in scope.get("state", {}).get("rights", ()):
        raise Forbidden(f"this needs an API key with the right {right!r}, which --api-key-file gives it")


def add_security(app: ASGIApp, config: FrontendConfig) -> ASGIApp:
    """Wrap the app in the key check or, without keys, the check of web pages, in the CORS rules, and in the headers of
    ``/ui``. Raises ConfigError for malformed keys."""
    if rights := config.auth.key_rights():
        app = RequireKey(app, ApiKeys(rights, rights))
    else:
        if not is_loopback(config.http.host):
            log.warning(
                "--host %s without API keys: all who reach the port can use the service, and so can web pages in their "
                "browsers by DNS rebinding; --api-key-file FILE asks for keys",
                config.http.host,
            )
        app = RefusePages(app, config)
    if config.cors.allowed_origins:
        # outermost, because browsers send preflight requests without a key
        app = CORSMiddleware(
            app,
            allow_origins=config.cors.allowed_origins,
            allow_methods=PAGE_METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return UiHeaders(app) if config.http.ui else app


def _checked(key: str) -> bytes:
    if not 0 < len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"an API key is 1 to {MAX_KEY} printable ASCII characters without spaces")
    return key.encode()


async def _refuse(send: Send, path: str, status: int, message: str, code: str, *headers: tuple[bytes, bytes]) -> None:
    error = error_body(message, "invalid_request_error", code)
    if anthropic_errors.is_for(path):
        error = anthropic_errors.error_body(message, status)
    body = json.dumps(error).encode()
    all_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
        # the body is not read
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
