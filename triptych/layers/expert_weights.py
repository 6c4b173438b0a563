"""Loads the experts of a mixture from each layout in which checkpoints store them.

Most published checkpoints have one tensor [out, in] per expert and projection, some of them quantized. Others have
stacks, with gate and up in one tensor: [experts, out, in], as most modules of transformers hold them, or transposed,
[experts, in, out].
"""

from collections.abc import Sequence

import torch
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
    is_stacked = any(reader.stored.has_stack(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj"))
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
    experts, width = spec.num_experts, spec.intermediate_size
    part = ShardedDimension(width).part(reader.group)
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    # One of the two may be square, which doesn't tell the layouts apart, but never both.
    # One that isn't there at all is refused here, by its name; a quantized one may have other tensors instead.
    has_others = [reader.stored.has_stack(name) and not reader.has(name) for name in (gate_up, down)]
    found = tuple(() if other else reader.shape(name) for name, other in zip((gate_up, down), has_others, strict=True))
    transposed = found == ((experts, hidden_size, 2 * width), (experts, width, hidden_size))

    def biases(name: str, outputs: int) -> list[Tensor | None]:
        return [*reader.tensor(f"{name}_bias", (experts, outputs))] if spec.has_biases else [None] * experts

    rows = _own_rows(spec, reader)
    gate_ups = [
        reader.stored.linear([weight.rows(rows)], None if bias is None else bias[rows])
        for weight, bias in zip(
            reader.stored.stack(gate_up, (experts, 2 * width, hidden_size), transposed=transposed),
            biases(gate_up, 2 * width),
            strict=True,
        )
    ]
    downs = [
        reader.stored.linear([weight.columns(part)], bias if reader.group.rank == 0 else None, is_sensitive=True)
        for weight, bias in zip(
            reader.stored.stack(down, (experts, hidden_size, width), transposed=transposed),
            biases(down, hidden_size),
            strict=True,
        )
    ]
    return gate_ups, downs


def _own_rows(spec: MoESpec, reader: WeightReader) -> slice | Tensor:
    """Return this rank's gates of one expert, then its ups, among the rows of a stack's gates and ups."""
    width = spec.intermediate_size
    if reader.group.size == 1 and not spec.alternating:
        return slice(None)
    pairs = torch.arange(2 * width).view((width, 2) if spec.alternating else (2, width))
    by_kind = pairs.T if spec.alternating else pairs
    return by_kind[:, ShardedDimension(width).part(reader.group)].flatten()
