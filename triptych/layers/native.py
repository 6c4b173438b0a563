"""Builds the kernels in ``kernels/`` with the machine's own C compiler, once, and loads them. Where that fails there
are none, and PyTorch's do."""

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

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("kernels") / "cpu"
# No fast-math: it would take apart what an exponential does to be exact. OpenMP's runtime isn't linked: torch has
# loaded one, and a second would keep threads of its own.
COMPILE = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-c")
TIMEOUT = 60
"""Seconds that the compiler gets for a file; it needs a few."""


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None, with a line in the log, on a machine that has no GCC or on which it fails."""
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        said = getattr(error, "stderr", None) or b""
        log.warning("no compiled kernels, so PyTorch's slower ones are used: %s %s", error, said.decode()[-500:])
        return None


def _built() -> Path:
    """The library, built if it isn't there yet. Raises OSError and SubprocessError."""
    name, *options = _compiler()
    path = shutil.which(name)
    if path is None:
        raise OSError(f"there is no C compiler {name!r}")
    compiler = [path, *options]
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # one that isn't absolute is to be ignored, says its specification
    folder = (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "triptych"
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    if not texts:
        raise OSError(f"there are no sources in {SOURCES}")
    # a cache folder may be shared by machines with other processors
    named_by = (*texts, *map(str.encode, (*COMPILE, processor_features(), *compiler)))
    library = folder / f"kernels-{blake3(b'|'.join(named_by)).hexdigest()[:16]}.so"
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
        finished.replace(library)  # whole or not at all: another process may be building it too
    return library


def _compiler() -> list[str]:
    """What CC says, a command and its options; ``cc``, with a line in the log, where that is no command."""
    given = os.environ.get("CC", "cc")
    try:
        words, reason = shlex.split(given), "it is empty"
    except ValueError as error:
        words, reason = [], str(error)
    if not words:
        log.warning("the variable CC=%r names no compiler (%s); using cc", given, reason)
    return words or ["cc"]


def processor_features() -> str:
    """What -march=native goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
