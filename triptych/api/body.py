"""Reads a request's body within limits of size and time, and takes inline media out of it before it is parsed.

A JSON parser would copy tens of megabytes of base64 into a string, with the event loop waiting. What stands for them
afterwards are short texts that no client can guess; ``prompt/media.py`` decodes the media themselves, in pieces and on
another thread.
"""

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from triptych.api.values import check_values
from triptych.errors import BodyTooSlow, PayloadTooLarge

MAX_TEXT = 8 * 2**20
"""Bytes of a body besides its inline media: parsing 8 MiB of plain text holds up the event loop for 11 ms."""
SECONDS = 300.0
"""For a whole body."""
IDLE_SECONDS = 10.0
"""For each next piece of it."""
WORTH_LIFTING = 4096
"""Shorter ones are parsed with the rest."""
MAX_LOOKS = 4096
"""Places where inline media may begin that are looked at."""

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
    """``text`` is the JSON; ``inline`` has the ``data:`` URLs that were taken out of it, by what stands for them."""

    text: bytes
    inline: dict[str, memoryview] = field(default_factory=dict)


async def read_body(request: Request, max_bytes: int, hold: Callable[[int], None]) -> Body:
    """Raises PayloadTooLarge as soon as the body is known to exceed the limit, whatever it declares, and BodyTooSlow
    when it doesn't come. ``hold`` is told of its bytes as they come, and may raise."""
    too_large = PayloadTooLarge(f"the body exceeds {max_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    clock = asyncio.get_running_loop().time
    end = clock() + SECONDS
    try:
        async with asyncio.timeout(IDLE_SECONDS) as timer:
            async for chunk in request.stream():
                hold(len(chunk))
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
                timer.reschedule(min(end, clock() + IDLE_SECONDS))
    except TimeoutError:
        raise BodyTooSlow(f"the body didn't come: {len(body)} bytes so far") from None
    lifted = lift(body)
    if len(lifted.text) > MAX_TEXT:
        raise PayloadTooLarge(f"the body exceeds {MAX_TEXT} bytes besides inline media")
    check_values(lifted.text)
    return lifted


def lift(body: bytearray) -> Body:
    """Takes out what is certainly one JSON string: a ``data:`` URL under a key of media, or the data of input_audio, in
    base64, without any escape but ``\\/``. Everything else stays where it is."""
    whole = memoryview(body)
    texts: list[bytes | memoryview] = []
    inline: dict[str, memoryview] = {}
    nonce = secrets.token_hex(16)
    copied = end = 0
    for _ in range(MAX_LOOKS):
        if (quote := body.find(_BEGINNING, end)) < 0:
            break
        if (place := _place(body, quote)) is None:
            end = quote + len(_BEGINNING)
            continue
        start, header = place
        if (end := body.find(b'"', start)) < 0:
            break
        if end - start < WORTH_LIFTING:
            continue
        if (piece := _unescaped(whole[start:end])) is None or (header and not header.match(piece)):
            continue
        name = f"inline:{nonce}:{len(inline)}"
        inline[name] = piece
        texts += [whole[copied:start], name.encode()]
        copied = end
    return Body(b"".join([*texts, whole[copied:]]), inline)


def _place(body: bytearray, quote: int) -> tuple[int, re.Pattern[bytes] | None] | None:
    """Where inline media may begin, at or behind the quote, and with which header, if any; None where they can't."""
    if body[quote + len(_BEGINNING) : quote + len(_BEGINNING) + 1] == b":":
        return (quote + 1, _HEADER) if _URL.search(body, max(0, quote - _MAX_KEY), quote) else None
    key = _DATA.match(body, quote)
    return (key.end(), None) if key and _INPUT_AUDIO.search(body, max(0, quote - _MAX_KEY), quote) else None


def _unescaped(piece: memoryview) -> memoryview | None:
    """Some clients write ``/`` as ``\\/``. None where there is any other escape, or the string goes on."""
    text = bytes(piece)
    if b"\\" not in text:
        return piece
    text = text.replace(b"\\/", b"/")
    return None if b"\\" in text else memoryview(text)
