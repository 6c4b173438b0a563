"""Builds a decoder's modules from a checkpoint's tensors, one at a time, and checks every name and shape."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from triptych.checkpoint.quantization import PACKED, SCALE, SHAPE, ZEROS, GroupQuantization
from triptych.checkpoint.reader import Checkpoint, listed
from triptych.errors import CheckpointError
from triptych.layers.decoder_config import OWN_NAMES, LoraSpec, SecondWeights, TensorNames
from triptych.layers.grouped_weight import PER_WORD, GroupedWeight, concatenate_grouped, loaded_weight
from triptych.layers.int4 import grouped_product
from triptych.layers.linear import Linear, LMHead, PackedLinear, PlainFormat, RMSNorm, WeightFormat
from triptych.layers.lora import LoraLinear
from triptych.layers.parallel import AllReduce, GatherLogits, Group, Segments, ShardedDimension
from triptych.layers.second_weights import SecondLinear

HEAD = "head.weight"
"""The decoder's own name for the output projection."""


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
        if name == HEAD:
            return self.head
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
        return key == self.head or key.startswith((self.prefix, *self.names.ignored_modules))

    def ignores(self, key: str) -> bool:
        """Return whether the decoder doesn't need the checkpoint's tensor ``key``."""
        name = key.removeprefix(self.prefix)
        return name.endswith(self.names.ignored) or name.startswith(self.names.ignored_modules)


class WeightReader:
    """Reads a decoder's tensors or, if the ranks of ``group`` divide them, this rank's part.

    Every method raises CheckpointError, naming the key, for a tensor that is missing or doesn't have the shape that
    follows from the config.
    """

    def __init__(  # noqa: PLR0917 (what a decoder is made of)
        self,
        checkpoint: Checkpoint,
        keys: DecoderKeys,
        weights: WeightFormat,
        device: torch.device,
        group: Group,
        loras: Sequence[LoraSpec] = (),
        second: SecondWeights | None = None,
    ) -> None:
        """``loras`` and ``second`` are those that the decoder's linear layers have."""
        self.weights = weights
        self.device = device
        self.group = group
        self._checkpoint = checkpoint
        self._keys = keys
        self._loras = loras
        self._read: set[str] = set()
        self._biased: tuple[str, ...] = ()
        """Ends of the names of stored layers that have biases in any case."""
        self._second = None if second is None else self._of_second(second)

    def _of_second(self, second: SecondWeights) -> "WeightReader":
        """Return a reader of the same layers' second weights."""
        names = replace(self._keys.names, fused=second.fused, renamed=second.renamed)
        keys = replace(self._keys, names=names)
        reader = WeightReader(self._checkpoint, keys, self.weights, self.device, self.group)
        reader._read, reader._biased = self._read, second.biased
        return reader

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint."""
        return tuple(self._checkpoint.info(self._keys.key(name)).shape)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor as stored in the checkpoint: on the CPU, memory-mapped."""
        key = self._keys.key(name)
        tensor = self._checkpoint.read_shaped({key: shape})[key]
        self._read.add(key)
        return tensor

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor ``name``."""
        return self._keys.key(name) in self._checkpoint.tensors

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
        stored = self._stored(layers)
        if repeats_last:
            stored.append(stored[-1])
        bias = bias or stored[0][0].endswith(self._biased)
        biases = [self.tensor(f"{name}.bias", (size,))[rows] for name, size, rows in stored] if bias else []
        vector = concatenate(biases) if bias else None
        if quantization := self._quantization_of([name for name, _, _ in stored]):
            quantized = [
                self._grouped(name, (size, in_features), quantization).rows(rows) for name, size, rows in stored
            ]
            linear = self._grouped_linear(concatenate_grouped(quantized), vector)
        else:
            weights = [self.tensor(f"{name}.weight", (size, in_features))[rows] for name, size, rows in stored]
            linear = self.linear(concatenate(weights), vector)
        linear = self._with_loras(linear, stored, slice(None), in_features)
        if self._second is None:
            return linear
        return SecondLinear(linear, self._second.column_parallel(layers, in_features, repeats_last=repeats_last))

    def _stored(self, layers: Mapping[str, ShardedDimension | Segments]) -> list[tuple[str, int, slice | Tensor]]:
        """Return where layers are stored: the names of the stored layers, their outputs, and which are this rank's."""
        fused = self._keys.fused_name(list(layers))
        if fused is None:
            return [(name, out.size, out.stored(self.group)) for name, out in layers.items()]
        units = [out.units for out in layers.values() if isinstance(out, ShardedDimension)]
        runs = min(units) if self._keys.names.fused_by_kv_head else 1
        ends = list(accumulate(out.size // runs for out in layers.values()))
        rows = []
        for end, out in zip(ends, layers.values(), strict=True):
            index, width = out.index(self.group), out.size // runs
            rows.append(index // width * ends[-1] + end - width + index % width)
        return [(fused, ends[-1] * runs, torch.cat(rows))]

    def rows(self, name: str, outputs: ShardedDimension, in_features: int) -> Tensor:
        """Return this rank's rows of a layer's weight [out, in], dequantized if it is quantized."""
        shape, part = (outputs.size, in_features), outputs.part(self.group)
        if quantization := self._quantization_of([name]):
            return self._grouped(name, shape, quantization).rows(part).dequantized()
        return self.tensor(f"{name}.weight", shape)[part]

    def row_parallel(self, name: str, out_features: int, inputs: ShardedDimension, bias: bool = False) -> Linear:
        """Load a layer over this rank's part of the inputs; the ranks' outputs still have to be summed."""
        shape, part = (out_features, inputs.size), inputs.part(self.group)
        bias = bias or name.endswith(self._biased)
        vector = self.tensor(f"{name}.bias", (out_features,)) if bias else None
        if self.group.rank != 0:
            vector = None
        if quantization := self._quantization_of([name]):
            linear = self._grouped_linear(self._grouped(name, shape, quantization).columns(part), vector)
        else:
            linear = self.linear(self.tensor(f"{name}.weight", shape)[:, part], vector)
        linear = self._with_loras(linear, [(name, out_features, slice(None))], part, inputs.size)
        return (
            linear
            if self._second is None
            else SecondLinear(linear, self._second.row_parallel(name, out_features, inputs))
        )

    def _with_loras(
        self, linear: Linear, stored: Sequence[tuple[str, int, slice | Tensor]], inputs: slice, in_features: int
    ) -> Linear:
        """Return a layer with its LoRAs, which are never quantized; the layer itself if the model has none.
        ``stored`` are its parts, and the outputs of each that are this rank's; so are ``inputs``."""
        downs, ups = [], []
        for lora in self._loras:
            names = [name for name, _, _ in stored if name.endswith(lora.layers)]
            if missing := [name for name, _, _ in stored if name not in names]:
                raise CheckpointError(f"LoRA {lora.name!r} lacks {missing[0]!r}; a LoRA is served if it has all layers")
            kinds = [{kind: f"{name}.lora_{kind}.{lora.name}.weight" for kind in "AB"} for name in names]
            down = [self.tensor(one["A"], (lora.rank, in_features))[:, inputs] for one in kinds]
            up = [
                self.tensor(one["B"], (size, lora.rank))[rows].float() * lora.scale
                for one, (_, size, rows) in zip(kinds, stored, strict=True)
            ]
            downs.append(self.weights.high_precision(concatenate(down), None, self.device))
            ups.append(self.weights.high_precision(torch.block_diag(*up), None, self.device))
        return LoraLinear(linear, downs, ups) if downs else linear

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Make a layer from dense weights. Of a quantized checkpoint, these need high precision."""
        make = self.weights.high_precision if self._checkpoint.quantization else self.weights.linear
        return make(weight, bias, self.device)

    def _quantization_of(self, names: Collection[str]) -> GroupQuantization | None:
        """Return how the named layers, which become one, are quantized, or None."""
        keys = {name: self._keys.key(f"{name}.{PACKED}") for name in names}
        missing = [name for name, key in keys.items() if key not in self._checkpoint.tensors]
        if missing and len(missing) < len(keys):
            raise CheckpointError(
                f"{self._checkpoint.folder}: {self._keys.key(missing[0])!r} isn't quantized, but others of "
                f"{', '.join(names)} are; they are served as one layer"
            )
        return None if missing else self._checkpoint.quantization

    def _grouped(self, name: str, shape: tuple[int, int], quantization: GroupQuantization) -> GroupedWeight:
        """Return a quantized layer's weight [out, in]."""
        (outputs, inputs), key = shape, self._keys.key(name)
        groups = -(-inputs // quantization.group)
        shapes = {PACKED: (outputs, -(-inputs // PER_WORD)), SCALE: (outputs, groups), SHAPE: (2,)}
        if quantization.has_zeros:
            shapes[ZEROS] = (-(-outputs // PER_WORD), groups)
        tensors = {kind: self.tensor(f"{name}.{kind}", found) for kind, found in shapes.items()}
        try:
            return loaded_weight(tensors, shape, quantization)
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.folder}: {key}: {error}") from error

    def _grouped_linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear:
        if self.device.type == "meta":  # there are no values to pack
            return PlainFormat(torch.float32).linear(weight.dequantized(), bias, self.device)
        return PackedLinear(grouped_product(weight, bias))

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
        weight = self.tensor(f"{name}.weight", (size,)).float() + self._keys.names.norm_offset
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
        unread = [
            key
            for key in self._checkpoint.tensors
            if self._keys.owns(key) and key not in self._read and not self._keys.ignores(key)
        ]
        if unread:
            raise CheckpointError(f"{self._checkpoint.folder}: the decoder has no place for tensor {listed(unread)}")


def concatenate(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors; a single one is returned itself, memory-mapped."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
