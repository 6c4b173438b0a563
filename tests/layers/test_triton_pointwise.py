"""Triton's kernels between products, in Triton's interpreter; ``tests/gpu`` runs the same cases on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs these on it", allow_module_level=True)

from tests.support.gpu_pointwise import check_gate, check_rms_norm, check_rotate
from triptych.layers.pointwise import Activation

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOKENS = (1, 3, 20)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", [(64,), (37,), (4, 128), (3, 20)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(num_tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rms_norm(num_tokens, shape, dtype, CPU)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 128), (1, 80), (5, 6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate(num_tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    check_rotate(num_tokens, heads, dim, dtype, CPU)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's, of the interpreter
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [96, 1041])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_mul(activation: Activation, width: int, dtype: torch.dtype) -> None:
    check_gate(3, width, activation, dtype, CPU)
