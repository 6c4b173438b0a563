"""Fetches the bytes that an image URL stands for: inline data always, web addresses only from allowed hosts."""

import asyncio
import base64
import binascii
import functools
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import httpx

from triptych.errors import InvalidRequest, MediaNotAllowed, MediaTooLarge


@dataclass(frozen=True)
class MediaLimits:
    """``max_bytes`` of one item, decoded; ``seconds`` to fetch it, from the first look-up to the last byte; ``kind`` is
    what errors call it."""

    max_bytes: int = 32 * 2**20
    seconds: float = 5.0
    kind: str = "image"


async def fetch(
    url: str,
    allowed_hosts: Collection[str],
    limits: MediaLimits,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """The bytes behind a ``data:``, ``http:`` or ``https:`` URL. ``allowed_hosts`` are exact names in lower case.

    ``transport`` replaces the network in tests.

    Raises InvalidRequest for a URL that can't be parsed or read from, MediaNotAllowed for any other scheme, a host
    that isn't allowed or a redirect, and MediaTooLarge beyond ``limits.max_bytes``.
    """
    if url[:5].lower() == "data:":
        return decode_data_url(url, limits)
    try:
        parsed = httpx.URL(url)
        host = parsed.host.lower()
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidRequest(f"the image URL can't be parsed: {error}") from error
    if not parsed.scheme:
        raise InvalidRequest("the image URL has no scheme; use data:, http: or https:")
    if parsed.scheme not in ("http", "https"):
        raise MediaNotAllowed(f"image URLs with the scheme {parsed.scheme}: are not allowed")
    if host not in allowed_hosts:
        raise MediaNotAllowed(f"images from the host {host!r} are not allowed")
    if parsed.userinfo:
        raise MediaNotAllowed("image URLs with a user name are not allowed")
    # An allowed name may still resolve to an inner address; pinning the checked address comes with the fetcher's
    # own transport, in a later issue.
    try:
        async with asyncio.timeout(limits.seconds), _client(transport) as client:
            return await _read(client, parsed, limits)
    except TimeoutError as error:
        raise InvalidRequest(f"the image could not be fetched within {limits.seconds:g} s") from error
    except httpx.HTTPError as error:
        raise InvalidRequest(f"the image could not be fetched: {type(error).__name__}") from error


def decode_data_url(url: str, limits: MediaLimits) -> bytes:
    """The bytes of ``data:[type][;parameter]…[;base64],payload``, RFC 2397. Base64 is strict: no spaces, full padding.

    Raises InvalidRequest for a malformed URL and MediaTooLarge for a payload of more than ``limits.max_bytes``.
    """
    header, comma, payload = url[len("data:") :].partition(",")
    if not comma:
        raise InvalidRequest("the data: URL has no comma before its payload")
    is_base64 = header.rpartition(";")[2].strip().lower() == "base64"
    # Percent-encoding takes three characters per byte, base64 four per three bytes: a first bound without decoding.
    if len(payload) > 4 * limits.max_bytes:
        raise _too_large(limits)
    data = unquote_to_bytes(payload) if "%" in payload else payload.encode("utf-8", "surrogatepass")
    if is_base64:
        if len(data) // 4 * 3 > limits.max_bytes + 2:
            raise _too_large(limits)
        try:
            data = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise InvalidRequest(f"the data: URL is not valid base64: {error}") from error
    if len(data) > limits.max_bytes:
        raise _too_large(limits)
    return data


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Shared, because reading the system's certificates takes tens of milliseconds."""
    return ssl.create_default_context()


def _client(transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=transport,
        verify=_ssl_context(),
        follow_redirects=False,
        # ``limits.seconds`` bounds the whole fetch.
        timeout=None,
        # Proxies and credentials of the server's environment aren't the client's to use.
        trust_env=False,
        # Uncompressed, so that the size limit is on what is held in memory.
        headers={"accept": "image/*", "accept-encoding": "identity"},
    )


async def _read(client: httpx.AsyncClient, url: httpx.URL, limits: MediaLimits) -> bytes:
    async with client.stream("GET", url) as response:
        if response.is_redirect:
            raise MediaNotAllowed(f"the image URL is redirected (status {response.status_code}), which is not followed")
        if response.status_code != httpx.codes.OK:
            raise InvalidRequest(f"the image could not be fetched: the server answered {response.status_code}")
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > limits.max_bytes:
                raise _too_large(limits)
        return bytes(data)


def _too_large(limits: MediaLimits) -> MediaTooLarge:
    return MediaTooLarge(f"the {limits.kind} is larger than {limits.max_bytes} bytes")
