"""What stays in memory: the garbage collector is kept away from it, the C library from what is free for a moment."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """For as long as a process has what it works with. A full collection walks through all that is there, which takes
    tens of milliseconds, with PyTorch more, and nobody is answered meanwhile: within this it finds only what comes."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# of mallopt(3), in glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
NEVER = -1
OF_ITS_OWN, OF_ITS_OWN_AT_MOST = 2**30, 2**25
"""Bytes from which on a piece of memory is mapped by itself, and given back as soon as it is freed; and the most that
some versions of glibc take for it."""


def share_heap() -> None:
    """All threads of this process take memory from one heap: those that glibc makes for threads hold 64 MiB, and what
    is larger is mapped by itself. To be called before there are other threads, which begin with heaps of their own."""
    _mallopt(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees. A step needs the same memory as the one before, and what was given
    back to the system comes page by page, each cleared, at the first touch: thousands of times in a step over a prompt.
    What has been freed so far is given back once."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    _mallopt(M_TRIM_THRESHOLD, NEVER)
    if not _mallopt(M_MMAP_THRESHOLD, OF_ITS_OWN):
        _mallopt(M_MMAP_THRESHOLD, OF_ITS_OWN_AT_MOST)


def _mallopt(parameter: int, value: int) -> bool:
    """Whether it was taken; other C libraries have no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
