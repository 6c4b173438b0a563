"""Variants of the compiled kernels: the instructions that each may use, and how it is compiled. Needs the standard
library and ``control_groups`` alone, because a wheel is built with this, too."""

import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from triptych.control_groups import usable_cores

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("kernels") / "cpu"
PIXELS = "pixels"
"""Name of the library for workers that prepare pixels, and of its source, which is in no other library."""
# No fast-math: it would reorder the operations that make the exponential exact. OpenMP's runtime isn't linked: torch
# has loaded one already, and a second would have threads of its own.
COMPILE = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-c")
# what every processor of the kind can do: a compiler's own default may be more
BASE = {"x86_64": ("-march=x86-64",), "aarch64": ("-march=armv8-a",)}
TIMEOUT = 600
"""Seconds after which a run of the compiler is aborted."""
PIXELS_TIMEOUT = 10
"""The same for ``PIXELS``, which takes less than a second. A worker for media has three runs, and must be ready after
60 seconds: see ``triptych.sandbox.workers``."""
SEAL_BYTES = 32

# Of each variant the features that it needs, as /proc/cpuinfo names them, and the compiler's options for them
_AVX2 = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c", "bmi1": "-mbmi", "bmi2": "-mbmi2"}
_AVX512 = _AVX2 | {f"avx512{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
_VNNI = _AVX512 | {"avx512_vnni": "-mavx512vnni"}
_BF16 = _VNNI | {"avx512_bf16": "-mavx512bf16"}
_AMX = _BF16 | {f"amx_{part}": f"-mamx-{part}" for part in ("tile", "bf16", "int8")}
_X86 = {
    "amx": _AMX,
    "avx512-bf16": _BF16,
    "avx512-vnni": _VNNI,
    "avx512": _AVX512,
    "avx2-vnni": _AVX2 | {"avx_vnni": "-mavxvnni"},
    "avx2": _AVX2,
    "x86-64": {},
}
_ASKED_FOR = frozenset(_AMX.keys() - _AVX512.keys() | {"avx_vnni"})
"""Features that a compiler uses only where a source asks for them, by the macro that the option defines."""
_SLOW = {"GenuineIntel": "avx512-bf16"}
"""By maker, the variant that is slower on its processors than the next one. Intel's multiply bfloat16 on vectors at
half the rate of float32 (docs/kernels.md)."""


@dataclass(frozen=True)
class Variant:
    """Kernels for processors with certain features."""

    name: str
    features: dict[str, str]
    """The compiler's option for each feature that a processor needs, by the feature's name in /proc/cpuinfo."""
    machine: str
    """Kind of machine, a name of ``platform.machine``."""

    def missing(self, features: Collection[str]) -> list[str]:
        """Return which of the features that it needs aren't among these."""
        return sorted(self.features.keys() - set(features))

    @property
    def files(self) -> list[Path]:
        """Its sources, with headers."""
        return [file for file in sorted(SOURCES.glob("*.[ch]")) if (file.stem == PIXELS) == (self.name == PIXELS)]

    @property
    def sources(self) -> list[Path]:
        """The files that are compiled."""
        return [file for file in self.files if file.suffix == ".c"]

    @property
    def options(self) -> tuple[str, ...]:
        """All options."""
        return (*COMPILE, *self.parallel, *BASE.get(self.machine, ()), *self.features.values())

    @property
    def parallel(self) -> tuple[str, ...]:
        """The option for several threads, which kernels for pixels don't have."""
        return () if self.name == PIXELS else ("-fopenmp",)

    @property
    def timeout(self) -> int:
        """Seconds after which a run of the compiler is aborted."""
        return PIXELS_TIMEOUT if self.name == PIXELS else TIMEOUT

    def options_for(self, source: Path) -> tuple[str, ...]:
        """The options with which a file is compiled: without those that would change nothing, so that variants share
        what is the same in each. Raises OSError if it or a header isn't there."""
        text = _with_headers(source)
        macros = {option: f"__{option[2:].replace('-', '_').upper()}__" for option in self.features.values()}
        unused = {
            self.features[one] for one in _ASKED_FOR & self.features.keys() if macros[self.features[one]] not in text
        }
        return tuple(option for option in self.options if option not in unused)


def variants(machine: str) -> list[Variant]:
    """Return all variants for a kind of machine, the fastest first. The last one needs no features."""
    found = _X86 if machine == "x86_64" else {machine: {}}
    return [Variant(name, features, machine) for name, features in found.items()]


def supported_variants(machine: str, features: Collection[str], maker: str) -> list[Variant]:
    """Return the variants for a processor with these features, by this maker, the fastest first."""
    found = [variant for variant in variants(machine) if not variant.missing(features)]
    for place, variant in enumerate(found):
        if variant.name == _SLOW.get(maker):
            found[place : place + 2] = reversed(found[place : place + 2])
            break
    return found


def pixel_kernels(machine: str) -> Variant:
    """Return the kernels that prepare pixels, for all processors of a kind of machine."""
    return Variant(PIXELS, {}, machine)


def processor_features() -> frozenset[str]:
    """Return the names of the processor's instruction set extensions; none if Linux doesn't list them."""
    return frozenset(_in_cpuinfo("flags", "Features").split())


def processor_maker() -> str:
    """Return the name of the processor's maker, such as GenuineIntel; empty if Linux doesn't say."""
    return _in_cpuinfo("vendor_id")


def _in_cpuinfo(*names: str) -> str:
    """Return what /proc/cpuinfo says of the first processor under one of these names; empty if nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(names)), "").partition(":")[2].strip()


def find_compiler() -> list[str]:
    """Return the command and options in CC; if they are invalid, log a warning and return ``cc``. Raises OSError if
    there is no such command."""
    given = os.environ.get("CC", "cc")
    try:
        words, reason = shlex.split(given), "it is empty"
    except ValueError as error:
        words, reason = [], str(error)
    if not words:
        log.warning("the variable CC=%r names no compiler (%s); using cc", given, reason)
    name, *options = words or ["cc"]
    path = shutil.which(name)
    if path is None:
        raise OSError(f"there is no C compiler {name!r}")
    return [path, *options]


def accepts(compiler: list[str], variant: Variant) -> bool:
    """Return whether the compiler knows the variant's instructions. Raises OSError and TimeoutExpired."""
    command = [*compiler, *variant.options, "-xc", os.devnull, "-o", os.devnull]
    return subprocess.run(command, check=False, capture_output=True, timeout=variant.timeout).returncode == 0


def cached(compiler: list[str], variant: Variant, folder: Path) -> Path:
    """Return the path in ``folder`` of the variant that the compiler makes of the sources; it may not exist. Raises
    OSError if there are no sources."""
    texts = [path.read_bytes() for path in variant.files]
    if not texts:
        raise OSError(f"there are no sources in {SOURCES}")
    identity = (*texts, *map(str.encode, (*variant.options, *compiler)))
    return folder / f"kernels-{variant.name}-{blake2b(b'|'.join(identity), digest_size=8).hexdigest()}.so"


def compiled(compiler: list[str], variant: Variant, folder: Path) -> Path:
    """Return the path of the variant in ``folder``, after compiling it if it isn't there or is damaged.

    Raises OSError, CalledProcessError, whose ``stderr`` has the compiler's messages, and TimeoutExpired.
    """
    ((_, made),) = compile_variants(compiler, [variant], folder)
    if isinstance(made, Exception):
        raise made
    return made


def compile_all(compiler: list[str], folder: Path) -> Iterator[tuple[Variant, Path | Exception]]:
    """``compile_variants`` for all variants of this kind of machine, and for the kernels that prepare pixels."""
    machine = platform.machine()
    return compile_variants(compiler, [*variants(machine), pixel_kernels(machine)], folder)


def compile_variants(
    compiler: list[str], wanted: Sequence[Variant], folder: Path
) -> Iterator[tuple[Variant, Path | Exception]]:
    """Yield each variant with its path in ``folder``, or with the exception of ``compiled``. A file that has the same
    options in several variants is compiled once."""
    missing = [variant for variant in wanted if not is_whole(cached(compiler, variant, folder))]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(_num_cores()) as compilers:
        objects: dict[tuple[Path, tuple[str, ...]], Future[Path]] = {}
        files = ((file, variant.options_for(file), variant.timeout) for variant in missing for file in variant.sources)
        for source, options, timeout in dict.fromkeys(files):
            made = Path(scratch, f"{source.stem}{len(objects)}.o")
            objects[source, options] = compilers.submit(_compile, [*compiler, *options, str(source)], made, timeout)
        for variant in wanted:
            library = cached(compiler, variant, folder)
            try:
                if variant in missing:
                    parts = [objects[source, variant.options_for(source)].result() for source in variant.sources]
                    _link(compiler, parts, library, Path(scratch, f"{variant.name}.so"), variant.timeout)
                yield variant, library
            except (OSError, subprocess.SubprocessError) as error:
                yield variant, error


def _compile(command: Sequence[str], made: Path, timeout: int) -> Path:
    _run([*command, "-o", str(made)], timeout)
    return made


def _link(compiler: Sequence[str], objects: Sequence[Path], library: Path, scratch: Path, timeout: int) -> None:
    _run([*compiler, "-shared", *map(str, objects), "-o", str(scratch), "-lm"], timeout)
    with scratch.open("ab") as file:
        file.write(seal(scratch.read_bytes()))
    scratch.replace(library)  # atomic: another process may be compiling it at the same time


def _num_cores() -> int:
    """Those that this process may use: more compilers would take no less time, and might exceed their time limit."""
    return usable_cores() if hasattr(os, "sched_getaffinity") else 1


def _with_headers(source: Path) -> str:
    """A file's text, and that of those in its folder that it includes, some of them several times."""
    text = source.read_text()
    return "\n".join([text, *(_with_headers(source.with_name(name)) for name in re.findall(r'#include "(.+)"', text))])


def is_whole(library: Path) -> bool:
    """Return whether a file ends with the digest of what precedes it. Loading a truncated library may crash."""
    try:
        content = library.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return seal(content[:-SEAL_BYTES]) == content[-SEAL_BYTES:]


def seal(content: bytes) -> bytes:
    """Return the digest that ends a library's file."""
    return blake2b(content, digest_size=SEAL_BYTES).digest()


def _run(command: Sequence[str], timeout: int) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=timeout)
