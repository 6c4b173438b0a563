"""Operations between products on GPUs: launches the Triton kernels. On CPU tensors, for tests, they run in Triton's
interpreter."""

import torch
import triton
from torch import Tensor

from triptych.layers.pointwise_gpu.triton_kernels import gate_kernel, rms_norm_kernel, rotate_kernel

BLOCK = 1024
"""Values of a gated activation that a program computes."""


def rms_norm(activations: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``pointwise.rms_norm``; ``weight`` has the dtype of ``activations`` and the strides of one token."""
    output = torch.empty(activations.shape, dtype=activations.dtype, device=activations.device)
    heads, width = (1, *weight.shape)[-2:]
    rms_norm_kernel[(len(activations) * heads,)](
        activations, weight, output, activations.stride(0), eps,
        HEADS=heads, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1 if width <= 256 else 8,
    )  # fmt: skip
    return output


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``pointwise.rotate``: in place. ``cos`` and ``sin`` are contiguous, and a head's values adjacent."""
    num_tokens, num_heads, dim = heads.shape
    rotate_kernel[(num_tokens,)](
        heads, cos, sin, heads.stride(0), HEADS=num_heads, HEAD_BLOCK=triton.next_power_of_2(num_heads),
        HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
    return heads


def gate_and_mul(gate_up: Tensor, activation: int) -> Tensor:
    """See ``pointwise.gate_and_mul``; ``gate_up`` is contiguous."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = num_tokens, triton.cdiv(width, BLOCK)
    gate_kernel[grid](gate_up, output, WIDTH=width, KIND=activation, BLOCK=BLOCK)
    return output
