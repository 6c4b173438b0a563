"""Pool of sandboxed worker processes: requests in, results out; crashes and exceeded limits become errors."""

import contextlib
import errno
import hashlib
import itertools
import logging
import mmap
import threading
import time
from collections.abc import Iterator

import msgspec

from triptych.errors import HelperFailed, InternalError, RequestError, StartError
from triptych.running_time import MAX_WAIT, running_time
from triptych.sandbox.protocol import (
    Answer,
    Bulk,
    EndOfResults,
    Importing,
    ProtocolError,
    Result,
    TaskFailed,
    WorkerRequest,
    WorkerSpec,
    receive,
    send,
)
from triptych.sandbox.spawn import spawn

log = logging.getLogger(__name__)

_Result = tuple[bytes, mmap.mmap | None]
"""Payload and sealed bulk."""

START_SECONDS = 60.0
"""Time for a worker to import its modules."""
START_ATTEMPTS = 3
START_PAUSE = 0.1
"""Seconds between the first two attempts to start a worker; twice as many between the next two."""
ATTEMPTS = 2
"""Attempts per item if its worker dies. The first death may have another cause."""
CRASHES_KEPT = 1024
"""Inputs that are remembered because their workers died."""
EXHAUSTED = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EMFILE, errno.ENFILE})
"""Errors of this process rather than of a worker: the item isn't at fault."""


_CRASHED = "processing it crashed the worker"


class _WorkerDied(Exception):
    """The worker died while it worked on this item."""


class _ItemLost(Exception):
    """The worker was restarted because of another item, and no longer has this one."""


class _TimedOut(Exception):
    """The worker exceeded its time limit on this item."""


class WorkerPool:
    """A fixed number of processes that run the same handler. Thread-safe; calls block until a result is there."""

    def __init__(self, spec: WorkerSpec, number: int, failed: type[RequestError]) -> None:
        """Start ``number`` processes without waiting for them. ``failed`` is raised for an item that crashes its worker
        or exceeds its time or memory."""
        self.spec = spec
        self._failed = failed
        self._workers = [_Worker(spec, failed) for _ in range(number)]
        self._items = itertools.count()
        self._crashed: dict[bytes, None] = {}
        """Digests of the inputs whose workers died in every attempt, oldest first. They aren't attempted again."""

    def wait_until_ready(self) -> None:
        """Wait until all workers are ready. Raises StartError when one can't start."""
        for worker in self._workers:
            worker.wait_until_ready()

    def results(self, request: bytes, bulk: bytes = b"") -> Iterator[_Result]:
        """Yield the results of one request as payload and sealed bulk. Each is computed when it is asked for.

        Raises what the handler raised, and ``failed`` when a worker takes too long, needs too much memory or dies, or
        died of the same ``bulk`` before. Raises HelperFailed when no worker can be started. Closing the iterator
        cancels the request.
        """
        if self._crashed and _digest(request, bulk) in self._crashed:
            raise self._failed(_CRASHED)
        worker = min(self._workers, key=lambda one: len(one.items))
        item = next(self._items)
        yielded = deaths = received = 0
        pending: bytes | None = request
        worker.items.add(item)
        try:
            while True:
                try:
                    result = worker.next_result(item, pending, bulk if pending is not None else None)
                except _ItemLost:
                    pending, received = request, 0
                    continue
                except _WorkerDied:
                    deaths += 1
                    if deaths == ATTEMPTS:
                        self._remember(_digest(request, bulk))
                        raise self._failed(_CRASHED) from None
                    pending, received = request, 0
                    continue
                except _TimedOut:
                    raise self._failed(f"processing it takes longer than {self.spec.limits.seconds:g} s") from None
                pending = None
                if result is None:
                    return
                received += 1
                if received > yielded:  # a retried item repeats earlier results
                    yielded += 1
                    yield result
        finally:
            worker.items.discard(item)
            worker.closed.append(item)

    def _remember(self, digest: bytes) -> None:
        """Remember an input that no worker survives."""
        self._crashed[digest] = None
        for oldest in list(self._crashed)[:-CRASHES_KEPT]:
            self._crashed.pop(oldest, None)

    def debug_state(self) -> list[tuple[int, int]]:
        """For tests: each worker's number of items in progress, and of items that its process holds."""
        return [worker.debug_state() for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill all workers. Pending calls raise InternalError."""
        for worker in self._workers:
            worker.close()


def _digest(request: bytes, bulk: bytes) -> bytes:
    """Return what names an input: the digest of its file, whatever is asked of it."""
    return hashlib.sha256(bulk or request).digest()


class _Worker:
    """One process, restarted after it has died."""

    def __init__(self, spec: WorkerSpec, failed: type[RequestError]) -> None:
        self._spec = spec
        self._failed = failed
        self.items: set[int] = set()
        """Items in progress."""
        self.closed: list[int] = []
        """Finished items that haven't been reported to the process."""
        self._lock = threading.Lock()
        self._known: set[int] = set()
        """Items that the process holds."""
        self._ready = self._closing = self._has_imported = False
        self._start()

    def debug_state(self) -> tuple[int, int]:
        return len(self.items), len(self._known)

    def wait_until_ready(self) -> None:
        with self._lock:
            self._wait_until_ready()

    def next_result(
        self, item: int, request: bytes | None, bulk: bytes | None
    ) -> tuple[bytes, mmap.mmap | None] | None:
        """Return the item's next result; None if there are no more.

        ``request`` must be given with the first call, and again after _ItemLost and _WorkerDied. Raises _WorkerDied and
        _TimedOut, after which the process is gone, and what the handler raised. Raises MemoryError if this process has
        no memory or descriptor left.
        """
        with self._lock:
            if self._closing:
                raise InternalError("the service is shutting down")
            if request is None and item not in self._known:
                raise _ItemLost
            self._start_again()
            self._known.add(item)
            closed, self.closed = self.closed, []
            self._known.difference_update(closed)
            return self._exchange(WorkerRequest(item, request, closed), bulk)

    def close(self) -> None:
        self._closing = True
        self.process.kill()
        with self._lock:
            self._end()

    def _exchange(self, request: WorkerRequest, bulk: bytes | None) -> _Result | None:
        sent = received = None
        try:
            sent = Bulk.of(bulk) if bulk else None
            send(self._connection, request, sent)
            answer, received = self._receive_answer()
            if isinstance(answer, TaskFailed):
                raise answer.error.error(answer.message) if answer.error else self._failed(answer.message)
            if isinstance(answer, EndOfResults):
                return None
            content = received.sealed(self._spec.limits.output_bytes) if received else None
            if answer.num_bytes != (len(content) if content is not None else 0):
                raise ProtocolError("a bulk has another size than announced")
            return answer.payload, content
        except TimeoutError:
            self._end()
            raise _TimedOut from None
        except (OSError, EOFError, ProtocolError, msgspec.MsgspecError) as error:
            self._end()
            if self._closing:
                raise InternalError("the service is shutting down") from None
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise MemoryError(f"no memory for an item's result: {error}") from None
            log.warning("a worker died while processing an item: %s", error or type(error).__name__)
            raise _WorkerDied from None
        finally:
            for file in (sent, received):
                if file is not None:
                    file.close()

    def _receive_answer(self) -> tuple[Result | EndOfResults | TaskFailed, Bulk | None]:
        """Receive an answer within an item's time, which doesn't count an import. A process may import once, else it
        could stretch its time."""
        seconds = [self._spec.limits.seconds]
        if not self._has_imported:
            seconds += [START_SECONDS, self._spec.limits.seconds]
        for limit in seconds:
            answer, received = self._receive(limit)
            if not isinstance(answer, Importing):
                return answer, received
            self._has_imported = True
        raise ProtocolError("a worker imports again and again")

    def _receive(self, seconds: float) -> tuple[Answer, Bulk | None]:
        data, bulk = self._next_message(seconds)
        try:
            if not data:
                raise EOFError
            return msgspec.msgpack.decode(data, type=Answer), bulk
        except BaseException:
            if bulk is not None:
                bulk.close()
            raise

    def _next_message(self, seconds: float) -> tuple[bytes, Bulk | None]:
        ends = running_time() + seconds
        while (left := ends - running_time()) > 0:
            self._connection.settimeout(min(left, MAX_WAIT))
            with contextlib.suppress(TimeoutError):
                return receive(self._connection)
        raise TimeoutError

    def _start_again(self) -> None:
        """Wait for the process. It is started several times, since a kernel that is short of memory kills what starts.
        Raises HelperFailed when it never becomes ready."""
        for attempt in range(START_ATTEMPTS):
            try:
                return self._wait_until_ready()
            except StartError as error:
                log.error("%s", error)
            if attempt + 1 < START_ATTEMPTS and not self._closing:
                time.sleep(START_PAUSE * 2**attempt)
        raise HelperFailed("a worker could not be started")

    def _wait_until_ready(self) -> None:
        """Wait for the process, which is restarted if it has died. Raises StartError if it dies before it is ready."""
        try:
            if self.process.poll() is not None:
                self._end()
                self._start()
            if self._ready:
                return
            self._receive(START_SECONDS)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._end()
            raise StartError(f"a worker for {self._spec.factory} can't start: {error or 'it ended'}") from None
        self._ready = True

    def _start(self) -> None:
        self.process, self._connection = spawn("triptych.sandbox.child", self._spec, "worker")
        self._ready = self._has_imported = False
        self._known.clear()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._known.clear()
