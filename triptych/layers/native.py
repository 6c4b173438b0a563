"""Loads the compiled kernels: the fastest variant that the processor supports, from the wheel, else compiled at the
first use. If that fails, PyTorch's are used."""

import contextlib
import ctypes
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from triptych.layers import kernel_variants
from triptych.layers.kernel_variants import (
    Variant,
    accepts,
    cached,
    compiled,
    find_compiler,
    is_whole,
    processor_features,
    processor_maker,
    supported_variants,
    variants,
)
from triptych.user_cache import user_cache

log = logging.getLogger(__name__)

PREBUILT = Path(__file__).with_name("kernels") / "prebuilt"
"""A wheel's variants; a checkout has none."""

NEEDED_BYTES = 2**25
"""Room for a variant's library and what it is made of."""

_ARCH_PRCTL = 158
"""Number of the system call on x86-64."""


@dataclass(frozen=True)
class Kernels:
    """The kernels in use."""

    library: ctypes.CDLL | None
    description: str
    """The variant, where it is from, and why it isn't a faster one."""


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if PyTorch's are used."""
    return kernels().library


@cache
def kernels() -> Kernels:
    """Load the kernels. Logs which, with a warning if faster ones failed. PyTorch must have been imported."""
    known, features = variants(platform.machine()), usable_features()
    usable = supported_variants(platform.machine(), features, processor_maker())
    attempts = [partial(_prebuilt, variant) for variant in usable if _file(variant).exists()]
    failures: dict[str, None] = {}  # each once
    for attempt in (*attempts, partial(_compiled, usable)):
        try:
            variant, origin, loaded = attempt()
        except (OSError, subprocess.SubprocessError) as error:
            stderr = getattr(error, "stderr", None) or b""
            failures[f"{error} {stderr.decode(errors='replace')[-500:]}".strip()] = None
            continue
        beyond = known[: known.index(variant)]
        lacking = [f"{one.name} needs {', '.join(one.missing(features))}" for one in beyond if one not in usable]
        slower = [f"{one.name} is slower on this processor" for one in beyond if one in usable[usable.index(variant) :]]
        reasons = [*lacking[-1:], *slower]
        description = "; ".join([f"{variant.name}, {origin}", *reasons, *failures])
        log.log(logging.WARNING if failures else logging.INFO, "kernels: %s", description)
        return Kernels(loaded, description)
    description = f"no compiled kernels, so PyTorch's slower ones are used: {'; '.join(failures)}"
    log.warning("%s", description)
    return Kernels(None, description)


def usable_variants() -> list[Variant]:
    """Return the variants that this process can use, the fastest first."""
    return supported_variants(platform.machine(), usable_features(), processor_maker())


def usable_features() -> frozenset[str]:
    """Return the processor's features that the system lets this process use."""
    features = processor_features()
    return features - {"amx_tile"} if "amx_tile" in features and not grants_tiles() else features


def grants_tiles() -> bool:
    """Return whether the system lets this process use AMX's tiles. Linux before 5.16 and some sandboxes refuse."""
    request, tile_data = 0x1023, 18  # ARCH_REQ_XCOMP_PERM: permission for all threads; XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, request, tile_data) == 0)


@cache
def pixel_kernels() -> ctypes.CDLL | None:
    """Load the kernels that prepare pixels, which don't need PyTorch. Returns None if numpy is used."""
    variant = kernel_variants.pixel_kernels(platform.machine())
    for attempt in (partial(_prebuilt, variant), partial(_compiled, [variant])):
        try:
            return attempt()[2]
        except (OSError, subprocess.SubprocessError) as error:
            reason = error
    log.info("no compiled kernels for pixels, so numpy's slower functions are used: %s", reason)
    return None


def load(path: Path) -> ctypes.CDLL:
    """Load a variant's file. Raises OSError if it is damaged or made for another kind of machine."""
    if not is_whole(path):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _file(variant: Variant) -> Path:
    return PREBUILT / f"{variant.name}.so"


def _prebuilt(variant: Variant) -> tuple[Variant, str, ctypes.CDLL]:
    return variant, "prebuilt", load(_file(variant))


def _compiled(usable: list[Variant]) -> tuple[Variant, str, ctypes.CDLL]:
    """Return the fastest variant that the compiler knows. Raises OSError and SubprocessError."""
    compiler, folder = find_compiler(), _cache()
    for variant in usable:
        if folder is not None and is_whole(made := cached(compiler, variant, folder)):
            return variant, "compiled on this machine", load(made)  # also from a folder that can't be written to
        if accepts(compiler, variant):
            with _writable(folder) as place:
                return variant, "compiled on this machine", load(compiled(compiler, variant, place))
    raise OSError(f"{compiler[0]} compiles no variant for this processor")


def _cache() -> Path | None:
    try:
        return user_cache()
    except RuntimeError:  # a user without a home directory
        return None


@contextlib.contextmanager
def _writable(folder: Path | None) -> Iterator[Path]:
    """Yield the folder if there is room for a library and what it is made of, else a temporary one: a loaded library
    stays when its file is removed. Raises OSError if there is no room there either."""
    try:
        if folder is None:
            raise OSError("the user has no home directory")
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder)
    except OSError as error:
        log.warning("compiled kernels can't be kept in %s, so each start compiles them: %s", folder, error)
    else:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        check_room(Path(temporary))
        yield Path(temporary)


def check_room(folder: Path) -> None:
    """Raise OSError unless ``NEEDED_BYTES`` can be written in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
