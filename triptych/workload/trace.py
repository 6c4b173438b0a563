"""Traces: what was asked of a service and when, without content. JSON lines; the first says what follows.

Texts are numbers of tokens. Equal beginnings are seen by the numbers of their blocks, which mean nothing elsewhere.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.errors import ConfigError

log = logging.getLogger(__name__)

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
    """Return a trace's requests by when they came; lines are in the order in which they ended. Lines that are no
    requests, such as those that a killed service has torn, are skipped, and a warning counts them. Raises ConfigError
    for another file, and with the first line's fault for one that has no other lines."""
    found, faults = list[TraceRequest](), 0
    fault = ""
    try:
        with path.open("rb") as file:
            _check_head(path, file.readline(MAX_LINE))
            for number, line in enumerate(_lines(file), start=2):
                if line in (head_line(), b"\n"):
                    continue  # of another frontend, or after a torn line
                try:
                    found.append(_request(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
                    faults, fault = faults + 1, fault or f"line {number}: {error}"
                if len(found) > MAX_REQUESTS:
                    raise ConfigError(f"{path} has more than {MAX_REQUESTS} requests: take a part of it")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    if faults and not found:
        raise ConfigError(f"{path}: {fault}")
    if faults:
        log.warning("%s: %d lines are no requests and don't count, such as %s", path, faults, fault)
    return sorted(found, key=lambda one: one.at)


def _check_head(path: Path, line: bytes) -> None:
    try:
        head = msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        head = None
    if head is None or head.block_tokens != BLOCK_TOKENS:
        raise ConfigError(f"{path} is no trace: triptych serve --record FILE writes one")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that have an end and, of those that are too long, beginnings."""
    while line := file.readline(MAX_LINE):
        if not line.endswith(b"\n") and len(line) < MAX_LINE:
            return  # the service that wrote it was killed
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)


def _request(line: bytes) -> TraceRequest:
    if not line.endswith(b"\n"):
        raise ConfigError("it is longer than a request can be")
    return _DECODER.decode(line)
