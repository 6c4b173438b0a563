"""Fixtures for the tests of ``triptych/layers``."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from triptych.layers import native
from triptych.layers.delta_rule.compiled import cpu_delta_rule
from triptych.layers.devices import attention_for
from triptych.layers.kernel_variants import Variant, compiled, find_compiler
from triptych.layers.pointwise import compiled_kernels
from triptych.user_cache import user_cache


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and the machine may be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _own_kernels() -> None:
    """What keeps the process's kernels for good gets them before a test puts others in their place."""
    for in_bf16 in (False, True):
        attention_for(torch.device("cpu"), in_bf16)
    compiled_kernels()
    cpu_delta_rule()


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


VARIANTS = ["the fastest", "avx512-bf16", pytest.param("avx2-vnni", marks=pytest.mark.slow), "avx2", "x86-64"]


@pytest.fixture(scope="session", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The compiled kernels that this processor uses, and variants that have other paths than those; of the remaining
    variants, ``test_kernel_variants.py`` tests a part."""
    usable = native.usable_variants()
    if request.param == usable[0].name:
        pytest.skip("this is the fastest")
    for variant in usable[:1] if request.param == "the fastest" else usable:
        if request.param in {variant.name, "the fastest"}:
            return load_variant(variant)
    pytest.skip("this processor lacks its instructions")


def load_variant(variant: Variant) -> ctypes.CDLL:
    if native.library() is None:
        pytest.skip("there is no C compiler")
    return native.load(compiled(find_compiler(), variant, user_cache()))
