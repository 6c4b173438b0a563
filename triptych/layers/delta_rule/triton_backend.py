"""The gated delta rule on GPUs: launches the Triton kernels. On CPU tensors they run in Triton's interpreter, for
tests."""

import torch
import triton
from torch import Tensor

from triptych.layers.delta_rule.base import (
    BLOCK,
    DeltaBatch,
    DeltaHeads,
    DeltaState,
    DeltaWeights,
    check_slots,
)
from triptych.layers.delta_rule.triton_kernels import convolve_kernel, several_kernel, single_kernel

COLUMNS = 32
"""Columns of a state per program, at most; a state's rows times these stay in a program's registers."""
MIN_SIDE = 16
"""Rows of the smallest matrix that tensor cores multiply."""


class TritonDeltaRule:
    """``DeltaRule`` for CUDA devices and, under TRITON_INTERPRET=1, for CPUs. Supports fp16, bf16 and fp32."""

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self, mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, state: DeltaState, batch: DeltaBatch
    ) -> Tensor:
        """See ``DeltaRule``."""
        check_slots(batch, state)
        heads, tables = weights.heads, batch.tables_on(mixed.device)
        where = tables.starts, tables.lens, tables.slots, tables.fresh
        shape = constants(heads)
        mixed, a, b = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (mixed, a, b))
        convolved = torch.empty(mixed.shape, dtype=torch.float32, device=mixed.device)
        output = torch.empty((len(mixed), heads.value_heads, heads.value_dim), dtype=mixed.dtype, device=mixed.device)
        convolve_kernel[(len(tables.lens), 2 * heads.key_heads + heads.value_heads)](
            mixed, weights.taps, state.conv, convolved, *where,
            mixed.stride(0), state.conv.stride(0), state.conv.stride(1), heads.channels, heads.key_dim**-0.5,
            **convolution_constants(heads), TOKENS=BLOCK, num_warps=4,
        )  # fmt: skip
        gates = a, b, weights.rates, weights.dt_bias
        strides = a.stride(0), b.stride(0), state.recurrent.stride(0), heads.channels
        slices = triton.cdiv(heads.value_dim, shape["COLUMNS"])
        if len(tables.several):
            several_kernel[(len(tables.several), heads.value_heads, slices)](
                convolved, *gates, state.recurrent, output, tables.several, *where, *strides, **shape, TOKENS=BLOCK,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        if len(tables.singles):
            single_kernel[(len(tables.singles), heads.value_heads, slices)](
                convolved, *gates, state.recurrent, output, tables.singles, *where, *strides, **shape, num_warps=4,
            )  # fmt: skip
        return output


def constants(heads: DeltaHeads) -> dict[str, int]:
    """Return the compile-time constants of the kernels that advance states."""
    return {
        "KEY_HEADS": heads.key_heads,
        "VALUE_HEADS": heads.value_heads,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "DIM_BLOCK": _side(heads.key_dim),
        "COLUMNS": min(COLUMNS, _side(heads.value_dim)),
    }


def convolution_constants(heads: DeltaHeads) -> dict[str, int]:
    """Return the compile-time constants of ``convolve_kernel``."""
    return {
        "KEY_HEADS": heads.key_heads,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "DIM_BLOCK": _side(max(heads.key_dim, heads.value_dim)),
    }


def _side(count: int) -> int:
    return max(MIN_SIDE, triton.next_power_of_2(count))
