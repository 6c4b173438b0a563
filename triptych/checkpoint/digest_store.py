"""Digests of files, kept in the user's cache folder for other processes and later starts.

A user who can write here can give one model the name of another. So the folder must belong to this user, and users
outside its groups may not write to it. If anything is wrong with an entry, the file is hashed once more.
"""

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from triptych.running_time import running_time
from triptych.user_cache import user_cache

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 4096
MAX_WAIT = 600
"""Seconds to wait for another process that hashes."""
LOCK_FILE = "lock"

State = tuple[int, int, int, int]
"""Size, time of modification and of change in nanoseconds, inode."""


class _Entry(msgspec.Struct, frozen=True):
    state: State
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class DigestStore:
    """A folder with one small file for each path, replaced when the file at that path has changed. ``folder`` is None
    if there is none that can be used; then nothing is found."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def open(cls) -> "DigestStore":
        """Return the user's store. Logs why if it can't be used."""
        try:
            folder = user_cache() / "digests"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            log.info("digests of weights can't be remembered: %s", error)
            return cls(None)
        if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
            log.warning("%s isn't this user's, or all users may write to it: digests aren't remembered", folder)
            return cls(None)
        return cls(folder)

    def get(self, path: str, state: State) -> str | None:
        """Return the digest of the file at a path in that state; None if it isn't known."""
        if self.folder is None:
            return None
        try:
            entry = msgspec.json.decode(_read_own(self._entry(path)), type=_Entry)
        except (OSError, ValueError, RecursionError):  # invalid JSON, UTF-8 or fields are ValueErrors
            return None
        return entry.sha256 if entry.state == state else None

    def put(self, path: str, state: State, sha256: str) -> None:
        """Remember a digest, if possible."""
        if self.folder is None:
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:  # with mode 0600
                try:
                    file.write(msgspec.json.encode(_Entry(state, sha256)))
                    file.close()
                    os.replace(file.name, self._entry(path))
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            log.info("the digest of %s can't be remembered: %s", path, error)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from hashing meanwhile. Goes on without the lock if it can't be had in time."""
        with contextlib.ExitStack() as held:
            if self.folder is not None:
                try:
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    lock = os.open(self.folder / LOCK_FILE, flags, 0o600)
                    held.callback(os.close, lock)
                    _lock(lock)
                except OSError as error:
                    log.info("hashing without a lock: %s", error)
            yield

    def _entry(self, path: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{blake3(os.fsencode(path)).hexdigest()}.json"


def _lock(descriptor: int) -> None:
    """Take the lock. Raises OSError for a file system without locks, and TimeoutError."""
    deadline, has_logged = running_time() + MAX_WAIT, False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if running_time() > deadline:
            raise TimeoutError(f"another process has hashed for {MAX_WAIT} s")
        if not has_logged:
            log.info("another process is hashing weights; waiting for it")
            has_logged = True
        time.sleep(0.05)


def _is_own(found: os.stat_result) -> bool:
    """Return whether only this user may write, or a group that this process has: Kubernetes gives all in a volume to
    the group of ``fsGroup`` at each mount."""
    if found.st_uid != os.geteuid() or found.st_mode & 0o002:
        return False
    return not found.st_mode & 0o020 or found.st_gid in {os.getegid(), *os.getgroups()}


def _read_own(path: Path) -> bytes:
    """Return the contents of a small regular file of this user. Raises OSError and ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or not _is_own(found) or found.st_size > MAX_ENTRY_BYTES:
            raise ValueError(f"{path} is not a file that this process wrote")
        return stream.read(MAX_ENTRY_BYTES)
