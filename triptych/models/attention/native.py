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

from triptych.models.attention.base import AttentionBatch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged.c")
# The kernel sums and compares finite numbers only, so reordering is all that fast-math changes. OpenMP's runtime isn't
# linked: torch has loaded one, and a second would keep threads of its own.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-c")
TIMEOUT = 60
"""Seconds that the compiler gets; it needs less than one."""
MAX_GROUP, MAX_DIM = 16, 256
"""Query heads for one kv head, and the size of a head, that the kernel has room for."""
NO_WINDOW = 2**30


class Step(ctypes.Structure):
    """The kernel's operands, as ``paged.c`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "output", "slots")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "query_lens", "kv_lens", "page_starts")),
        *((name, ctypes.c_void_p) for name in ("decodes", "tiles", "pages")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_decodes", "num_tiles")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "page_size")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride", "stride", "window")),
        ("scale", ctypes.c_float),
    )


class PagedAttention:
    """The kernel in ``paged.c``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.paged_attention
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Step)], None
        self._rows = int(library.rows())

    def suits(self, query: Tensor, cache: Tensor) -> bool:
        """Whether the kernel is made for these dtypes and shapes."""
        _, heads, dim = query.shape
        in_float32 = query.dtype == cache.dtype == torch.float32 and query.device.type == "cpu"
        return in_float32 and heads // cache.shape[2] <= MAX_GROUP and dim <= MAX_DIM

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        window: int | None = None,
    ) -> Tensor:
        """See ``AttentionBackend``. Of caches, a token's heads are contiguous."""
        query, key, value = (_with_dense_heads(tensor) for tensor in (query, key, value))
        num_tokens, heads, dim = query.shape
        _, page_size, kv_heads, _ = key_cache.shape
        tables = batch.paged(self._rows // (heads // kv_heads))
        output = query.new_empty(query.shape)
        operands = [
            *(query, key, value, key_cache, value_cache, output, batch.slots),
            *(tables.query_starts, tables.query_lens, tables.kv_lens, tables.page_starts),
            *(tables.decodes, tables.tiles, tables.pages),
        ]
        step = Step(
            *(tensor.data_ptr() for tensor in operands), num_tokens, len(tables.decodes), len(tables.tiles),
            heads, kv_heads, dim, page_size, query.stride(0), key.stride(0), value.stride(0), key_cache.stride(1),
            NO_WINDOW if window is None else window, dim**-0.5,
        )  # fmt: skip
        self._run(step)
        return output


def _with_dense_heads(tokens: Tensor) -> Tensor:
    """[T, heads, d] of which each token's values are contiguous; tokens may lie apart."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()


@cache
def paged_attention() -> PagedAttention | None:
    """The kernel; None, with a line in the log, on a machine that has no C compiler or on which it fails."""
    try:
        return PagedAttention(ctypes.CDLL(str(_built())))
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
