"""Gets the bytes of media URLs: inline data always, the web and local files where the operator allows them."""

import asyncio
import binascii
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from triptych.errors import InvalidRequest, MediaNotAllowed, MediaTooLarge
from triptych.prompt.local_files import MediaFolder
from triptych.prompt.web import WebFetcher

_PLACEHOLDER = re.compile(rb"inline:[0-9a-f]{32}:[0-9]+")
_SPECIAL = re.compile(rb'["\\\x00-\x1f]')
BASE64_CHUNK = 2**18
"""Characters of base64 decoded at a time, so that other threads, above all the event loop's, run in between."""
INLINE_DECODE_MAX = 2**16
"""Characters of base64 up to which decoding on the event loop is faster than handing it to a thread."""
MAX_FRAMES = 768
"""Frames of one video that come as images."""
_FRAMES = re.compile(rb"data:\s*video/jpeg\s*;[^,]*base64\s*,", re.IGNORECASE)
_MAX_HEADER = 512
_STANDARD = bytes.maketrans(b"-_", b"+/")
MAX_CONCURRENT_FETCHES = 8
"""Items that one request fetches concurrently."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits on the bytes of media, after decoding base64."""

    max_bytes: int = 64 * 2**20
    """Bytes of one item."""
    max_total_bytes: int = 256 * 2**20
    """Bytes of all items of one request."""


@dataclass(frozen=True)
class MediaSource:
    """Where media may come from; shared by all requests."""

    web: WebFetcher
    folder: MediaFolder | None = None
    """None if no local files may be read."""
    limits: MediaLimits = MediaLimits()

    def for_request(
        self,
        inline: Mapping[str, memoryview] | None = None,
        hold: Callable[[int], object] = lambda _: None,
        client: str = "",
    ) -> "RequestMedia":
        """``inline`` maps placeholders to the ``data:`` URLs and base64 texts that were extracted from the body.
        ``hold`` is called with each item's bytes, for inline media before they are decoded, for media from the web as
        they arrive; it may raise. Fetches are shared fairly among clients."""
        return RequestMedia(self, inline or {}, hold, client)


class RequestMedia:
    """Gets the media of one request."""

    def __init__(
        self, source: MediaSource, inline: Mapping[str, memoryview], hold: Callable[[int], object], client: str
    ) -> None:
        self._source = source
        self._hold = hold
        self._client = client
        self._inline = inline
        self._unused = set(inline)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)
        self._total = 0

    @property
    def limits(self) -> MediaLimits:
        return self._source.limits

    async def get(self, url: str) -> bytes:
        """Return the bytes behind a ``data:``, ``http:``, ``https:`` or ``file:`` URL.

        Raises InvalidRequest for a malformed URL, MediaNotAllowed, MediaNotFetched, and MediaTooLarge if the item, or
        all items of the request together, exceed a limit.
        """
        if (inline := self._data_url(url)) is None:
            async with self._slots:
                return self._counted(await self._fetch(url.strip(), self.limits.max_bytes))
        return await self._held(lambda: decode_data_url(inline, self.limits.max_bytes), _decoded_size(inline))

    async def frames(self, url: str) -> list[bytes] | None:
        """Return the frames of ``data:video/jpeg;base64,FRAME,FRAME,…``, vLLM's form of a list of images, or None for
        any other URL. Raises as ``get`` does."""
        if (inline := self._data_url(url)) is None or not _FRAMES.match(bytes(inline[:_MAX_HEADER])):
            return None
        _, *frames = bytes(inline).split(b",", MAX_FRAMES + 1)
        if len(frames) > MAX_FRAMES:
            raise InvalidRequest(f"the video has more than {MAX_FRAMES} frames")
        limit = self.limits.max_bytes
        return await together(
            self._held(partial(_decode, _decode_base64, memoryview(frame), limit), _decoded_size(memoryview(frame)))
            for frame in frames
        )

    async def decode(self, text: str) -> bytes:
        """Return the bytes of base64 text, or of the text that its placeholder stands for. Raises InvalidRequest for
        invalid base64, and MediaTooLarge as ``get`` does."""
        extracted = self._extracted(text)
        payload = memoryview(text.encode("utf-8", "surrogatepass")) if extracted is None else extracted
        max_bytes = self.limits.max_bytes
        return await self._held(lambda: _decode(_decode_base64, payload, max_bytes), _decoded_size(payload))

    async def _held(self, read: Callable[[], Awaitable[bytes]], expected: int) -> bytes:
        """Hold ``expected`` bytes before reading, so that an item exceeding the memory budget isn't decoded."""
        async with self._slots:
            self._hold(expected)
            data = await read()
        self._hold(max(0, len(data) - expected))
        return self._counted(data)

    def _counted(self, data: bytes) -> bytes:
        """Count an item's bytes towards the request's limit."""
        self._total += len(data)
        if self._total > self.limits.max_total_bytes:
            raise MediaTooLarge(f"the media of this request have more than {self.limits.max_total_bytes} bytes")
        return data

    def add(self, inline: Mapping[str, memoryview]) -> None:
        """Add inline media that came by another way than the body. Raises what ``hold`` raises."""
        self._hold(sum(map(len, inline.values())))
        self._inline = {**self._inline, **inline}
        self._unused |= set(inline)

    def restored(self, text: bytes) -> bytes:
        """Return JSON with the inline media in place of their placeholders."""
        parts: list[bytes | memoryview] = []
        end = 0
        for place in _PLACEHOLDER.finditer(text):
            if (media := self._inline.get(place[0].decode())) is not None:
                parts += [text[end : place.start()], _escaped(media)]
                end = place.end()
        return b"".join([*parts, text[end:]])

    def check_all_used(self) -> None:
        """Call after all media were read. Raises InvalidRequest for unused inline media: they were extracted from a
        field that can't hold media, and whose text is now a placeholder."""
        if self._unused:
            raise InvalidRequest("the body has inline media in a place where no media can be")

    def _data_url(self, url: str) -> memoryview | None:
        """Return a ``data:`` URL, or the one that its placeholder stands for, without white space before it; None for
        another URL."""
        if (extracted := self._extracted(url)) is None:
            extracted = memoryview(url.encode("utf-8", "surrogatepass"))
        beginning = bytes(extracted[:_MAX_HEADER])
        extracted = extracted[len(beginning) - len(beginning.lstrip()) :]
        return extracted if extracted[:5].tobytes().lower() == b"data:" else None

    def _extracted(self, name: str) -> memoryview | None:
        self._unused.discard(name)
        return self._inline.get(name)

    async def _fetch(self, url: str, max_bytes: int) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            return bytes(await self._source.web.fetch(url, max_bytes, self._client, self._hold))
        if scheme == "file" and self._source.folder is not None:
            data = await asyncio.to_thread(self._source.folder.read, url, max_bytes)
            self._hold(len(data))
            return data
        if ":" not in url:
            raise InvalidRequest("the URL has no scheme; use data:, http: or https:")
        raise MediaNotAllowed(f"URLs with the scheme {url.partition(':')[0][:20]}: are not allowed")


def _escaped(text: memoryview) -> bytes | memoryview:
    """Return text as it stands in a JSON string."""
    if not _SPECIAL.search(text):
        return text
    return json.dumps(bytes(text).decode("utf-8", "surrogatepass"))[1:-1].encode()


async def decode_data_url(url: memoryview, max_bytes: int) -> bytes:
    """Decode ``data:[type][;parameter]…[;base64],payload`` (RFC 2397).

    Raises InvalidRequest for a malformed URL and MediaTooLarge for a payload of more than ``max_bytes``.
    """
    comma = bytes(url[:INLINE_DECODE_MAX]).find(b",")
    if comma < 0:
        raise InvalidRequest("the data: URL has no comma before its payload")
    header, payload = bytes(url[len(b"data:") : comma]), url[comma + 1 :]
    is_base64 = header.rpartition(b";")[2].strip().lower() == b"base64"
    return await _decode(_decode_base64 if is_base64 else _decode_plain, payload, max_bytes)


def _decoded_size(text: memoryview) -> int:
    """Return the approximate number of bytes that base64 text decodes to."""
    return len(text) * 3 // 4


async def _decode(decode: Callable[[memoryview, int], bytes], payload: memoryview, max_bytes: int) -> bytes:
    # Percent-encoding takes three characters per byte, base64 four per three bytes: a first bound without decoding.
    if len(payload) > 4 * max_bytes:
        raise _too_large(max_bytes)
    if len(payload) <= INLINE_DECODE_MAX:
        return decode(payload, max_bytes)
    return await asyncio.to_thread(decode, payload, max_bytes)


T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines concurrently and return their results. If one fails, cancel the others and raise its error;
    ``asyncio.gather`` alone would let them run on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _decode_plain(payload: memoryview, max_bytes: int) -> bytes:
    data = unquote_to_bytes(bytes(payload))
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def _decode_base64(payload: memoryview, max_bytes: int) -> bytes:
    """Decode base64, also with white space, without padding, with the alphabet for URLs, or percent-encoded."""
    try:
        return strict_base64(payload, max_bytes)
    except binascii.Error:
        pass
    try:
        return strict_base64(memoryview(_plain_base64(payload)), max_bytes)
    except binascii.Error as error:
        raise InvalidRequest(f"the data is not valid base64: {error}") from None


def _plain_base64(payload: memoryview) -> bytearray:
    """Return base64 in its standard form."""
    if b"%" in (text := bytes(payload)):
        payload = memoryview(unquote_to_bytes(text))
    plain = bytearray()
    for start in range(0, len(payload), BASE64_CHUNK):
        plain += bytes(payload[start : start + BASE64_CHUNK]).translate(_STANDARD, b" \t\r\n\f")
    if len(plain) % 4 == 1:
        raise binascii.Error("it has one character too many, or too few")
    return plain + b"=" * (-len(plain) % 4)


def strict_base64(payload: memoryview, max_bytes: int) -> bytes:
    if len(payload) % 4:
        raise binascii.Error("its length is not a multiple of 4")
    data = bytearray()
    for start in range(0, len(payload), BASE64_CHUNK):
        if len(data) != start // 4 * 3:
            raise binascii.Error("Excess data after padding")
        data += binascii.a2b_base64(payload[start : start + BASE64_CHUNK], strict_mode=True)
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _too_large(max_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(f"the file has more than {max_bytes} bytes")
