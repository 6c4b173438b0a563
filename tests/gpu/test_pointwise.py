"""Triton's kernels between products on a GPU: the cases that run in the interpreter elsewhere, and larger ones."""

import pytest
import torch

from tests.support.gpu_pointwise import check_gate, check_rms_norm, check_rotate
from triptych.layers.pointwise import Activation

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOKENS = (1, 3, 700)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", [(64,), (37,), (4, 128), (3, 20), (4096,), (40, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(gpu: torch.device, num_tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rms_norm(num_tokens, shape, dtype, gpu)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 128), (1, 80), (5, 6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate(gpu: torch.device, num_tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    check_rotate(num_tokens, heads, dim, dtype, gpu)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [96, 1041])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_mul(gpu: torch.device, activation: Activation, width: int, dtype: torch.dtype) -> None:
    check_gate(3, width, activation, dtype, gpu)
