"""Traces: what was asked of a service and when, without content. JSON lines, of which the first says what follows.

Texts are numbers of tokens. Equal beginnings are seen by the numbers of their blocks, which mean nothing elsewhere.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.errors import ConfigError

BLOCK_TOKENS = 64
"""Tokens of text in a block."""
MAX_LINE = 2**20
"""Largest line that is read, in bytes."""
MAX_TOKENS = 2**24

_Seconds = Annotated[float, Meta(ge=0, le=10**11)]
MAX_REQUESTS = 10**6
"""Most requests of a trace that are read."""
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Pixels = Annotated[int, Meta(ge=1, le=2**20)]
_Name = Annotated[str, Meta(max_length=64)]


class TraceMedia(Struct, frozen=True, omit_defaults=True):
    """A media item."""

    name: _Name
    """Equal for equal files."""
    width: _Pixels
    height: _Pixels
    frames: Annotated[int, Meta(ge=1, le=2**20)] = 1
    """More than one for a video."""
    bytes: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """Its file's size."""
    format: _Name = "jpeg"


class TraceRequest(Struct, frozen=True, omit_defaults=True):
    """A request."""

    at: _Seconds
    """When it came, in seconds: since the epoch where it was recorded, or since the workload begins."""
    text: _Tokens
    """Tokens of the prompt, without those of media."""
    answer: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Tokens of the answer."""
    media: Annotated[tuple[TraceMedia, ...], Meta(max_length=4096)] = ()
    lead: _Tokens = 0
    """Tokens of the text before the first media item."""
    blocks: Annotated[tuple[int, ...], Meta(max_length=MAX_TOKENS // BLOCK_TOKENS)] = ()
    """Numbers of the text's whole blocks, from the beginning: two texts with the same first numbers begin alike."""
    client: _Name = ""


class _Head(Struct, frozen=True):
    kind: Literal["triptych-trace"] = "triptych-trace"
    version: Literal[1] = 1
    block_tokens: int = BLOCK_TOKENS


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(TraceRequest)


def head_line() -> bytes:
    """Return a trace's first line."""
    return _ENCODER.encode(_Head()) + b"\n"


def trace_line(request: TraceRequest, *, answer: int = 0) -> bytes:
    """Return a request's line, with another length of the answer if that is given."""
    return _ENCODER.encode(msgspec.structs.replace(request, answer=answer) if answer else request) + b"\n"


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace. Raises ConfigError where that isn't possible."""
    try:
        with path.open("wb") as file:
            file.write(head_line())
            file.writelines(map(trace_line, requests))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None


def read_trace(path: Path) -> list[TraceRequest]:
    """Return a trace's requests by when they came; lines are in the order in which they ended. Raises ConfigError, with
    the line's number, for another file."""
    try:
        with path.open("rb") as file:
            requests = _requests(path, iter(lambda: file.readline(MAX_LINE), b""))
            found = list(itertools.islice(requests, MAX_REQUESTS + 1))
            if len(found) > MAX_REQUESTS:
                raise ConfigError(f"{path} has more than {MAX_REQUESTS} requests: take a part of it")
            return sorted(found, key=lambda one: one.at)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _requests(path: Path, lines: Iterator[bytes]) -> Iterator[TraceRequest]:
    try:
        head = msgspec.json.decode(next(lines, b""), type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        head = None
    if head is None or head.block_tokens != BLOCK_TOKENS:
        raise ConfigError(f"{path} is no trace: triptych serve --record FILE writes one")
    for number, line in enumerate(lines, start=2):
        if not line.endswith(b"\n"):
            if len(line) < MAX_LINE:
                return  # the service that wrote it was killed
            raise ConfigError(f"{path}: line {number} is longer than a request can be")
        if line in (head_line(), b"\n"):
            continue  # of another frontend, or after a line that the disk had no room for
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
