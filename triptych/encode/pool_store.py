"""Keeps rows in a pool that encode instances of several machines have in common: Mooncake Store.

A pool may be away, hang, be full, forget everything or return what others wrote. It is asked on a thread of its own, by
way of a process that is ended if it doesn't answer. Then nothing is asked for a while, twice as long each time.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from triptych.clock import Clock
from triptych.encode.pool_process import PoolProcess
from triptych.encode.pool_protocol import Data, PoolRequest
from triptych.encode.store import EmbeddingRows, Found, answered, num_found
from triptych.encode.stored_rows import decoded, encoded
from triptych.errors import HelperFailed
from triptych.executor import StartExecutor
from triptych.messages.stats import CacheTier

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 0.5
"""Time from when a lookup is asked for in which it may begin to read a value, and time to say which there are."""
PUT_SECONDS = 1.0
"""Time that a put or removal may take, which lookups may wait for; a put takes longer by its bytes."""
SLOWEST = 50 * 10**6
"""Bytes per second at which values may be read and put, beside those times."""
START_SECONDS = 20.0
"""Time to connect, in which nothing is asked."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which nothing is asked after a failure: the first one, and after many in a row."""
MAX_VALUE_BYTES = 48 * 2**20
"""Rows of a part that are kept; more don't fit in Mooncake's buffer."""
MAX_QUEUED_BYTES = 64 * 2**20
"""Rows that wait to be put. Others are dropped."""
MAX_QUEUED_LOOKUPS = 256
NAMES_AT_ONCE = 256
"""Names of a lookup that the pool is asked for together."""
_PREFIX = "triptych-rows/"

StartProcess = Callable[[], PoolProcess]


class PoolStore:
    """``EmbeddingStore`` in a pool. What others may have changed is checked; a pool that fails has nothing."""

    num_bytes = max_bytes = 0

    def __init__(
        self, start: StartProcess, clock: Clock, start_executor: StartExecutor, *, key: bytes | None = None
    ) -> None:
        """``start`` starts the process that speaks to the pool. ``key``, of 32 bytes, is known to all that may write
        values; None: all who reach the pool may."""
        self._start = start
        self._clock = clock
        self._key = key
        self._thread = start_executor(1, "pooled-rows")
        self._guard = threading.Lock()
        self._lookups: deque[tuple[list[str], Future[Found], float]] = deque()
        self._changes: deque[tuple[list[str], EmbeddingRows | None]] = deque()
        """Names and rows to put; no rows: names to remove."""
        self._queued_bytes = 0
        self._process: PoolProcess | None = None
        self._asks = False
        """Whether the pool is there. Otherwise lookups find nothing at once."""
        self._try_at = 0.0
        """When to connect again; infinite while that is under way."""
        self._pause = FIRST_PAUSE
        self._closing = False
        self._num_hits = 0
        self._begin_connecting()

    @property
    def tiers(self) -> list[CacheTier]:
        """See ``EmbeddingStore``. A pool's size isn't known."""
        return [CacheTier("pool", self._num_hits, 0)]

    @property
    def is_there(self) -> bool:
        """Whether the pool answered last."""
        return self._asks

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        """See ``EmbeddingStore``. Takes ``LOOKUP_SECONDS`` at most, and what is left of a put or of a value that is
        being read then. Finds what arrives by then."""
        if not self._may_ask():
            return answered([None] * len(names))
        result: Future[Found] = Future()
        with self._guard:
            if len(self._lookups) >= MAX_QUEUED_LOOKUPS:
                return answered([None] * len(names))
            self._lookups.append((list(names), result, self._clock.now() + LOOKUP_SECONDS))
        self._thread.submit(self._next)
        return result

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        """See ``EmbeddingStore``. Does nothing while too much waits to be put."""
        with self._guard:
            if rows.nbytes > MAX_VALUE_BYTES or self._queued_bytes + rows.nbytes > MAX_QUEUED_BYTES:
                return
        self._change(names, rows)

    def evict(self, names: Sequence[str]) -> None:
        """See ``EmbeddingStore``."""
        self._change(names, None)

    def _change(self, names: Sequence[str], rows: EmbeddingRows | None) -> None:
        if self._may_ask() and names:
            with self._guard:
                self._queued_bytes += 0 if rows is None else rows.nbytes
                self._changes.append((list(names), rows))
            self._thread.submit(self._next)

    def flush(self) -> None:
        """Wait until what was asked for before is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """End the process and the thread. What waits finds nothing."""
        self._closing, self._asks = True, False
        if (process := self._process) is not None:
            process.kill()
        self._thread.shutdown()
        self._end_process()

    # ── the pool's state ─────────────────────────────────────────────────────────────────────────────────────

    def _may_ask(self) -> bool:
        if not self._asks:
            with self._guard:
                due = self._clock.now() >= self._try_at and not self._closing
                self._try_at = float("inf") if due else self._try_at
            if due:
                self._begin_connecting()
        return self._asks

    def _begin_connecting(self) -> None:
        self._try_at = float("inf")
        self._thread.submit(self._connect)

    def _connect(self) -> None:
        try:
            self._process = self._start()
            if self._closing:
                return
            self._process.wait_until_ready(START_SECONDS)
        except (HelperFailed, OSError) as error:
            self._failed(error)
        else:
            log.info("the pool of embeddings is there")
            self._asks = True

    def _failed(self, error: Exception) -> None:
        if self._closing:
            return
        log.warning("the pool of embeddings fails, and is left alone for %g s: %s", self._pause, error)
        self._end_process()
        self._asks = False
        self._try_at = self._clock.now() + self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    # ── on the thread ────────────────────────────────────────────────────────────────────────────────────────

    def _next(self) -> None:
        """Answer the first lookup, or make the first change if none waits."""
        with self._guard:
            lookup = self._lookups.popleft() if self._lookups else None
            change = self._changes.popleft() if lookup is None else None
            if change is not None and change[1] is not None:
                self._queued_bytes -= change[1].nbytes
        try:
            if lookup is not None:
                self._answer(*lookup)
            elif change is not None and self._process is not None:
                self._make(self._process, *change)
        except HelperFailed as error:
            self._failed(error)

    def _answer(self, names: list[str], result: "Future[Found]", expires: float) -> None:
        found: dict[str, EmbeddingRows | None] = {}
        try:
            if self._process is not None and self._clock.now() < expires:
                self._find(self._process, names, expires, found)
                self._pause = FIRST_PAUSE
        finally:
            answer = [found.get(name) for name in names]
            self._num_hits += num_found(answer)
            result.set_result(answer)

    def _find(
        self, process: PoolProcess, names: list[str], expires: float, found: dict[str, EmbeddingRows | None]
    ) -> None:
        """Add rows by name, as far as they arrive in time: one value after the other, however large all are."""
        unlike = list(dict.fromkeys(names))
        for first in range(0, len(unlike), NAMES_AT_ONCE):
            asked = unlike[first : first + NAMES_AT_ONCE]
            if self._clock.now() >= expires:
                break
            reply, _ = process.call(PoolRequest("exist", _keys(asked)), LOOKUP_SECONDS)
            for name in [name for name, exists in zip(asked, reply.exist, strict=False) if exists]:
                if name not in found:
                    self._read(process, name, expires, found)

    def _read(self, process: PoolProcess, name: str, expires: float, found: dict[str, EmbeddingRows | None]) -> None:
        """Read the rows of a name, if it is time yet. Its value may be another name, under which they are."""
        holder, value = name, self._get(process, name, expires)
        if value and (target := _target(value, name, self._key)):
            if target in found:
                found[name] = found[target]
                return
            holder, value = target, self._get(process, target, expires)
        rows = decoded(value, holder, self._key) if value else None
        if value and rows is None:
            log.warning("rows in the pool are damaged, of another version, or not ours; they are removed")
            process.call(PoolRequest("remove", _keys({name, holder})), PUT_SECONDS)
        found[name] = found[holder] = rows

    def _get(self, process: PoolProcess, name: str, expires: float) -> bytearray | None:
        """Return the value of a name; None if it has none, or it is too late to begin."""
        if (left := expires - self._clock.now()) <= 0:
            return None
        _, values = process.call(PoolRequest("get", _keys([name])), left + MAX_VALUE_BYTES / SLOWEST)
        return values[0] if values else None

    def _make(self, process: PoolProcess, names: list[str], rows: EmbeddingRows | None) -> None:
        if rows is None:
            process.call(PoolRequest("remove", _keys(names)), PUT_SECONDS)
            return
        *others, name = names
        head, values = encoded(rows, name, self._key)
        pairs: list[tuple[str, list[Data]]] = [(name, [head, values])]
        pairs += [(one, [_alias(one, name, self._key)]) for one in others]
        for key, value in pairs:
            size = sum(map(len, value))
            process.call(PoolRequest("put", _keys([key]), [size]), PUT_SECONDS + size / SLOWEST, value)


def _keys(names: Sequence[str] | set[str]) -> list[str]:
    return [_PREFIX + name for name in names]


def _alias(name: str, target: str, key: bytes | None) -> bytes:
    """Return the value of a name of rows that have another one: the latter, in the form of rows."""
    text = np.frombuffer(target.encode(), np.uint8)[None]
    return b"".join(encoded(text, f"alias {name}", key))


def _target(value: bytearray, name: str, key: bytes | None) -> str | None:
    """Return the name that a value has in place of rows; None for others."""
    if len(value) > 2**10 or (text := decoded(value, f"alias {name}", key)) is None:
        return None
    return text.tobytes().decode("ascii", "replace")
