"""In processes of their own, mostly: what is asked of the C library holds for all of a process."""

import gc
import subprocess
import sys

import pytest

from triptych.heap import gc_paused

SIZE = 96 * 2**20  # more than a thread's own heap would hold
OTHER_LIBRARY = 3
STEPS = f"""
import ctypes, resource, sys, threading
from triptych.heap import M_MMAP_THRESHOLD, MMAP_THRESHOLD, keep_freed_memory, share_heap

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes, library.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    before = faults()
    memory = library.malloc({SIZE})
    library.memset(memory, 1, {SIZE})
    library.free(memory)
    return faults() - before

if sys.argv[1] == "kept":
    share_heap()
    keep_freed_memory()
thread = threading.Thread(target=lambda: print(*[step() for _ in range(4)]))
thread.start()
thread.join()
# afterwards, since to ask is to set it
if not hasattr(library, "mallopt") or not library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD):
    sys.exit({OTHER_LIBRARY})
"""


@pytest.mark.parametrize("way", ["kept", "given back"])
def test_a_step_finds_the_memory_of_the_one_before(way: str) -> None:
    """Beside it what happens otherwise: without that there would be nothing to keep."""
    command = [sys.executable, "-c", STEPS, way]
    ended = subprocess.run(command, capture_output=True, check=False, text=True)
    if ended.returncode == OTHER_LIBRARY:
        pytest.skip("this C library maps so much memory by itself")
    assert ended.returncode == 0, ended.stderr
    first, *others = map(int, ended.stdout.split())
    assert len(others) == 3
    if way == "kept":
        assert max(others) < first / 10
    else:
        assert min(others) > first / 2


def test_collections_are_paused_until_the_last_pause_ends() -> None:
    assert gc.isenabled()
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
