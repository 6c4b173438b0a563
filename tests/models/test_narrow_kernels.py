"""The compiled kernels as a processor with narrower vectors gets them: the machine that tests may have wide ones."""

import platform
from collections.abc import Iterator

import pytest
import torch

from tests.models.paged_cases import BATCHES, SHAPES, Shape, check, make_case
from tests.models.test_pointwise import test_gelu_tanh as check_gelu_tanh
from tests.models.test_pointwise import test_likeliest as check_likeliest
from tests.models.test_pointwise import test_rms_norm as check_rms_norm
from tests.models.test_pointwise import test_rotate as check_rotate
from tests.models.test_pointwise import test_silu_times as check_silu_times
from triptych.models import native, pointwise
from triptych.models.attention.compiled import PagedAttention

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="there is no C compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="only there are vectors of several widths"),
]


@pytest.fixture(scope="module", params=["haswell", "x86-64"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedAttention]:
    """AVX2's 8 floats, and what every x86 has."""
    compile_for = tuple(f"-march={request.param}" if word.startswith("-march") else word for word in native.COMPILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr(native, "COMPILE", compile_for)
        library = native.library.__wrapped__()
        assert library is not None
        patch.setattr(pointwise, "_library", lambda: pointwise.declared(library))
        yield PagedAttention(library)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [*SHAPES, Shape(16, 1, 256, 16)], ids=str)
def test_attention(narrow: PagedAttention, shape: Shape, batch: str) -> None:
    check(make_case(shape, *BATCHES[batch], torch.float32, torch.float32, torch.device("cpu")), narrow)


def test_pointwise(narrow: PagedAttention) -> None:
    for shape in ((64,), (37,), (4, 128)):
        check_rms_norm(3, shape)
    check_rotate(700, 3, 80)
    check_silu_times(3, 41)
    check_gelu_tanh((1, 700, 33), 3)
    check_likeliest(8, 1_003)
