"""A decoder layer in two calls of the compiled kernels.

For a single token, the overhead of separate calls exceeds the work between a layer's products. Results are
bit-identical to separate calls. Weights must not move, because the kernels hold their addresses.
"""

import ctypes

from torch import Tensor

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.attention.compiled import AttentionOperands, PagedAttention, raise_failure, set_caches
from triptych.layers.linear import RMSNorm
from triptych.layers.products import CompiledProduct, LinearOperands


class AttendLayerOperands(ctypes.Structure):
    """``Before`` in ``kernels/cpu/layer.c``."""

    _fields_ = (
        ("qkv", LinearOperands),
        ("norm", ctypes.c_void_p),
        ("heads_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class FinishLayerOperands(ctypes.Structure):
    """``After`` in ``kernels/cpu/layer.c``."""

    _fields_ = (
        *((name, LinearOperands) for name in ("output", "gate_up", "down")),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class AttendLayer:
    """First half of a layer in one call: norm, query, key and value projections, their norms and rotation, and
    attention over the paged cache."""

    def __init__(  # noqa: PLR0917 (a kernel's operands)
        self,
        kernel: PagedAttention,
        norm: RMSNorm,
        qkv: CompiledProduct,
        heads_norm: RMSNorm | None,
        shape: tuple[int, int, int],
        window: int | None,
    ) -> None:
        """``heads_norm`` is the norm of queries and keys, if any; ``shape`` is (heads, kv heads, head_dim); ``window``
        as in ``AttentionBackend``."""
        self.takes = kernel.takes
        self._kernel, self._shape, self._window = kernel, shape, window
        weights = [norm.weight, None if heads_norm is None else heads_norm.weight]
        self._keep_alive = qkv, weights
        pointers = [None if weight is None else weight.data_ptr() for weight in weights]
        self._operands = AttendLayerOperands(qkv.operands, *pointers, norm.eps)
        self._run = kernel.library.attend_layer
        self._run.argtypes = [
            ctypes.POINTER(AttendLayerOperands),
            *[ctypes.c_void_p] * 3,
            ctypes.POINTER(AttentionOperands),
        ]
        self._run.restype = ctypes.c_int

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self, hidden: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Return attention's output [T, heads * head_dim] and write to the layer's cache, ``keys`` and ``values``.

        ``hidden`` [T, hidden], ``cos`` and ``sin`` [T, 1, head_dim] are contiguous float32. Raises as
        ``PagedAttention`` does.
        """
        heads, _, head_dim = self._shape
        output = hidden.new_empty((len(hidden), heads * head_dim))
        step = self._kernel.shared_operands(batch, self._shape)
        set_caches(step, keys, values, self._window)
        step.output = output.data_ptr()
        raise_failure(self._run(self._operands, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), step), step)
        return output


class FinishLayer:
    """Second half of a dense layer in one call: output projection, residual, norm, MLP, residual."""

    def __init__(self, norm: RMSNorm, output: CompiledProduct, gate_up: CompiledProduct, down: CompiledProduct) -> None:
        self._keep_alive = output, norm.weight, gate_up, down
        products = (product.operands for product in (output, gate_up, down))
        self._operands = FinishLayerOperands(*products, norm.weight.data_ptr(), norm.eps)
        self._run = output.library.finish_layer
        self._run.argtypes = [ctypes.POINTER(FinishLayerOperands), *[ctypes.c_void_p] * 3, ctypes.c_int64]
        self._run.restype = ctypes.c_int

    def __call__(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden`` [T, hidden] and ``attended`` [T, heads * head_dim], contiguous
        float32. Raises MemoryError."""
        output = hidden.new_empty(hidden.shape)
        pointers = hidden.data_ptr(), attended.data_ptr(), output.data_ptr()
        if not self._run(self._operands, *pointers, len(hidden)):
            raise MemoryError(f"no memory for a layer of {len(hidden)} tokens")
        return output
