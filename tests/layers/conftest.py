"""Fixtures for the tests of ``triptych/layers``."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from triptych.layers import native


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and the machine may be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_checkpoint`` into a folder of its own, made once per set of options. Tests don't write to it."""
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        name = repr(sorted(options.items()))
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **options)
        return made[name]

    return make


@pytest.fixture(scope="session", params=["native", "cooperlake", "alderlake", "haswell", "x86-64"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled kernels for this processor, for AVX-512 with bfloat16 but without AMX, for AVX2 with and without
    VNNI, and for any x86, since the machine that runs the tests may have more."""
    if request.param != "native" and platform.machine() != "x86_64":
        pytest.skip("only x86 has vectors of several widths")
    flag = {"cooperlake": "amx_tile", "alderlake": "avx_vnni", "haswell": "avx2"}.get(request.param)
    if flag and flag not in native.processor_features().split():
        pytest.skip(f"this processor has no {flag}, so it has been tested or can't be")
    if native.library() is None:
        pytest.skip("there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
        march = f"-march={request.param}"
        patch.setattr(native, "COMPILE", [march if word.startswith("-march") else word for word in native.COMPILE])
        library = native.library.__wrapped__()
    assert library is not None
    return library
