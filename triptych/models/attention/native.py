"""Builds the compiled kernel with the machine's own C compiler, once, and loads it. Where that fails there is none."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from triptych.models.attention.base import Decodes

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged.c")
# The kernel sums and compares finite numbers only, so reordering is all that fast-math changes. OpenMP's runtime isn't
# linked: torch has loaded one, and a second would keep threads of its own.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-c")
TIMEOUT = 60
"""Seconds that the compiler gets; it needs less than one."""
MAX_GROUP, MAX_DIM = 16, 256
"""Query heads for one kv head, and the size of a head, that the kernel has room for."""


class PagedDecode:
    """The kernel in ``paged.c``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.paged_decode
        self._function.argtypes = [*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 6, ctypes.c_float]
        self._function.restype = None

    def suits(self, query: Tensor, cache: Tensor) -> bool:
        """Whether the kernel is made for these dtypes and shapes."""
        _, heads, dim = query.shape
        in_float32 = query.dtype == cache.dtype == torch.float32 and query.device.type == "cpu"
        return in_float32 and heads // cache.shape[2] <= MAX_GROUP and dim <= MAX_DIM

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, decodes: Decodes) -> Tensor:
        """``query`` [D, heads, d], contiguous, the new tokens of ``decodes``; caches [pages, page_size, kv_heads, d],
        of which a token's heads are contiguous. Returns [D, heads, d]."""
        output = torch.empty_like(query)
        operands = (query, keys, values, decodes.pages, decodes.offsets, decodes.kv_lens, output)
        sequences, heads, dim = query.shape
        _, page_size, kv_heads, _ = keys.shape
        pointers = [tensor.data_ptr() for tensor in operands]
        self._function(*pointers, sequences, heads, kv_heads, dim, page_size, keys.stride(1), dim**-0.5)
        return output


@cache
def paged_decode() -> PagedDecode | None:
    """The kernel; None, with a line in the log, on a machine that has no C compiler or on which it fails."""
    try:
        return PagedDecode(ctypes.CDLL(str(_built())))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no compiled attention kernel, so PyTorch's is used: %s", error)
        return None


def _built() -> Path:
    """The library, built if it isn't there yet. Raises OSError and SubprocessError."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("there is no C compiler")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"
    # a cache folder may be shared by machines with other processors
    named_by = (SOURCE.read_bytes(), *map(str.encode, COMPILE), _processor().encode(), compiler.encode())
    library = folder / f"paged-{blake3(b'|'.join(named_by)).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects, finished = Path(scratch) / "paged.o", Path(scratch) / "paged.so"
        _run(compiler, *COMPILE, str(SOURCE), "-o", str(objects))
        _run(compiler, "-shared", str(objects), "-o", str(finished), "-lm")
        finished.replace(library)  # whole or not at all: another process may be building it too
    return library


def _processor() -> str:
    """What -march=native goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
