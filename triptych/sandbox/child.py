"""What runs in a sandboxed worker: answers one question after another until its parent is gone."""

import contextlib
import importlib
import logging
import mmap
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triptych.errors import RequestError, ServiceError
from triptych.observe import logs
from triptych.sandbox.protocol import Ask, Bulk, End, Failure, Limits, Result, WorkerSpec, receive, send

log = logging.getLogger(__name__)

Piece = bytes | memoryview
Handler = Callable[[bytes, bytes], Iterator[tuple[bytes, Sequence[Piece]]]]
"""Takes a request and its bulk; yields results: about, and bulk in pieces. May raise RequestError and ServiceError."""

GRACE = 5.0
"""Seconds after which a worker that its parent should have killed ends by itself: the parent may be gone."""
MAX_MESSAGE_TEXT = 500


def main(spec: WorkerSpec, connection: socket.socket) -> None:
    handler: Handler = load(spec.factory)(spec.argument)
    limit(spec.limits)
    send(connection, End())
    items: dict[int, Iterator[tuple[bytes, Sequence[Piece]]]] = {}
    while True:
        data, bulk = receive(connection)
        if not data:
            return
        ask = msgspec.msgpack.decode(data, type=Ask)
        signal.setitimer(signal.ITIMER_REAL, spec.limits.seconds + GRACE)
        for closed in ask.closed:
            items.pop(closed, None)
        try:
            if ask.request is not None:
                items[ask.item] = handler(ask.request, content(bulk))
            _answer(connection, items, ask.item)
        finally:
            if bulk is not None:
                bulk.close()
        signal.setitimer(signal.ITIMER_REAL, 0)


def load(factory: str) -> Callable[[str], Any]:
    """The function of that import string."""
    module, _, name = factory.partition(":")
    function: Callable[[str], Any] = getattr(importlib.import_module(module), name)
    return function


def _answer(connection: socket.socket, items: dict[int, Iterator[tuple[bytes, Sequence[Piece]]]], item: int) -> None:
    answer: Result | End | Failure
    output = None
    try:
        about, pieces = next(items[item])
        output = Bulk.of(*pieces)
        answer = Result(about, sum(memoryview(piece).nbytes for piece in pieces))
    except StopIteration:
        answer = End()
    except Exception as error:  # noqa: BLE001 - each becomes its item's answer
        answer = failure_of(error)
    if not isinstance(answer, Result):
        items.pop(item, None)
    try:
        send(connection, answer, output)
    finally:
        if output is not None:
            output.close()


def failure_of(error: Exception) -> Failure:
    """What an item that raised this is answered with."""
    if isinstance(error, RequestError | ServiceError):
        return Failure(type(error).__name__, str(error)[:MAX_MESSAGE_TEXT])
    if isinstance(error, MemoryError):
        return Failure("", "more memory is needed than there may be")
    log.error("a sandboxed worker tripped over an item", exc_info=error)
    return Failure("InternalError", "it failed")


def content(bulk: Bulk | None) -> bytes:
    if bulk is None:
        return b""
    with contextlib.closing(mmap.mmap(bulk.file, 0, access=mmap.ACCESS_READ)) as pages:
        return bytes(pages)


def limit(limits: Limits) -> None:
    """From here on: no more memory, files or output than a request may need, and no core dump of it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _set(resource.RLIMIT_AS, used + limits.memory_bytes)
    _set(resource.RLIMIT_FSIZE, limits.output_bytes)
    _set(resource.RLIMIT_NOFILE, 32)
    _set(resource.RLIMIT_CORE, 0)


def _set(kind: int, value: int) -> None:
    """As far as whoever started this allows."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    logs.set_up(msgspec.json.decode(sys.argv[3], type=logs.LogSettings))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error of the write
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(
            msgspec.json.decode(sys.argv[1], type=WorkerSpec),
            socket.socket(fileno=int(sys.argv[2])),
        )
