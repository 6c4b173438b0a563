"""Keeps rows in files of a folder, on a disk or in shared memory: they outlive the process, and others use them, too.

A file has the rows of one part, after a header with their shape and checksum, and a name for each of theirs: hard
links. A writer holds the folder's lock, and counts the bytes of all processes. A process that is killed
releases the lock, and leaves at most a temporary file and too high a count, which the next look through the folder
mends.
"""

import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from triptych.clock import Clock
from triptych.encode.store import EmbeddingRows, Found, num_found
from triptych.encode.stored_rows import decoded, encoded
from triptych.executor import StartExecutor
from triptych.messages.stats import CacheTier

log = logging.getLogger(__name__)

LOCK, TEMPORARY = ".lock", ".new"
_NAME = re.compile("[0-9a-f]{64}")
MAX_QUEUED_BYTES = 64 * 2**20
"""Rows that wait to be written. Others are dropped: they would take memory that the process may not have."""
MAX_QUEUED_LOOKUPS = 256
"""Lookups that wait. Others find nothing: a disk that is slow must not hold up the encoder."""
LOCK_SECONDS = 2.0
"""Time that a write waits for another process's."""
PAUSE_SECONDS = 10.0
"""Time after a failure in which nothing is written: a process that has stopped may have the lock, and each write would
wait; a full disk stays full."""
_LOCK_POLL = 0.005


class FileStore:
    """``EmbeddingStore`` of up to ``max_bytes`` of files in a folder, evicted by the time of their last use.

    Files that are damaged, or of another version of the program, are as good as none.
    """

    def __init__(
        self, folder: Path, max_bytes: int, clock: Clock, start_executor: StartExecutor, *, name: str = "disk"
    ) -> None:
        """Create the folder, for this user alone. Raises OSError if it can't be created or others may write to it.
        ``name`` is the tier's in statistics."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError(f"{folder} is no folder that this user alone may write to")
        self.max_bytes = max_bytes
        self._folder = folder
        self._clock = clock
        self._reader = start_executor(1, "stored-rows-read")
        self._writer = start_executor(1, "stored-rows-write")
        self._guard = threading.Lock()
        self._name = name
        self._num_lookups = self._num_hits = self._queued_bytes = 0
        self._paused_until = 0.0
        """Until when nothing is written, because a write has failed."""
        self._failed: set[str] = set()
        """What has failed before, and names of damaged files, so that each is logged once."""
        self._writer.submit(self._logged, "count", self._locked, self._evict)

    @property
    def num_bytes(self) -> int:
        """Size of all files in the folder, as counted last, whichever process wrote them."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / LOCK).read_bytes()[:20])
        return 0

    @property
    def tiers(self) -> list[CacheTier]:
        """See ``EmbeddingStore``."""
        return [CacheTier(self._name, self._num_hits, self.num_bytes, self.max_bytes)]

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        """See ``EmbeddingStore``."""
        with self._guard:
            if self._num_lookups >= MAX_QUEUED_LOOKUPS:
                busy: Future[Found] = Future()
                busy.set_result([None] * len(names))
                return busy
            self._num_lookups += 1
        return self._reader.submit(self._read_all, list(names))

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        """See ``EmbeddingStore``. Does nothing while too much waits to be written."""
        with self._guard:
            if rows.nbytes > self.max_bytes or self._queued_bytes + rows.nbytes > MAX_QUEUED_BYTES:
                return
            self._queued_bytes += rows.nbytes
        self._writer.submit(self._written, list(names), rows)

    def evict(self, names: Sequence[str]) -> None:
        """See ``EmbeddingStore``."""
        self._writer.submit(self._logged, "evict", self._remove, list(names))

    def flush(self) -> None:
        """Wait until what was put or evicted before is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is queued, and end the threads."""
        self._reader.shutdown()
        self._writer.shutdown()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _read_all(self, names: list[str]) -> Found:
        try:
            found = [self._logged("read", self._read, name) for name in names]
            self._num_hits += num_found(found)  # by this thread alone
            return found
        finally:
            with self._guard:
                self._num_lookups -= 1

    def _read(self, name: str) -> EmbeddingRows | None:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(data)
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        if (rows := decoded(data)) is not None:
            return rows
        if name not in self._failed:  # perhaps it can't be removed
            self._failed.add(name)
            log.warning("the stored rows in %s are damaged or of another version; they are removed", path)
        self.evict([name])
        return None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _written(self, names: list[str], rows: EmbeddingRows) -> None:
        try:
            self._logged("write", self._locked, lambda count: self._write(names, rows, count))
        finally:
            with self._guard:
                self._queued_bytes -= rows.nbytes

    def _write(self, names: list[str], rows: EmbeddingRows, num_bytes: int) -> int:
        """Write rows, unless a file of one of the names has them, and link the other names. Returns the new count."""
        paths = [self._folder / name for name in names]
        known = next((path for path in paths if path.exists()), None)
        if known is None:
            header, values = encoded(rows)
            if (needed := len(header) + len(values)) > self.max_bytes:
                return num_bytes
            if num_bytes + needed > self.max_bytes:
                num_bytes = self._evict(num_bytes, needed)
            num_bytes += needed
            self._count(num_bytes)  # before: too high a count does no harm
            temporary = self._folder / TEMPORARY
            with temporary.open("wb") as file:
                file.write(header)
                file.write(values)
            known = temporary.rename(paths[0])
        for path in paths:
            with contextlib.suppress(FileExistsError):
                os.link(known, path)
        return num_bytes

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files with all their names, even while another process has the lock: too high a count does no harm."""
        wanted = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                wanted.add((self._folder / name).stat().st_ino)
        for number, (_, _, paths) in self._files().items():
            if number in wanted:
                for path in paths:
                    path.unlink(missing_ok=True)
        self._locked(self._evict)

    def _evict(self, _counted: int = 0, needed: int = 0) -> int:
        """Count the files and, if ``needed`` bytes don't fit, remove those that were used least recently. Returns the
        new count."""
        (self._folder / TEMPORARY).unlink(missing_ok=True)  # of a process that was killed: it had the lock
        files = sorted(self._files().values(), key=lambda one: one[1])
        num_bytes = sum(size for size, _, _ in files)
        if num_bytes + needed <= self.max_bytes:
            return num_bytes
        most = max(0, self.max_bytes - needed - self.max_bytes // 10)  # some less, so that it isn't often done
        for size, _, paths in files:
            if num_bytes <= most:
                break
            for path in paths:
                path.unlink(missing_ok=True)
            num_bytes -= size
        return num_bytes

    def _files(self) -> dict[int, tuple[int, float, list[Path]]]:
        """Return size, time of the last use and paths of each file, by its number."""
        found: dict[int, tuple[int, float, list[Path]]] = {}
        for entry in os.scandir(self._folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    made = about.st_size, about.st_mtime, list[Path]()
                    found.setdefault(about.st_ino, made)[2].append(Path(entry.path))
        return found

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder's lock. Raises TimeoutError if another process doesn't release it."""
        descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            give_up = self._clock.now() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock.now() > give_up:
                        raise TimeoutError("another process holds the lock") from None
                    self._clock.sleep(_LOCK_POLL)
            yield
        finally:
            os.close(descriptor)

    def _locked(self, change: Callable[[int], int]) -> None:
        """Change the files, given their size in all; ``change`` returns the new one. Does nothing shortly after a
        failure."""
        if self._clock.now() < self._paused_until:
            return
        try:
            with self.exclusive():
                text = (self._folder / LOCK).read_bytes()[:20]
                after = before = int(text) if text.isdigit() else self._evict()
                try:
                    after = change(before)
                except OSError:
                    after = self._evict()  # perhaps the count was too low, and the disk is full of rows
                    raise
                finally:
                    self._count(after)
        except OSError:
            self._paused_until = self._clock.now() + PAUSE_SECONDS
            raise

    def _count(self, num_bytes: int) -> None:
        """Record the size of all files. The caller holds the lock."""
        (self._folder / LOCK).write_bytes(b"%d" % num_bytes)

    def _logged(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call, or None if it fails: without its files the store keeps nothing, which is no
        reason to fail."""
        try:
            return call(*args)
        except (OSError, ValueError) as error:
            if what not in self._failed:
                self._failed.add(what)
                log.error("can't %s stored rows in %s: %s", what, self._folder, error)
            return None
