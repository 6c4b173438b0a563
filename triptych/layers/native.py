"""Builds the kernels in ``kernels/cpu`` with the machine's C compiler, once, and loads them. If that fails, PyTorch's
are used."""

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from blake3 import blake3

from triptych.user_cache import user_cache

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("kernels") / "cpu"
# No fast-math: it would reorder the operations that make the exponential exact. OpenMP's runtime isn't linked: torch
# has loaded one already, and a second would have threads of its own.
COMPILE = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-c")
TIMEOUT = 60
"""Seconds after which compiling a file is aborted."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the kernels. Logs a warning and returns None if there is no compiler or it fails."""
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        stderr = getattr(error, "stderr", None) or b""
        log.warning("no compiled kernels, so PyTorch's slower ones are used: %s %s", error, stderr.decode()[-500:])
        return None


def _built() -> Path:
    """Return the library's path after building it if necessary. Raises OSError and SubprocessError."""
    name, *options = _compiler()
    path = shutil.which(name)
    if path is None:
        raise OSError(f"there is no C compiler {name!r}")
    compiler = [path, *options]
    folder = user_cache()
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    if not texts:
        raise OSError(f"there are no sources in {SOURCES}")
    # machines with different processors may share a cache folder
    identity = (*texts, *map(str.encode, (*COMPILE, processor_features(), *compiler)))
    library = folder / f"kernels-{blake3(b'|'.join(identity)).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = sorted(SOURCES.glob("*.c"))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor() as compilers:
            commands = [
                (*compiler, *COMPILE, str(source), "-o", made) for source, made in zip(sources, objects, strict=True)
            ]
            list(compilers.map(lambda command: _run(*command), commands))
        finished = Path(scratch) / "kernels.so"
        _run(*compiler, "-shared", *objects, "-o", str(finished), "-lm")
        finished.replace(library)  # atomic: another process may be building it at the same time
    return library


def _compiler() -> list[str]:
    """Return the command and options in CC; if they are invalid, log a warning and return ``cc``."""
    given = os.environ.get("CC", "cc")
    try:
        words, reason = shlex.split(given), "it is empty"
    except ValueError as error:
        words, reason = [], str(error)
    if not words:
        log.warning("the variable CC=%r names no compiler (%s); using cc", given, reason)
    return words or ["cc"]


def processor_features() -> str:
    """Return the processor's instruction set flags, which decide what -march=native produces."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
