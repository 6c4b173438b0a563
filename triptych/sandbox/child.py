"""Entry point of a sandboxed worker: answers requests one by one until its parent is gone."""

import contextlib
import importlib
import logging
import mmap
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from triptych.errors import ErrorKind, RequestError, ServiceError
from triptych.observe import logs
from triptych.sandbox.libraries import LIBRARY_BYTES, address_space, on_import
from triptych.sandbox.protocol import (
    Bulk,
    EndOfResults,
    Importing,
    Limits,
    Result,
    TaskFailed,
    WorkerRequest,
    WorkerSpec,
    receive,
    send,
)

log = logging.getLogger(__name__)

BytesLike = bytes | memoryview
Results = Iterator[tuple[bytes, Sequence[BytesLike]]]
Handler = Callable[[bytes, bytes], Results]
"""Takes a request and its bulk; yields results as payload and bulk, the latter in pieces. May raise RequestError and
ServiceError."""

GRACE_SECONDS = 5.0
"""Seconds after its time limit at which a worker exits by itself. Its parent kills it earlier, unless the parent is
gone."""
MAX_MESSAGE_TEXT = 500


def main(spec: WorkerSpec, connection: socket.socket) -> None:
    """Serve requests until the parent is gone."""
    handler: Handler = load(spec.factory)(spec.argument)
    limit(spec.limits, LIBRARY_BYTES)

    def report_import() -> None:
        send(connection, Importing())
        signal.setitimer(signal.ITIMER_REAL, spec.limits.seconds + GRACE_SECONDS)

    on_import.set(report_import)
    send(connection, EndOfResults())
    items: dict[int, Results] = {}
    while True:
        data, bulk = receive(connection)
        if not data:
            return
        request = msgspec.msgpack.decode(data, type=WorkerRequest)
        signal.setitimer(signal.ITIMER_REAL, spec.limits.seconds + GRACE_SECONDS)
        for closed in request.closed:
            items.pop(closed, None)
        try:
            if request.request is not None:
                items[request.item] = handler(request.request, content(bulk))
            _answer(connection, items, request.item)
        finally:
            if bulk is not None:
                bulk.close()
        signal.setitimer(signal.ITIMER_REAL, 0)


def load(factory: str) -> Callable[[str], Any]:
    """Import the function that an import string names."""
    module, _, name = factory.partition(":")
    function: Callable[[str], Any] = getattr(importlib.import_module(module), name)
    return function


def _answer(connection: socket.socket, items: dict[int, Results], item: int) -> None:
    answer: Result | EndOfResults | TaskFailed
    output = None
    try:
        payload, pieces = next(items[item])
        output = Bulk.of(*pieces)
        answer = Result(payload, sum(memoryview(piece).nbytes for piece in pieces))
    except StopIteration:
        answer = EndOfResults()
    except Exception as error:  # noqa: BLE001 - each becomes the answer for its item
        answer = failure_of(error)
    if not isinstance(answer, Result):
        items.pop(item, None)
    try:
        send(connection, answer, output)
    finally:
        if output is not None:
            output.close()


def failure_of(error: Exception) -> TaskFailed:
    """Return the answer for an item that raised ``error``. Unexpected errors are logged and their text withheld."""
    if isinstance(error, RequestError | ServiceError):
        return TaskFailed(ErrorKind.of(error), str(error)[:MAX_MESSAGE_TEXT])
    if isinstance(error, MemoryError):
        return TaskFailed(None, "processing it needs more memory than allowed")
    log.error("unexpected error in a sandboxed worker", exc_info=error)
    return TaskFailed(ErrorKind.INTERNAL_ERROR, "it failed")


def content(bulk: Bulk | None) -> bytes:
    """Return a copy of a bulk's bytes; empty for None."""
    if bulk is None:
        return b""
    with contextlib.closing(mmap.mmap(bulk.file, 0, access=mmap.ACCESS_READ)) as pages:
        return bytes(pages)


def limit(limits: Limits, library_bytes: int = 0) -> None:
    """Limit this process's memory, open files and output from now on, and disable core dumps. ``library_bytes`` is the
    address space for what ``import_library`` imports."""
    most = address_space() + limits.memory_bytes
    _set(resource.RLIMIT_AS, most, most + library_bytes)
    _set(resource.RLIMIT_FSIZE, limits.output_bytes)
    _set(resource.RLIMIT_NOFILE, 32)
    _set(resource.RLIMIT_CORE, 0)


def _set(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit, to at most the hard limit that was inherited; without ``hard``, that becomes the same."""
    _, inherited = resource.getrlimit(kind)
    soft, hard = (
        value if inherited == resource.RLIM_INFINITY else min(value, inherited) for value in (soft, hard or soft)
    )
    resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    logs.set_up(msgspec.json.decode(sys.argv[3], type=logs.LogSettings))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(
            msgspec.json.decode(sys.argv[1], type=WorkerSpec),
            socket.socket(fileno=int(sys.argv[2])),
        )
