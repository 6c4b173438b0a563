"""Reading of request bodies within limits of size and time, and extraction of inline media before JSON is parsed.

A JSON parser would copy megabytes of base64 into a string while the event loop waits. Short placeholders that no client
can guess replace the media; ``prompt/media.py`` decodes the media in pieces on another thread.
"""

import asyncio
import itertools
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from pydantic_core import from_json
from starlette.requests import Request

from triptych.api.json_limits import check_num_values
from triptych.errors import BodyTooSlow, PayloadTooLarge, UnsupportedEncoding

MAX_TEXT = 8 * 2**20
"""Maximum bytes of a body besides its inline media, because parsing blocks the event loop."""
BODY_TIMEOUT = 300.0
"""Seconds for a complete body."""
IDLE_TIMEOUT = 10.0
"""Seconds between two chunks of a body."""
LEAST_RATE = 2**15
"""Bytes per second of a body, until it is complete: what has come holds memory."""
RATE_SECONDS = 5.0
"""Seconds over which the rate is taken."""
MIN_INLINE_LENGTH = 4096
"""Characters of a JSON string, as it is spelled. Shorter media are left in the JSON."""

MAX_CANDIDATES = 4096
"""Maximum long strings of a body that are looked at."""

_LONG = re.compile(rb'"(?=[^"]{%d})' % MIN_INLINE_LENGTH)
_LOOKED_AT = 1024
_LONGEST_ESCAPE = len(r"\u0041")
_INLINE = re.compile(r"\s*(?:data:[^,]{0,256};\s*base64\s*,|[A-Za-z0-9+/_=\r\n-]{64})", re.IGNORECASE)
"""How the text of a string with inline media begins: as a base64 ``data:`` URL, or as base64 alone."""
_ROOTS = frozenset({"messages", "input", "system"})
_KEYS = frozenset({"url", "image_url", "video_url", "audio_url", "image", "video", "audio", "data", "image_embeds"})
"""Where media are: within the first, and directly, or in a list, behind one of the second."""


@dataclass(frozen=True)
class Body:
    """A request's body."""

    text: bytes
    """The JSON, with placeholders for the extracted media."""
    inline: dict[str, memoryview] = field(default_factory=dict)
    """The extracted ``data:`` URLs and base64 strings, by placeholder."""


async def read_body(request: Request, max_bytes: int, charge: Callable[[int], None]) -> Body:
    """Read the body and extract its inline media.

    Calls ``charge``, which may raise, with the size of each chunk. Raises PayloadTooLarge as soon as the declared or
    the actual size exceeds ``max_bytes``, UnsupportedEncoding for a compressed body, and BodyTooSlow when a timeout
    expires."""
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        raise UnsupportedEncoding(f"bodies with the Content-Encoding {encoding[:40]!r} aren't read")
    too_large = PayloadTooLarge(f"the body exceeds {max_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    clock = asyncio.get_running_loop().time
    deadline = clock() + BODY_TIMEOUT
    look, seen = clock() + RATE_SECONDS, 0
    try:
        async with asyncio.timeout(IDLE_TIMEOUT) as timer:
            async for chunk in request.stream():
                charge(len(chunk))
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
                now = clock()
                if now > look:
                    if len(body) - seen < LEAST_RATE * RATE_SECONDS:
                        raise TimeoutError
                    look, seen = now + RATE_SECONDS, len(body)
                timer.reschedule(min(deadline, now + IDLE_TIMEOUT))
    except TimeoutError:
        raise BodyTooSlow(f"the body took too long: {len(body)} bytes so far") from None
    return extract_inline_media(body)


def extract_inline_media(body: bytearray) -> Body:
    """Replace inline media by placeholders, however the JSON is spelled. A text elsewhere that looks like one stays.

    Raises PayloadTooLarge for more than MAX_TEXT bytes, or too many values, besides inline media."""
    found = _Found(body)
    text = found.joined(found.strings)
    _check_text(text)
    if found.strings:
        media = found.strings.keys() & _media_places(text)
        if len(media) < len(found.strings):
            found.strings = {name: one for name, one in found.strings.items() if name in media}
            text = found.joined(found.strings)
            _check_text(text)
    return Body(text, {name: one.text for name, one in found.strings.items()})


def _check_text(text: bytes) -> None:
    if len(text) > MAX_TEXT:
        raise PayloadTooLarge(f"the body exceeds {MAX_TEXT} bytes besides inline media")
    check_num_values(text)


@dataclass(frozen=True)
class _String:
    start: int
    end: int
    """Where it is in the body, without its quotes."""
    text: memoryview


class _Found:
    """The long strings of a body that look like inline media, by placeholders."""

    def __init__(self, body: bytearray) -> None:
        self._whole = memoryview(body)
        self.strings: dict[str, _String] = {}
        nonce = secrets.token_hex(16)
        for match in itertools.islice(_LONG.finditer(body), MAX_CANDIDATES):
            start = match.end()
            end = body.find(b'"', start)
            if end < 0 or _is_escaped(body, start - 1) or _is_escaped(body, end):
                continue  # within a text that has quotes
            text: memoryview | None = self._whole[start:end]
            if text is None or not _INLINE.match(_beginning(text)):
                continue
            if body.find(b"\\", start, end) >= 0:
                text = _text_of(self._whole[start - 1 : end + 1])
            if text is not None:
                self.strings[f"inline:{nonce}:{len(self.strings)}"] = _String(start, end, text)

    def joined(self, strings: Mapping[str, _String]) -> bytes:
        """Return the body with placeholders for these strings."""
        pieces: list[bytes | memoryview] = []
        copied = 0
        for name, one in strings.items():
            pieces += [self._whole[copied : one.start], name.encode()]
            copied = one.end
        return b"".join([*pieces, self._whole[copied:]])


def _is_escaped(body: bytearray, quote: int) -> bool:
    """Return whether an odd number of backslashes precedes a quote, so that it is a part of a string."""
    before = body[max(0, quote - _LOOKED_AT) : quote]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _beginning(string: memoryview) -> str:
    """Return the first characters of a string's text; none of one that isn't JSON."""
    text = bytes(string[:_LOOKED_AT])
    cut = text.rfind(b"\\", -_LONGEST_ESCAPE)
    if cut >= 0:
        text = text[:cut].rstrip(b"\\")
    try:
        return msgspec.json.decode(b'"%s"' % text, type=str)
    except msgspec.DecodeError:
        return ""


def _text_of(string: memoryview) -> memoryview | None:
    """Return the text of a JSON string, which is given with its quotes and has escapes, or None if it isn't one or
    isn't ASCII."""
    try:
        return memoryview(msgspec.json.decode(string, type=str).encode("ascii"))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def _media_places(text: bytes) -> set[str]:
    """Return the strings of a JSON text that are where media are; none if it isn't JSON."""
    try:
        body = from_json(text)
    except ValueError:
        return set()
    pending = [(key, value) for key, value in body.items() if key in _ROOTS] if isinstance(body, dict) else []
    places = set()
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, one) for one in value]
        elif isinstance(value, str) and key in _KEYS:
            places.add(value)
    return places
