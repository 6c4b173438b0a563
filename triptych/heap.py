"""Keeps long-lived objects out of the garbage collector, and stops glibc from returning freed memory to the system."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze all objects allocated so far, so that full collections walk only newer ones.

    A full collection over a loaded process stops it for long enough to be noticed by clients."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# parameters of mallopt(3), from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
NEVER = -1
MMAP_THRESHOLD, MAX_MMAP_THRESHOLD = 2**30, 2**25
"""Size in bytes from which an allocation is mapped separately, and returned to the system when freed; and the largest
value that some versions of glibc accept for it."""


def share_heap() -> None:
    """Make all threads of this process allocate from one heap. glibc's heaps for threads are small, and every larger
    allocation is mapped separately. Call it before any other thread starts."""
    _mallopt(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, after returning once what has been freed so far.

    A step needs as much memory as the step before. Memory that was returned comes back page by page, each with a page
    fault and cleared, thousands of times in one step over a prompt."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    _mallopt(M_TRIM_THRESHOLD, NEVER)
    if not _mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD):
        _mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)


def _mallopt(parameter: int, value: int) -> bool:
    """Set a parameter of malloc; return False if the C library rejects it or has no ``mallopt``."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
