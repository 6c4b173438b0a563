"""Sandboxed workers as their parent sees them: questions in, results out, and errors for whatever goes wrong."""

import itertools
import logging
import mmap
import threading
from collections.abc import Iterator

import msgspec

from triptych.errors import InternalError, RequestError, StartError, from_wire
from triptych.sandbox.protocol import (
    Answer,
    Ask,
    BrokenProtocol,
    Bulk,
    End,
    Failure,
    WorkerSpec,
    receive,
    send,
)
from triptych.sandbox.starting import start

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""For a worker to import what it needs."""
ATTEMPTS = 2
"""An item whose worker died is tried once more: somebody else may have killed it."""


class _Died(Exception):
    """The worker ended while it worked on this."""


class _Lost(Exception):
    """The worker ended while it worked on something else."""


class _TooSlow(Exception):
    pass


class Workers:
    """So many processes that run the same thing. May be used from any thread; each result is waited for."""

    def __init__(self, spec: WorkerSpec, number: int, failed: type[RequestError]) -> None:
        """Starts them and doesn't wait. ``failed`` is what an item becomes that crashes a worker, or needs more time or
        memory than it may."""
        self.spec = spec
        self._failed = failed
        self._workers = [_Worker(spec, failed) for _ in range(number)]
        self._items = itertools.count()

    def wait_until_ready(self) -> None:
        """Raises StartError when they can't run what they shall."""
        for worker in self._workers:
            worker.wait_until_ready()

    def results(self, request: bytes, bulk: bytes = b"") -> Iterator[tuple[bytes, mmap.mmap | None]]:
        """The results for one request as they are asked for, each with its bulk, which nobody else can change.

        Raises what the worker raised, and ``failed`` when it takes too long, needs too much memory or dies. Giving up
        the iterator gives up the request.
        """
        worker = min(self._workers, key=lambda one: len(one.items))
        item = next(self._items)
        given = failed = skipped = 0
        asked: bytes | None = request
        worker.items.add(item)
        try:
            while True:
                try:
                    answer = worker.ask(item, asked, bulk if asked is not None else None)
                except _Lost:
                    asked, skipped = request, 0
                    continue
                except _Died:
                    failed += 1
                    if failed == ATTEMPTS:
                        raise self._failed("it crashed what was to work on it") from None
                    asked, skipped = request, 0
                    continue
                except _TooSlow:
                    raise self._failed(f"it takes longer than {self.spec.limits.seconds:g} s") from None
                asked = None
                if answer is None:
                    return
                skipped += 1
                if skipped > given:
                    given += 1
                    yield answer
        finally:
            worker.items.discard(item)
            worker.closed.append(item)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Ends them at once; who waits for a result gets an error."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process at a time, started anew when it has ended. ``items`` are being asked for, ``closed`` no more."""

    def __init__(self, spec: WorkerSpec, failed: type[RequestError]) -> None:
        self._spec = spec
        self._failed = failed
        self.items: set[int] = set()
        self.closed: list[int] = []
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._ready = self._closing = False
        self._start()

    def wait_until_ready(self) -> None:
        with self._lock:
            self._wait_until_ready()

    def ask(self, item: int, request: bytes | None, bulk: bytes | None) -> tuple[bytes, mmap.mmap | None] | None:
        """The item's next result, None for no more. ``request`` comes with the first question, and again after _Lost
        and _Died. Raises _Died and _TooSlow, the worker being gone, and what the item's handler raised."""
        with self._lock:
            if self._closing:
                raise InternalError("the service is ending")
            if request is None and item not in self._known:
                raise _Lost
            try:
                self._wait_until_ready()
            except StartError as error:
                log.error("%s", error)
                raise InternalError("a worker is missing") from None
            self._known.add(item)
            closed, self.closed = self.closed, []
            self._known.difference_update(closed)
            return self._exchange(Ask(item, request, closed), bulk)

    def close(self) -> None:
        self._closing = True
        self.process.kill()
        with self._lock:
            self._end()

    def _exchange(self, ask: Ask, bulk: bytes | None) -> tuple[bytes, mmap.mmap | None] | None:
        sent = received = None
        try:
            sent = Bulk.of(bulk) if bulk else None
            send(self._connection, ask, sent)
            answer, received = self._receive(self._spec.limits.seconds)
            if isinstance(answer, Failure):
                raise from_wire(answer.error, answer.message) if answer.error else self._failed(answer.message)
            if isinstance(answer, End):
                return None
            content = received.sealed(self._spec.limits.output_bytes) if received else None
            if answer.num_bytes != (len(content) if content is not None else 0):
                raise BrokenProtocol("another size than it said")
            return answer.about, content
        except TimeoutError:
            self._end()
            raise _TooSlow from None
        except (OSError, EOFError, BrokenProtocol, msgspec.MsgspecError) as error:
            self._end()
            if self._closing:
                raise InternalError("the service is ending") from None
            log.warning("a worker died of one item: %s", error or type(error).__name__)
            raise _Died from None
        finally:
            for file in (sent, received):
                if file is not None:
                    file.close()

    def _receive(self, seconds: float) -> tuple[Answer, Bulk | None]:
        self._connection.settimeout(seconds)
        data, bulk = receive(self._connection)
        try:
            if not data:
                raise EOFError
            return msgspec.msgpack.decode(data, type=Answer), bulk
        except BaseException:
            if bulk is not None:
                bulk.close()
            raise

    def _wait_until_ready(self) -> None:
        """Starts a new process where the last one has ended."""
        if self.process.poll() is not None:
            self._end()
            self._start()
        if self._ready:
            return
        try:
            self._receive(START_SECONDS)
        except (OSError, EOFError, msgspec.MsgspecError):
            self._end()
            raise StartError(f"a worker for {self._spec.factory} can't start") from None
        self._ready = True

    def _start(self) -> None:
        self.process, self._connection = start("triptych.sandbox.child", self._spec, "worker")
        self._ready = False
        self._known.clear()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._known.clear()
