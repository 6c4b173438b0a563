"""Loads the experts of a mixture from each layout in which checkpoints store them.

Most published checkpoints have one tensor [out, in] per expert and projection, some of them quantized. Others have
stacks, with gate and up in one tensor: [experts, out, in], as most modules of transformers hold them, or transposed,
[experts, in, out].
"""

from collections.abc import Sequence

from torch import Tensor

from triptych.layers.linear import Linear
from triptych.layers.mlp import ClampedMLP, GatedMLP
from triptych.layers.parallel import ShardedDimension
from triptych.layers.pointwise import Activation
from triptych.layers.specs import ClampedSwiGLU, MoESpec
from triptych.layers.weights import WeightReader


def load_experts(spec: MoESpec, reader: WeightReader, prefix: str, hidden_size: int) -> Sequence[GatedMLP | ClampedMLP]:
    """Load this rank's part of each expert; ``prefix`` is the experts' name. The ranks' outputs still have to be
    summed. Raises CheckpointError, as the reader does."""
    is_stacked = any(reader.has(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj"))
    load = _stacked if is_stacked else _separate
    gate_ups, downs = load(spec, reader, prefix, hidden_size)
    if isinstance(spec.activation, ClampedSwiGLU):
        return [ClampedMLP(*pair, spec.activation) for pair in zip(gate_ups, downs, strict=True)]
    return [GatedMLP(*pair, Activation[spec.activation.upper()]) for pair in zip(gate_ups, downs, strict=True)]


def _separate(spec: MoESpec, reader: WeightReader, prefix: str, hidden_size: int) -> tuple[list[Linear], list[Linear]]:
    intermediate = ShardedDimension(spec.intermediate_size)
    names = [f"{prefix}.{expert}" for expert in range(spec.num_experts)]
    pairs = [{f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate} for name in names]
    return (
        [reader.column_parallel(pair, hidden_size, bias=spec.has_biases) for pair in pairs],
        [reader.row_parallel(f"{name}.down_proj", hidden_size, intermediate, bias=spec.has_biases) for name in names],
    )


def _stacked(spec: MoESpec, reader: WeightReader, prefix: str, hidden_size: int) -> tuple[list[Linear], list[Linear]]:
    experts, width, part = spec.num_experts, spec.intermediate_size, ShardedDimension(spec.intermediate_size).part
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    # One of the two may be square, which doesn't tell the layouts apart, but never both.
    found = reader.shape(gate_up), reader.shape(down)
    transposed = found == ((experts, hidden_size, 2 * width), (experts, width, hidden_size))

    def weights(name: str, outputs: int, inputs: int) -> Tensor:
        """Return [experts, out, in]."""
        if transposed:
            return reader.tensor(name, (experts, inputs, outputs)).transpose(1, 2)
        return reader.tensor(name, (experts, outputs, inputs))

    def biases(name: str, outputs: int) -> list[Tensor | None]:
        return [*reader.tensor(f"{name}_bias", (experts, outputs))] if spec.has_biases else [None] * experts

    def own_rows(tensor: Tensor) -> Tensor:
        """Return this rank's gates of one expert, then its ups."""
        pairs = tensor.unflatten(0, (-1, 2)).transpose(0, 1) if spec.alternating else tensor.unflatten(0, (2, -1))
        return pairs[:, part(reader.group)].flatten(0, 1)

    gate_ups = [
        reader.linear(own_rows(weight), None if bias is None else own_rows(bias))
        for weight, bias in zip(weights(gate_up, 2 * width, hidden_size), biases(gate_up, 2 * width), strict=True)
    ]
    downs = [
        reader.linear(weight[:, part(reader.group)], bias if reader.group.rank == 0 else None)
        for weight, bias in zip(weights(down, hidden_size, width), biases(down, hidden_size), strict=True)
    ]
    return gate_ups, downs
