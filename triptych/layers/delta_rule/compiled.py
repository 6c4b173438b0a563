"""The gated delta rule on CPUs: by the compiled kernel, ``kernels/cpu/delta_rule.c``, or by PyTorch."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from triptych.layers import native
from triptych.layers.delta_rule.base import DeltaBatch, DeltaRule, DeltaState, DeltaWeights, check_slots
from triptych.layers.delta_rule.reference import PyTorchDeltaRule

_POINTERS = (
    *("mixed", "a", "b", "taps", "rates", "dt_bias", "recurrent", "conv", "output"),
    *("starts", "lens", "slots", "fresh", "several", "singles"),
)
_SIZES = (
    *("num_tokens", "num_sequences", "num_singles", "num_several", "num_slots"),
    *("key_heads", "value_heads", "key_dim", "value_dim"),
    *("mixed_stride", "a_stride", "b_stride", "recurrent_stride", "conv_stride", "past_stride"),
)


class DeltaOperands(ctypes.Structure):
    """The kernel's operands: ``DeltaStep`` in ``kernels/cpu/delta_rule.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
    )


class CompiledDeltaRule:
    """``DeltaRule`` for CPUs. What isn't float32 is left to PyTorch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.delta_rule
        self._run.argtypes, self._run.restype = [ctypes.POINTER(DeltaOperands)], ctypes.c_int
        self._other = PyTorchDeltaRule()

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self, mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, state: DeltaState, batch: DeltaBatch
    ) -> Tensor:
        """See ``DeltaRule``. Raises MemoryError, too."""
        if any(tensor.dtype != torch.float32 for tensor in (mixed, a, b, weights.taps, state.conv)):
            return self._other(mixed, a, b, weights, state, batch)
        heads = weights.heads
        mixed, a, b = map(_dense_rows, (mixed, a, b))
        output = mixed.new_empty((len(mixed), heads.value_heads, heads.value_dim))
        step = self._shared_operands(batch)
        step.num_tokens, step.num_slots = len(mixed), len(state.recurrent)
        step.key_heads, step.value_heads = heads.key_heads, heads.value_heads
        step.key_dim, step.value_dim = heads.key_dim, heads.value_dim
        step.mixed, step.a, step.b, step.output = (tensor.data_ptr() for tensor in (mixed, a, b, output))
        step.taps, step.rates, step.dt_bias = (one.data_ptr() for one in (weights.taps, weights.rates, weights.dt_bias))
        step.recurrent, step.conv = state.recurrent.data_ptr(), state.conv.data_ptr()
        step.mixed_stride, step.a_stride, step.b_stride = (tensor.stride(0) for tensor in (mixed, a, b))
        step.recurrent_stride = state.recurrent.stride(0)
        step.conv_stride, step.past_stride = state.conv.stride()[:2]
        done = self._run(step)
        if done < 0:
            raise MemoryError(f"no memory for the delta rule of {len(mixed)} tokens")
        if not done:
            check_slots(batch, state)
        return output

    def _shared_operands(self, batch: DeltaBatch) -> DeltaOperands:
        """Return a copy of the operands that all layers of a step share, valid as long as ``batch`` exists."""
        if DeltaOperands not in batch.prepared:
            tables = batch.tables_on(torch.device("cpu"))
            step = DeltaOperands(
                num_sequences=len(tables.lens), num_singles=len(tables.singles), num_several=len(tables.several)
            )
            step.starts, step.lens, step.slots, step.fresh, step.several, step.singles = (
                tensor.data_ptr() for tensor in tables.tensors()
            )
            batch.prepared[DeltaOperands] = step
        return DeltaOperands.from_buffer_copy(batch.prepared[DeltaOperands])


@cache
def cpu_delta_rule() -> DeltaRule:
    """Return the backend for CPUs: PyTorch's if there are no compiled kernels."""
    return PyTorchDeltaRule() if (library := native.library()) is None else CompiledDeltaRule(library)


def _dense_rows(rows: Tensor) -> Tensor:
    """Return [T, n] with each token's values contiguous."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
