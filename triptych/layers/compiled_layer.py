"""A decoder layer in two calls of the compiled kernels: for a single token, the dozen calls that they stand for take
longer than all that goes on between a layer's products. The answers are the same, to the bit. Weights must stay where
they are: the kernels have their addresses."""

import ctypes

from torch import Tensor

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.attention.compiled import AttentionOperands, PagedAttention, raise_failure, set_caches
from triptych.layers.linear import RMSNorm
from triptych.layers.products import CompiledProduct, LinearOperands


class AttendLayerOperands(ctypes.Structure):
    """``Before`` in ``kernels/layer.c``."""

    _fields_ = (
        ("qkv", LinearOperands),
        ("norm", ctypes.c_void_p),
        ("heads_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class FinishLayerOperands(ctypes.Structure):
    """``After`` in ``kernels/layer.c``."""

    _fields_ = (
        *((name, LinearOperands) for name in ("output", "gate_up", "down")),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class AttendLayer:
    """All that a layer does up to attention's output: a norm, queries, keys and values, their norms, their rotation,
    and attention over the paged cache, by ``kernel``."""

    def __init__(  # noqa: PLR0917 (a kernel's operands)
        self,
        kernel: PagedAttention,
        norm: RMSNorm,
        qkv: CompiledProduct,
        heads_norm: RMSNorm | None,
        shape: tuple[int, int, int],
        window: int | None,
    ) -> None:
        """``heads_norm`` is that of queries and keys, if the model has one; ``shape`` is (heads, kv heads, head_dim);
        ``window`` as in ``AttentionBackend``."""
        self.takes = kernel.takes
        self._kernel, self._shape, self._window = kernel, shape, window
        weights = [norm.weight, None if heads_norm is None else heads_norm.weight]
        self._read = qkv, weights
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
        """``hidden`` [T, hidden], and ``cos`` and ``sin`` [T, 1, head_dim], all contiguous float32; the layer's caches.
        Returns [T, heads * head_dim]. Raises as ``PagedAttention`` does."""
        heads, _, head_dim = self._shape
        output = hidden.new_empty((len(hidden), heads * head_dim))
        step = self._kernel.shared_operands(batch, self._shape)
        set_caches(step, keys, values, self._window)
        step.output = output.data_ptr()
        raise_failure(self._run(self._operands, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), step), step)
        return output


class FinishLayer:
    """All that a layer does after attention, but for a mixture of experts: output projection, residual, norm, MLP,
    residual."""

    def __init__(self, norm: RMSNorm, output: CompiledProduct, gate_up: CompiledProduct, down: CompiledProduct) -> None:
        self._read = output, norm.weight, gate_up, down
        products = (product.operands for product in (output, gate_up, down))
        self._operands = FinishLayerOperands(*products, norm.weight.data_ptr(), norm.eps)
        self._run = output.library.finish_layer
        self._run.argtypes = [ctypes.POINTER(FinishLayerOperands), *[ctypes.c_void_p] * 3, ctypes.c_int64]
        self._run.restype = ctypes.c_int

    def __call__(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """``hidden`` [T, hidden] and ``attended`` [T, heads * head_dim], contiguous float32 → [T, hidden], new.
        Raises MemoryError."""
        output = hidden.new_empty(hidden.shape)
        pointers = hidden.data_ptr(), attended.data_ptr(), output.data_ptr()
        if not self._run(self._operands, *pointers, len(hidden)):
            raise MemoryError(f"no memory for a layer of {len(hidden)} tokens")
        return output
