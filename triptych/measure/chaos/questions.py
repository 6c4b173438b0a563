"""What clients ask: questions that are unique by their number, of several kinds."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from triptych.measure.load.pictures import animation, data_url, picture
from triptych.measure.load.questions import chat_body, content

QUESTION = "What is in the picture?"
MAX_TOKENS = 32


class Kind(StrEnum):
    """What a question is about."""

    PICTURE = "picture"
    TEXT = "text"
    VIDEO = "video"
    TOOLS = "tools"
    """The model must call a function."""
    JSON = "json"
    """The answer must follow a schema."""
    LINK = "link"
    """A picture that the service fetches."""
    BROKEN_LINK = "broken link"
    """Pictures that the service fetches, one of which can't be had."""
    HOSTILE = "hostile"
    """A body that must be refused."""


@dataclass(frozen=True)
class Question:
    """One request, without the salt that keeps runs from reusing each other's cached work."""

    number: int
    kind: Kind
    leaves_after: float | None = None
    """Seconds after which its client disconnects; None if it waits for the answer."""
    tokens: int = MAX_TOKENS
    """Length of its answer, unless a grammar ends it."""
    media: str = ""
    """URL of the server of ``triptych.measure.chaos.media_server``, for links."""

    def body(self, model: str, salt: str) -> bytes:
        """Return the request's JSON, or what is none."""
        return _BODIES[self.kind](self, model, salt)


def _picture(one: Question, model: str, salt: str) -> bytes:
    return chat_body(model, content([picture(one.number)], QUESTION), one.tokens, salt)


def _text(one: Question, model: str, salt: str) -> bytes:
    return chat_body(model, f"What comes after the number {one.number}?", one.tokens, salt)


def _video(one: Question, model: str, salt: str) -> bytes:
    url = data_url(animation(one.number), "video/gif")
    return chat_body(model, _media("video_url", [url]), one.tokens, salt)


def _link(one: Question, model: str, salt: str) -> bytes:
    return chat_body(model, _media("image_url", [f"{one.media}/picture/{one.number}"]), one.tokens, salt)


def _broken_link(one: Question, model: str, salt: str) -> bytes:
    breaks = BREAKS[one.number % len(BREAKS)]
    urls = [f"{one.media}/picture/{one.number}", f"{one.media}/{breaks}", f"{one.media}/picture/{one.number + 1}"]
    return chat_body(model, _media("image_url", urls), one.tokens, salt)


def _tools(one: Question, model: str, salt: str) -> bytes:
    function = {"name": "count", "parameters": _SCHEMA}
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    return _with(_text(one, model, salt), more)


def _json(one: Question, model: str, salt: str) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": _SCHEMA, "strict": True}}
    return _with(_text(one, model, salt), {"response_format": form})


def _hostile(one: Question, model: str, salt: str) -> bytes:
    return _HOSTILE[one.number % len(_HOSTILE)](_text(one, model, salt))


def _media(kind: str, urls: list[str]) -> list[dict[str, Any]]:
    return [*({"type": kind, kind: {"url": url}} for url in urls), {"type": "text", "text": QUESTION}]


def _with(body: bytes, more: Mapping[str, Any]) -> bytes:
    return json.dumps(json.loads(body) | more).encode()


def _about(*parts: dict[str, Any]) -> Callable[[bytes], bytes]:
    return lambda body: _with(body, {"messages": [{"role": "user", "content": list(parts)}]})


def _inline(media: bytes, kind: str, mime: str) -> Callable[[bytes], bytes]:
    return _about({"type": kind, kind: {"url": data_url(media, mime)}})


BREAKS = ("missing", "reset", "short", "text", "loop", "empty")
"""The ways in which a link is broken, as the server names them."""
_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}
_HUGE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0"
"""The beginning of a PNG of 65,536 pixels in each direction."""
_HOSTILE: tuple[Callable[[bytes], bytes], ...] = (
    lambda body: body[: len(body) // 2],
    lambda _: b"\xff\xfe\0{",
    lambda _: b"[" * 100_000,
    lambda body: _with(body, {"messages": {"role": "user"}}),
    lambda body: _with(body, {"max_tokens": -1}),
    lambda body: _with(body, {"temperature": "hot"}),
    lambda body: _with(body, {"model": "../../etc/passwd"}),
    lambda body: _with(body, {"messages": [{"role": "user", "content": "word " * 200_000}]}),
    lambda body: _with(body, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}}),
    _about({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}),
    _about({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
    _about({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}),
    _inline(picture(1)[:200], "image_url", "image/png"),
    _inline(_HUGE, "image_url", "image/png"),
    _inline(animation(1)[:100], "video_url", "video/gif"),
    _inline(b"\0" * 5000, "video_url", "video/mp4"),
)
_BODIES: Mapping[Kind, Callable[[Question, str, str], bytes]] = {
    Kind.PICTURE: _picture,
    Kind.TEXT: _text,
    Kind.VIDEO: _video,
    Kind.TOOLS: _tools,
    Kind.JSON: _json,
    Kind.LINK: _link,
    Kind.BROKEN_LINK: _broken_link,
    Kind.HOSTILE: _hostile,
}
