"""Reading of request bodies within limits of size and time, and extraction of inline media before JSON is parsed.

A JSON parser would copy megabytes of base64 into a string while the event loop waits. Short placeholders that no client
can guess replace the media; ``prompt/media.py`` decodes the media in pieces on another thread.
"""

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from triptych.api.json_limits import check_num_values
from triptych.errors import BodyTooSlow, PayloadTooLarge

MAX_TEXT = 8 * 2**20
"""Maximum bytes of a body besides its inline media, because parsing blocks the event loop."""
BODY_TIMEOUT = 300.0
"""Seconds for a complete body."""
IDLE_TIMEOUT = 10.0
"""Seconds between two chunks of a body."""
MIN_INLINE_LENGTH = 4096
"""Characters of base64. Shorter media are left in the JSON."""
MAX_CANDIDATES = 4096
"""Maximum places of a body that are checked for inline media."""

_BEGINNING = b'"data'
_URL = re.compile(rb'"(?:url|image_url|video_url|audio_url)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}\Z')
_HEADER = re.compile(rb"data:[ !#-+\--\[\]-~]{0,256};base64,")
_INPUT_AUDIO = re.compile(
    rb'"input_audio"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}\{[ \t\r\n]{0,32}'
    rb'(?:"format"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"[a-z0-9]{0,16}"[ \t\r\n]{0,8},[ \t\r\n]{0,32})?\Z'
)
_DATA = re.compile(rb'"data"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"')
_MAX_KEY = 192


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
    the actual size exceeds ``max_bytes``, and BodyTooSlow when a timeout expires."""
    too_large = PayloadTooLarge(f"the body exceeds {max_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    clock = asyncio.get_running_loop().time
    deadline = clock() + BODY_TIMEOUT
    try:
        async with asyncio.timeout(IDLE_TIMEOUT) as timer:
            async for chunk in request.stream():
                charge(len(chunk))
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
                timer.reschedule(min(deadline, clock() + IDLE_TIMEOUT))
    except TimeoutError:
        raise BodyTooSlow(f"the body took too long: {len(body)} bytes so far") from None
    extracted = extract_inline_media(body)
    if len(extracted.text) > MAX_TEXT:
        raise PayloadTooLarge(f"the body exceeds {MAX_TEXT} bytes besides inline media")
    check_num_values(extracted.text)
    return extracted


def extract_inline_media(body: bytearray) -> Body:
    """Replace inline media by placeholders.

    Only extracts what is certainly one JSON string without any escape but ``\\/``: a base64 ``data:`` URL under a media
    key, or the data of input_audio."""
    whole = memoryview(body)
    texts: list[bytes | memoryview] = []
    inline: dict[str, memoryview] = {}
    nonce = secrets.token_hex(16)
    copied = end = 0
    for _ in range(MAX_CANDIDATES):
        if (quote := body.find(_BEGINNING, end)) < 0:
            break
        if (place := _place(body, quote)) is None:
            end = quote + len(_BEGINNING)
            continue
        start, header = place
        if (end := body.find(b'"', start)) < 0:
            break
        if end - start < MIN_INLINE_LENGTH:
            continue
        if (media := _unescaped(whole[start:end])) is None or (header and not header.match(media)):
            continue
        name = f"inline:{nonce}:{len(inline)}"
        inline[name] = media
        texts += [whole[copied:start], name.encode()]
        copied = end
    return Body(b"".join([*texts, whole[copied:]]), inline)


def _place(body: bytearray, quote: int) -> tuple[int, re.Pattern[bytes] | None] | None:
    """Return where inline media may begin at the quote and the pattern of their header, if any; or None."""
    if body[quote + len(_BEGINNING) : quote + len(_BEGINNING) + 1] == b":":
        return (quote + 1, _HEADER) if _URL.search(body, max(0, quote - _MAX_KEY), quote) else None
    key = _DATA.match(body, quote)
    return (key.end(), None) if key and _INPUT_AUDIO.search(body, max(0, quote - _MAX_KEY), quote) else None


def _unescaped(string: memoryview) -> memoryview | None:
    """Return the string with ``\\/`` as ``/``, or None if it has any other escape."""
    text = bytes(string)
    if b"\\" not in text:
        return string
    text = text.replace(b"\\/", b"/")
    return None if b"\\" in text else memoryview(text)
