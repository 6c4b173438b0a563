"""Builds a decoder's modules from a checkpoint's tensors, one at a time, and checks every name and shape."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.layers.decoder_config import OWN_NAMES, TensorNames
from triptych.layers.linear import Linear, LMHead, PlainFormat, RMSNorm, WeightFormat
from triptych.layers.parallel import AllReduce, GatherLogits, Group, Segments, ShardedDimension
from triptych.layers.stored.linears import StoredLinear, concatenate
from triptych.layers.stored.reader import StoredReader

SENSITIVE = ("v_proj", "down_proj")
"""What the names of linear layers end with whose errors change tokens most. Layers that become one with them are stored
like them."""
HEAD = "head"
"""The decoder's own name for the output projection, a linear layer."""


@dataclass(frozen=True)
class DecoderKeys:
    """How a checkpoint names a decoder's tensors.

    The decoder's own names are those of transformers' text models (``layers.0.self_attn.q_proj.weight``). The
    checkpoint's names are these with ``prefix``, except for the output projection.
    """

    prefix: str
    head: str
    """The checkpoint's name of the output projection."""
    names: TensorNames = OWN_NAMES

    def key(self, name: str) -> str:
        """Return the checkpoint's name of the decoder's tensor ``name``."""
        if name.startswith(f"{HEAD}."):
            return self.head.removesuffix("weight") + name.removeprefix(f"{HEAD}.")
        for own, theirs in self.names.renamed:
            name = name.replace(own, theirs)
        return self.prefix + name

    def fused_name(self, parts: Sequence[str]) -> str | None:
        """Return the name under which ``parts`` of a layer are stored as one, or None if they are stored apart."""
        first = parts[0]
        for fused, names in self.names.fused:
            stem = first.removesuffix(names[0])
            if [f"{stem}{name}" for name in names] == list(parts):
                return stem + fused
        return None

    def owns(self, key: str) -> bool:
        """Return whether the checkpoint's tensor ``key`` belongs to the decoder; those that it ignores do, too."""
        return key.startswith((self.head.removesuffix("weight"), self.prefix, *self.names.ignored_modules))

    def ignores(self, key: str) -> bool:
        """Return whether the decoder doesn't need the checkpoint's tensor ``key``."""
        name = key.removeprefix(self.prefix)
        return name.endswith(self.names.ignored) or name.startswith(self.names.ignored_modules)


@dataclass(frozen=True)
class ParallelLinear:
    """Linear layers of a decoder that become one."""

    outputs: Mapping[str, ShardedDimension | Segments]
    """Their names and outputs; the one layer concatenates this rank's parts of them."""
    inputs: ShardedDimension
    """Each layer is over this rank's part of them."""
    bias: bool = False
    repeats_last: bool = False
    """Whether the outputs of the last one come twice."""
    is_summed: bool = False
    """Whether the ranks' outputs are added up."""


@dataclass(frozen=True)
class StoredPart:
    """A stored layer, and this rank's part of it."""

    name: str
    size: int
    """Outputs of the whole layer."""
    rows: slice | Tensor
    """Which of them are this rank's."""


class Addition(Protocol):
    """What some decoders' linear layers have beside their weights."""

    def added(self, linear: Linear, layer: ParallelLinear, reader: "WeightReader") -> Linear:
        """Return ``linear``, which ``reader`` has loaded for ``layer``, with the addition. Raises as the reader
        does."""


class WeightReader:
    """Reads a decoder's tensors or, if the ranks of ``group`` divide them, this rank's part.

    Every method raises CheckpointError, naming the key, for a tensor that is missing or doesn't have the shape that
    follows from the config.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keys: DecoderKeys,
        weights: WeightFormat,
        device: torch.device,
        group: Group,
        *,
        additions: Sequence[Addition] = (),
    ) -> None:
        """``additions`` are those that the decoder's linear layers have."""
        self.keys = keys
        self.weights = weights
        self.device = device
        self.group = group
        self.stored = StoredReader(checkpoint, keys.key, weights, device)
        self._checkpoint = checkpoint
        self._additions = additions

    def named(self, names: TensorNames) -> "WeightReader":
        """Return a reader of the same layers by other names, without additions. What it reads counts as read here."""
        other = copy(self)
        other.keys, other._additions = replace(self.keys, names=names), ()
        other.stored = self.stored.renamed(other.keys.key)
        return other

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint."""
        return self.stored.shape(name)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor as stored in the checkpoint: on the CPU, memory-mapped."""
        return self.stored.tensor(name, shape)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor ``name``."""
        return self.stored.has(name)

    def column_parallel(
        self,
        layers: Mapping[str, ShardedDimension | Segments],
        in_features: int,
        bias: bool = False,
        *,
        repeats_last: bool = False,
    ) -> Linear:
        """Load the named layers, given with their outputs, as one that concatenates this rank's parts of them;
        ``repeats_last``: those of the last one come twice."""
        return self.load(ParallelLinear(layers, ShardedDimension(1, in_features), bias, repeats_last))

    def row_parallel(self, name: str, out_features: int, inputs: ShardedDimension, bias: bool = False) -> Linear:
        """Load a layer over this rank's part of the inputs; the ranks' outputs still have to be summed."""
        return self.load(ParallelLinear({name: ShardedDimension(1, out_features)}, inputs, bias, is_summed=True))

    def load(self, layer: ParallelLinear) -> Linear:
        """Load layers as one, with all additions."""
        parts = self.parts(layer)
        vector = None
        if layer.bias or parts[0].name.endswith(self.keys.names.biased):
            biases = [self.tensor(f"{one.name}.bias", (one.size,))[one.rows] for one in parts]
            if not layer.is_summed or self.group.rank == 0:
                vector = concatenate(biases)
        is_sensitive = layer.repeats_last or any(name.endswith(SENSITIVE) for name in layer.outputs)
        linear = self.stored.linear([self._part(one, layer.inputs) for one in parts], vector, is_sensitive=is_sensitive)
        for addition in self._additions:
            linear = addition.added(linear, layer, self)
        return linear

    def _part(self, part: StoredPart, inputs: ShardedDimension) -> StoredLinear:
        whole = self.stored.stored(part.name, part.size, inputs.size)
        return whole.rows(part.rows).columns(inputs.part(self.group))

    def parts(self, layer: ParallelLinear) -> list[StoredPart]:
        """Return where layers that become one are stored."""
        names = list(layer.outputs)
        fused = self.keys.fused_name(names)
        if fused is None:
            found = [StoredPart(name, out.size, out.stored(self.group)) for name, out in layer.outputs.items()]
            return [*found, found[-1]] if layer.repeats_last else found
        dimensions = list(layer.outputs.values())
        units = [out.units for out in dimensions if isinstance(out, ShardedDimension)]
        runs = min(units) if self.keys.names.fused_by_kv_head else 1
        ends = list(accumulate(out.size // runs for out in dimensions))
        rows = []
        for end, out in zip(ends, dimensions, strict=True):
            index, width = out.index(self.group), out.size // runs
            rows.append(index // width * ends[-1] + end - width + index % width)
        return [StoredPart(fused, ends[-1] * runs, torch.cat(rows))]

    def rows(self, name: str, outputs: ShardedDimension, in_features: int) -> Tensor:
        """Return this rank's rows of a layer's weight [out, in], dequantized if it is quantized."""
        return self.stored.stored(name, outputs.size, in_features).rows(outputs.part(self.group)).dequantized()

    def all_reduced(self, module: nn.Module) -> nn.Module:
        """Wrap a module so that the ranks' outputs are summed."""
        return module if self.group.size == 1 else AllReduce(module, self.group)

    def head(self, weight: Tensor) -> LMHead:
        """Make the projection to the vocabulary from ``weight`` [vocab, hidden]; rank 0 gathers all logits."""
        if self.group.size == 1:
            return self.weights.head(weight, self.device)
        part = self.weights.high_precision(weight[ShardedDimension(len(weight)).part(self.group)], None, self.device)
        return LMHead(GatherLogits(part, self.group))

    def float32_linear(self, name: str, out_features: int, in_features: int, bias: bool = False) -> Linear:
        """Load a whole layer in float32, whatever the weight format."""
        weight = self.tensor(f"{name}.weight", (out_features, in_features))
        vector = self.tensor(f"{name}.bias", (out_features,)) if bias else None
        return PlainFormat(torch.float32).linear(weight, vector, self.device)

    def float32_vector(self, name: str, size: int) -> Tensor:
        """Load a tensor [size] in float32."""
        return self.tensor(name, (size,)).to(self.device, torch.float32)

    def vector(self, name: str, size: int) -> Tensor:
        """Load a norm's weight [size], in the activations' dtype."""
        weight = self.tensor(f"{name}.weight", (size,)).float() + self.keys.names.norm_offset
        return weight.to(self.device, self.weights.activations)

    def replicated(self, name: str, out_features: int, in_features: int) -> Linear:
        """Load a whole layer on each rank."""
        return self.column_parallel({name: ShardedDimension(1, out_features)}, in_features)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """Load a norm over ``size`` values."""
        return RMSNorm(self.vector(name, size), eps)

    def finish(self) -> None:
        """Raise CheckpointError, naming one, if the checkpoint has decoder tensors that weren't read. Then config and
        weights disagree, or the model has unsupported parts."""
        keys = [key for key in self._checkpoint.tensors if self.keys.owns(key) and not self.keys.ignores(key)]
        self.stored.check_all_read(keys, "decoder")
