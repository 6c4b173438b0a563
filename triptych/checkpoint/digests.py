"""SHA-256 digests of weight files, each made once and remembered. No torch, because the frontend uses this too.

SHA-256, because an author of weights must not be able to make two files of one digest, and because hubs publish it: a
file has the same digest whether it was hashed here or named by its hub.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from triptych.checkpoint.digest_store import DigestStore
from triptych.control_groups import usable_cores
from triptych.errors import CheckpointError
from triptych.user_cache import cache_home

log = logging.getLogger(__name__)

MAX_THREADS = 16
CHUNK_BYTES = 4 * 2**20
LARGE_BYTES = 2**30
"""From this many bytes on, hashing is logged: it takes a second or more."""
LOG_SECONDS = 10
SETTLED_NS = 2 * 10**9
"""A file must be older than this, in nanoseconds, for its digest to be remembered. Timestamps are coarse: a younger
file could change once more without a new one."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileState(NamedTuple):
    """A file and its state: the digest of an equal state is taken to be equal."""

    path: str
    """Without symbolic links."""
    size: int
    modified_ns: int
    changed_ns: int
    """Set by the kernel whenever the file or its other timestamps are set."""
    inode: int


class FileDigests:
    """Digests that this process knows, and a store of those that other processes have made."""

    def __init__(self, *, settled_ns: int = SETTLED_NS) -> None:
        """A digest is remembered if the file is older than ``settled_ns``."""
        self._settled_ns = settled_ns
        self._known: dict[FileState, str] = {}
        self.num_hashed = 0
        """Files that have been read."""

    def of(self, paths: Sequence[Path]) -> list[str]:
        """Return the digest of each file; see ``file_digests``."""
        store = DigestStore.open()
        found = {path: digest for path in paths if (digest := self._find(path, store))}
        if missing := [path for path in dict.fromkeys(paths) if path not in found]:
            # one process of a machine hashes, and the others read what it has found
            with store.locked():
                found |= {path: digest for path in missing if (digest := self._find(path, store))}
                if missing := [path for path in missing if path not in found]:
                    found |= self._hash(missing, store)
        return [found[path] for path in paths]

    def _find(self, path: Path, store: DigestStore) -> str | None:
        if digest := _hub_digest(path):
            return digest
        try:
            state = _state(path, path.stat())
        except OSError as error:
            raise _unreadable(path, error) from error
        if state not in self._known and (digest := store.get(state.path, state[1:])):
            self._known[state] = digest
        return self._known.get(state)

    def _hash(self, paths: Sequence[Path], store: DigestStore) -> dict[Path, str]:
        hashed = _hash_files(paths, f"; remembered in {store.folder}" if store.folder else "")
        self.num_hashed += len(hashed)
        for state, digest in hashed:
            if time.time_ns() - max(state.modified_ns, state.changed_ns) >= self._settled_ns:
                self._known[state] = digest
                store.put(state.path, state[1:], digest)
        return {path: digest for path, (_, digest) in zip(paths, hashed, strict=True)}


_of_process = FileDigests()


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the hexadecimal SHA-256 digest of each file.

    They come from the name that the user's Hugging Face cache gave a file, from an earlier call of this or another
    process, or from reading the file. Raises CheckpointError, naming the file, if one can't be read.
    """
    return _of_process.of(paths)


def _hub_digest(path: Path) -> str | None:
    """Return the digest in the name of a file of the user's Hugging Face cache: there, a snapshot's weight file is a
    link to ``blobs/SHA256``. Elsewhere such names are ignored: the author of a checkpoint could invent them."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name) or not blob.is_file():
        return None
    return blob.name if any(blob.is_relative_to(folder) for folder in _hub_caches()) else None


def _hub_caches() -> list[Path]:
    """Return the folders that ``huggingface_hub`` downloads to."""
    given = [os.environ.get("HF_HUB_CACHE"), os.environ.get("HUGGINGFACE_HUB_CACHE")]
    folders = [Path(folder) for folder in given if folder]
    if home := os.environ.get("HF_HOME"):
        folders.append(Path(home, "hub"))
    with contextlib.suppress(RuntimeError):  # no home directory
        folders.append(cache_home() / "huggingface" / "hub")
    return [folder.resolve() for folder in folders if folder.is_absolute()]


def _hash_files(paths: Sequence[Path], where: str) -> list[tuple[FileState, str]]:
    """Hash the files, several at a time. ``where`` ends the log line: where the digests are kept."""
    began, total = time.monotonic(), sum(path.stat().st_size for path in paths)
    is_large = total >= LARGE_BYTES
    if is_large:
        log.info("hashing %.1f GB of weights in %d files, to identify the model%s", total / 1e9, len(paths), where)
    stop = threading.Event()
    num_threads = min(len(paths), usable_cores(), MAX_THREADS)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hash") as threads:
        hashing = [threads.submit(_hash_file, path, stop) for path in paths]
        try:
            while len((ended := wait(hashing, LOG_SECONDS)).done) < len(hashing):
                log.info("hashed %d of %d files", len(ended.done), len(hashing))
            hashed = [one.result() for one in hashing]
        except BaseException:  # KeyboardInterrupt too: don't read on for minutes
            stop.set()
            raise
    if is_large:
        seconds = time.monotonic() - began
        log.info("hashed %.1f GB in %.1f s (%.1f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)
    return hashed


def _hash_file(path: Path, stop: threading.Event) -> tuple[FileState, str]:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as stream:
            state = _state(path, os.fstat(stream.fileno()))
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while (length := stream.readinto(buffer)) and not stop.is_set():
                digest.update(buffer[:length])  # without the GIL
            if _state(path, os.fstat(stream.fileno())) != state:
                raise CheckpointError(f"{path}: changed while it was read")
    except OSError as error:
        raise _unreadable(path, error) from error
    return state, digest.hexdigest()


def _state(path: Path, found: os.stat_result) -> FileState:
    return FileState(os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: can't be read: {error.strerror}")
