"""A layer of a decoder or of a tower in two calls of the compiled kernels; a mixture's experts, or heads' products, in
one.

For a single token, the overhead of separate calls exceeds the work between a layer's products; for many, separate calls
read all values from memory more often. Results are bit-identical to separate calls. Weights must not move, because the
kernels hold their addresses.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from triptych.layers.attention.base import PLAIN, AttentionBatch, AttentionOptions
from triptych.layers.attention.compiled import AttentionOperands, PagedAttention, raise_failure, set_layer
from triptych.layers.linear import LayerNorm, PackedLinear, RMSNorm
from triptych.layers.lora import LoraLinear
from triptych.layers.pointwise import Activation
from triptych.layers.products import CompiledProduct, LinearOperands
from triptych.layers.second_weights import SecondLinear
from triptych.layers.specs import ClampedSwiGLU

CLAMPED = 4
"""The kind of ``ClampedSwiGLU`` in ``kernels/cpu/pointwise.h``, after those of ``Activation``."""


def compiled(linear: nn.Module) -> CompiledProduct | None:
    """Return a linear layer's product, without LoRAs and second weights, if it uses the compiled kernels and needs no
    all-reduce, else None."""
    base = linear.linear if isinstance(linear, LoraLinear | SecondLinear) else linear
    product = base.product if isinstance(base, PackedLinear) else None
    return product if isinstance(product, CompiledProduct) else None


class NormOperands(ctypes.Structure):
    """``Norm`` in ``kernels/cpu/pointwise.h``."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_float))

    @classmethod
    def of(cls, norm: RMSNorm | LayerNorm) -> "NormOperands":
        """``norm`` must outlive the result."""
        bias = norm.bias.data_ptr() if isinstance(norm, LayerNorm) else None
        return cls(norm.weight.data_ptr(), bias, norm.eps)


class ActivationOperands(ctypes.Structure):
    """``Activation`` in ``kernels/cpu/pointwise.h``."""

    _fields_ = (("kind", ctypes.c_int64), ("limit", ctypes.c_float), ("alpha", ctypes.c_float))

    @classmethod
    def of(cls, activation: Activation | ClampedSwiGLU) -> "ActivationOperands":
        if isinstance(activation, ClampedSwiGLU):
            return cls(CLAMPED, activation.limit, activation.alpha)
        return cls(activation)


class AttendLayerOperands(ctypes.Structure):
    """``Before`` in ``kernels/cpu/layer.c``."""

    _fields_ = (
        *(("qkv", LinearOperands), ("norm", NormOperands)),
        *(("heads_norm", ctypes.c_void_p), ("normalised", ctypes.c_int64)),
    )


class FinishLayerOperands(ctypes.Structure):
    """``After`` in ``kernels/cpu/layer.c``."""

    _fields_ = (
        *((name, LinearOperands) for name in ("output", "up", "down")),
        ("norm", NormOperands),
        ("activation", ActivationOperands),
        *((name, ctypes.c_void_p) for name in ("output_norm", "down_norm")),
        *((name, LinearOperands) for name in ("gate", "projection")),
        *(("projection_norm", ctypes.c_void_p), ("factor", ctypes.c_float)),
    )


class AttendLayer:
    """First half of a layer in one call: norm, query, key and value projections, their norms and rotation, and
    attention."""

    def __init__(  # noqa: PLR0917 (a kernel's operands)
        self,
        kernel: PagedAttention,
        norm: RMSNorm | LayerNorm,
        qkv: CompiledProduct,
        heads_norm: RMSNorm | None,
        shape: tuple[int, int, int],
        options: AttentionOptions = PLAIN,
    ) -> None:
        """``qkv`` yields queries alone if the cache has the step's keys and values already. ``heads_norm`` is the norm
        of the first heads that it yields, if any, with the epsilon of ``norm``; ``shape`` is (heads, kv heads,
        head_dim)."""
        self.takes = kernel.takes
        self.kernel, self.shape, self.options = kernel, shape, options
        self._keep_alive = qkv, norm, heads_norm
        of_heads = (None, 0) if heads_norm is None else (heads_norm.weight.data_ptr(), len(heads_norm.weight))
        self.operands = AttendLayerOperands(qkv.operands, NormOperands.of(norm), *of_heads)
        self.writes = qkv.operands.outputs > shape[0] * shape[2]
        self._run = kernel.library.attend_layer
        self._run.argtypes = [
            ctypes.POINTER(AttendLayerOperands),
            *[ctypes.c_void_p] * 3,
            ctypes.c_int64,
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
        step = self.kernel.shared_operands(batch, self.shape)
        set_layer(step, keys, values, self.options, self.shape[2])
        if not self.writes:
            step.num_tokens = 0
        return self._attend(hidden, cos, sin, step)

    def over_segments(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, lengths: Sequence[int], scale: float
    ) -> Tensor:
        """Return attention's output [T, heads * head_dim], where each token attends to all tokens of its segment.

        ``hidden``, and cos and sin if there is a rotation, are as above; ``lengths`` and ``scale``, and errors, as in
        ``PagedAttention.over_segments``.
        """
        step, tables = self.kernel.segment_operands(len(hidden), lengths, self.shape, scale)
        cos, sin = rotation or (None, None)
        output = self._attend(hidden, cos, sin, step)
        del tables  # the step points to them
        return output

    def _attend(self, hidden: Tensor, cos: Tensor | None, sin: Tensor | None, step: AttentionOperands) -> Tensor:
        heads, _, head_dim = self.shape
        output = hidden.new_empty((len(hidden), heads * head_dim))
        step.output = output.data_ptr()
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (hidden, cos, sin))
        raise_failure(self._run(self.operands, *pointers, len(hidden), step), step)
        return output


@dataclass(frozen=True)
class FinishExtras:
    """What only some layers do in their second half."""

    mixed_norm: RMSNorm | None = None
    """Norm of attention's output."""
    finished_norm: RMSNorm | None = None
    """Norm of the MLP's output."""
    per_layer: tuple[CompiledProduct, CompiledProduct, RMSNorm] | None = None
    """Gate, projection and norm of ``PerLayerInput``."""
    factor: float = 1.0
    """Factor of the result."""


NO_EXTRAS = FinishExtras()


class FinishLayer:
    """Second half of a dense layer in one call: output projection, residual, norm, MLP, residual."""

    def __init__(  # noqa: PLR0917 (a kernel's operands)
        self,
        norm: RMSNorm | LayerNorm,
        output: CompiledProduct,
        up: CompiledProduct,
        down: CompiledProduct,
        activation: Activation = Activation.SILU,
        extras: FinishExtras = NO_EXTRAS,
    ) -> None:
        """The MLP is gated if ``up`` has twice the outputs that ``down`` has inputs: the gates, then their factors. It
        has the activation of ``extras``' gate, too, and all norms have the same epsilon."""
        self._keep_alive = output, norm, up, down, extras
        products = (product.operands for product in (output, up, down))
        norms = (None if one is None else one.weight.data_ptr() for one in (extras.mixed_norm, extras.finished_norm))
        per_layer = extras.per_layer or (None, None, None)
        gate, projection = (LinearOperands() if one is None else one.operands for one in per_layer[:2])
        last = None if per_layer[2] is None else per_layer[2].weight.data_ptr()
        self.operands = FinishLayerOperands(
            *products, NormOperands.of(norm), ActivationOperands.of(activation), *norms, gate, projection, last,
            extras.factor,
        )  # fmt: skip
        self._run = output.library.finish_layer
        self._run.argtypes = [
            ctypes.POINTER(FinishLayerOperands),
            *[ctypes.c_void_p] * 3,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        self._run.restype = ctypes.c_int

    def __call__(self, hidden: Tensor, attended: Tensor, values: Tensor | None = None) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden`` [T, hidden] and ``attended`` [T, heads * head_dim], contiguous
        float32. ``values``, float32 [T, per-layer values], are the tokens' for this layer, if ``extras`` has a gate;
        each token's are contiguous. Raises MemoryError."""
        output = hidden.new_empty(hidden.shape)
        pointers = hidden.data_ptr(), attended.data_ptr(), output.data_ptr()
        of_tokens = (None, 0) if values is None else (values.data_ptr(), values.stride(0))
        if not self._run(self.operands, *pointers, len(hidden), *of_tokens):
            raise MemoryError(f"no memory for a layer of {len(hidden)} tokens")
        return output


class MultiplyMLP:
    """``down(activation(up(x)))`` in one call: the activated values may be stored as the second product takes them."""

    def __init__(self, up: CompiledProduct, activation: Activation, down: CompiledProduct) -> None:
        """``up`` has as many outputs as ``down`` has inputs."""
        self._up, self._down = up, down
        self._activation = ActivationOperands.of(activation)
        self._run = up.library.mlp
        self._run.argtypes = [
            *(ctypes.POINTER(LinearOperands), ctypes.POINTER(LinearOperands), ctypes.POINTER(ActivationOperands)),
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
        ]
        self._run.restype = ctypes.c_int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return float32 [T, out] for float32 ``hidden`` [T, in], of which each token's values are contiguous. Raises
        ValueError for another width, and MemoryError."""
        num_tokens, inputs = hidden.shape
        if inputs != self._up.inputs:
            raise ValueError(f"{inputs} inputs for an MLP of {self._up.inputs}")
        output = hidden.new_empty((num_tokens, self._down.outputs))
        operands = self._up.operands, self._down.operands, self._activation
        if not self._run(*operands, hidden.data_ptr(), hidden.stride(0), output.data_ptr(), num_tokens):
            raise MemoryError(f"no memory for an MLP of {num_tokens} tokens")
        return output


class MultiplyHeads:
    """A product for each head, in one call."""

    def __init__(self, products: Sequence[CompiledProduct]) -> None:
        """``products`` are of one shape."""
        self._keep_alive = products
        self._outputs = products[0].outputs
        self._operands = (LinearOperands * len(products))(*(product.operands for product in products))
        self._run = products[0].library.linear_heads
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        self._run.argtypes = [pointer, integer, pointer, integer, integer, pointer, integer]
        self._run.restype = ctypes.c_int

    def __call__(self, values: Tensor) -> Tensor:
        """Return float32 [heads, T, out] for float32 ``values`` [T, heads, in], whose last dimension is contiguous.
        Raises MemoryError."""
        num_tokens, heads, _ = values.shape
        output = values.new_empty((heads, num_tokens, self._outputs))
        where = values.data_ptr(), values.stride(0), values.stride(1)
        if not self._run(self._operands, heads, *where, output.data_ptr(), num_tokens):
            raise MemoryError(f"no memory to multiply the heads of {num_tokens} tokens")
        return output


class ExpertOperands(ctypes.Structure):
    """``Expert`` in ``kernels/cpu/layer.c``."""

    _fields_ = (("up", LinearOperands), ("down", LinearOperands))


class ExpertsOperands(ctypes.Structure):
    """``Experts`` in ``kernels/cpu/layer.c``."""

    _fields_ = (
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "weighs_inputs")),
        ("activation", ActivationOperands),
    )


class RunExperts:
    """The experts of a mixture, for all tokens, in one call."""

    def __init__(
        self,
        experts: Sequence[tuple[CompiledProduct, CompiledProduct]],
        activation: Activation | ClampedSwiGLU,
        *,
        weighs_inputs: bool,
    ) -> None:
        """Each expert has a product of the gates, then their factors, and one of the outputs. ``weighs_inputs`` is as
        in ``MixtureOfExperts``."""
        self._keep_alive = experts
        each = (ExpertOperands * len(experts))(*(ExpertOperands(up.operands, down.operands) for up, down in experts))
        self._each = each
        of_all = len(experts), weighs_inputs, ActivationOperands.of(activation)
        self._operands = ExpertsOperands(ctypes.addressof(each), *of_all)
        self._run = experts[0][0].library.run_experts
        self._run.argtypes = [ctypes.POINTER(ExpertsOperands), *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2]
        self._run.restype = ctypes.c_int

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, float32 [T, hidden], for float32 ``hidden`` [T, hidden], and
        ``chosen``, int64, and ``weights``, float32 [T, experts per token]. Raises MemoryError."""
        hidden, chosen, weights = hidden.contiguous(), chosen.contiguous(), weights.contiguous()
        output = hidden.new_empty(hidden.shape)
        pointers = (tensor.data_ptr() for tensor in (hidden, chosen, weights, output))
        if not self._run(self._operands, *pointers, *chosen.shape):
            raise MemoryError(f"no memory for the experts of {len(hidden)} tokens")
        return output
