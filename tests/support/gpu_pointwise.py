"""The Triton kernels between products against PyTorch's operations in fp32. Not a test: ``test_triton_pointwise.py``
runs it in Triton's interpreter, ``tests/gpu`` on a GPU."""

import torch

from triptych.layers import pointwise
from triptych.layers.pointwise import Activation
from triptych.layers.pointwise_gpu import triton_backend

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: a rounding to the dtype, or two."""


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def check_rms_norm(num_tokens: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Norms of whole tokens, and of heads that are part of a wider tensor."""
    weight, wider = random(*shape, dtype=dtype), 5 * random(num_tokens, 2 * shape[0], *shape[1:], dtype=dtype)
    expected = pointwise.rms_norm(wider.float()[:, : shape[0]].clone(), weight.float(), 1e-6)
    found = triton_backend.rms_norm(wider.to(device)[:, : shape[0]], weight.to(device), 1e-6)
    close(found, expected, dtype)


def check_rotate(num_tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """In place, in a wider tensor, whose other heads stay."""
    wider, angles = random(num_tokens, heads + 2, dim, dtype=dtype).to(device), random(num_tokens, 1, dim, dtype=dtype)
    cos, sin, before = angles.float().cos().to(dtype), angles.float().sin().to(dtype), wider.cpu()
    tokens = before[:, 1 : heads + 1].float()
    first, second = tokens.chunk(2, dim=-1)
    expected = tokens * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()
    close(triton_backend.rotate(wider[:, 1 : heads + 1], cos.to(device), sin.to(device)), expected, dtype)
    assert torch.equal(wider.cpu()[:, :: heads + 1], before[:, :: heads + 1])


def check_gate(num_tokens: int, width: int, activation: Activation, dtype: torch.dtype, device: torch.device) -> None:
    """Also for large values, whose exponentials overflow."""
    gate_up = 40 * random(num_tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = activation(gate.contiguous()) * up
    found = triton_backend.gate_and_mul(gate_up.to(device), activation)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-3, rtol=TOLERANCES[dtype])
