"""Memory settings of a process: exempts long-lived objects from garbage collection, and makes glibc keep freed
memory."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze all objects allocated so far, so that full collections walk only newer ones.

    A full collection pauses a loaded process for long enough to delay clients."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no garbage meanwhile: importing large packages makes many objects, but hardly any garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# parameters of mallopt(3), from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
NEVER = -1
MMAP_THRESHOLD, MAX_MMAP_THRESHOLD = 2**30, 2**25
"""In bytes. Larger allocations are mapped separately, and returned to the system when freed. The second value is the
maximum of glibc versions that reject the first."""


def share_heap() -> None:
    """Make all threads of this process allocate from one heap. glibc's heaps for threads are small, and every larger
    allocation is mapped separately. Call it before any other thread starts."""
    _mallopt(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Return freed memory to the system once, and keep all memory that is freed later.

    Successive steps need similar amounts of memory. Memory that was returned is mapped again page by page, with a page
    fault for each, thousands of times in one prefill step."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    _mallopt(M_TRIM_THRESHOLD, NEVER)
    if not _mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD):
        _mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)


def _mallopt(parameter: int, value: int) -> bool:
    """Set a parameter of malloc; return False if the C library rejects it or has no ``mallopt``."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
