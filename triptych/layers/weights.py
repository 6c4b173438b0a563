"""Builds a decoder's layers from a checkpoint's tensors, one at a time, checking every name and shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.linear import Linear, LMHead, PlainFormat, RMSNorm, WeightFormat
from triptych.layers.parallel import AllReduce, Dimension, Gather, Group

HEAD = "head.weight"
"""The decoder's own name of the output projection."""


class ExpertLayout(Enum):
    """How a checkpoint holds the weights of a layer's experts: a stack [experts, out, in], a stack [experts, in, out],
    or each expert's matrices by themselves; stacks have gate and up in one."""

    STACKED = "stacked"
    TRANSPOSED = "transposed"
    SEPARATE = "separate"


@dataclass(frozen=True)
class DecoderKeys:
    """How a checkpoint names a decoder's tensors.

    The decoder's own names are those of transformers' text models (``layers.0.self_attn.q_proj.weight``): the
    checkpoint's are ``prefix`` and that name, except for the output projection, which is ``head``.
    """

    prefix: str
    head: str
    experts: ExpertLayout = ExpertLayout.STACKED

    def key(self, name: str) -> str:
        """The checkpoint's name of the decoder's tensor ``name``."""
        return self.head if name == HEAD else self.prefix + name

    def owns(self, key: str) -> bool:
        """Whether the checkpoint's tensor ``key`` belongs to the decoder."""
        return key == self.head or key.startswith(self.prefix)


class WeightReader:
    """Reads a decoder's tensors, and of those that the ranks of ``group`` share, this rank's part alone. Every method
    raises CheckpointError, naming the key, for one that is missing or of another shape than the config makes it."""

    def __init__(
        self, checkpoint: Checkpoint, keys: DecoderKeys, weights: WeightFormat, device: torch.device, group: Group
    ) -> None:
        self.weights = weights
        self.device = device
        self.group = group
        self._checkpoint = checkpoint
        self._keys = keys
        self._read: set[str] = set()

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor as the checkpoint has it: on the CPU, memory-mapped."""
        key = self._keys.key(name)
        found = self._checkpoint.info(key).shape
        if found != tuple(shape):
            raise CheckpointError(
                f"{self._checkpoint.folder}: tensor {key!r} has shape {list(found)}; the config makes it {list(shape)}"
            )
        self._read.add(key)
        return self._checkpoint.read([key])[key]

    def column_parallel(self, layers: dict[str, Dimension], in_features: int, bias: bool = False) -> Linear:
        """The named layers, each with its outputs, fused into one that concatenates this rank's parts of them."""
        parts = [(name, out, out.part(self.group)) for name, out in layers.items()]
        weights = [self.tensor(f"{name}.weight", (out.size, in_features))[part] for name, out, part in parts]
        biases = [self.tensor(f"{name}.bias", (out.size,))[part] for name, out, part in parts] if bias else []
        return self.weights.linear(concatenate(weights), concatenate(biases) if bias else None, self.device)

    def row_parallel(self, name: str, out_features: int, inputs: Dimension, bias: bool = False) -> Linear:
        """A layer over this rank's part of the inputs; the ranks' outputs are yet to be added up."""
        weight = self.tensor(f"{name}.weight", (out_features, inputs.size))[:, inputs.part(self.group)]
        vector = self.tensor(f"{name}.bias", (out_features,)) if bias else None
        return self.weights.linear(weight, vector if self.group.rank == 0 else None, self.device)

    def all_reduced(self, module: nn.Module) -> nn.Module:
        """The module, with the ranks' outputs added up."""
        return module if self.group.size == 1 else AllReduce(module, self.group)

    def head(self, weight: Tensor) -> LMHead:
        """The projection to the vocabulary by ``weight`` [vocab, hidden]; all logits are on rank 0."""
        if self.group.size == 1:
            return self.weights.head(weight, self.device)
        part = self.weights.high_precision(weight[Dimension(len(weight)).part(self.group)], None, self.device)
        return LMHead(Gather(part, self.group))

    def plain_linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """A whole layer whose weight is kept in the activations' dtype, whatever the weight format."""
        weight = self.tensor(f"{name}.weight", (out_features, in_features))
        return PlainFormat(self.weights.activations).linear(weight, None, self.device)

    def expert_gate_ups(self, name: str, num_experts: int, intermediate: Dimension, in_features: int) -> list[Linear]:
        """One column-parallel layer per expert, gate and up fused; ``name`` is the experts' place."""
        if self._keys.experts is ExpertLayout.SEPARATE:
            pairs = [(f"{name}.{expert}.gate_proj", f"{name}.{expert}.up_proj") for expert in range(num_experts)]
            return [self.column_parallel(dict.fromkeys(pair, intermediate), in_features) for pair in pairs]
        part = intermediate.part(self.group)
        stacked = self._stacked(f"{name}.gate_up_proj", num_experts, 2 * intermediate.size, in_features)
        fused = [weight.unflatten(0, (2, -1))[:, part].flatten(0, 1) for weight in stacked]
        return [self.weights.linear(weight, None, self.device) for weight in fused]

    def expert_downs(self, name: str, num_experts: int, out_features: int, intermediate: Dimension) -> list[Linear]:
        """One row-parallel layer per expert; ``name`` is the experts' place."""
        if self._keys.experts is ExpertLayout.SEPARATE:
            names = [f"{name}.{expert}.down_proj" for expert in range(num_experts)]
            return [self.row_parallel(down, out_features, intermediate) for down in names]
        stacked = self._stacked(f"{name}.down_proj", num_experts, out_features, intermediate.size)
        stacked = stacked[:, :, intermediate.part(self.group)]
        return [self.weights.linear(weight, None, self.device) for weight in stacked]

    def _stacked(self, name: str, num_experts: int, out_features: int, in_features: int) -> Tensor:
        """[experts, out, in]"""
        if self._keys.experts is ExpertLayout.TRANSPOSED:
            return self.tensor(name, (num_experts, in_features, out_features)).transpose(1, 2)
        return self.tensor(name, (num_experts, out_features, in_features))

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight [size], in the activations' dtype."""
        return self.tensor(f"{name}.weight", (size,)).to(self.device, self.weights.activations)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """A norm over ``size`` values."""
        return RMSNorm(self.vector(name, size), eps)

    def finish(self) -> None:
        """Raises CheckpointError, naming one, if the checkpoint holds decoder tensors that nothing asked for: the
        config and the weights disagree, or the model has parts that we would silently leave out."""
        unread = sorted(key for key in self._checkpoint.tensors if self._keys.owns(key) and key not in self._read)
        if unread:
            raise CheckpointError(f"{self._checkpoint.folder}: the decoder has no place for tensor {unread[0]!r}")

    def ignore(self, name: str) -> None:
        """Lets ``finish`` accept that nothing reads the tensor ``name``."""
        self._read.add(self._keys.key(name))


def concatenate(tensors: list[Tensor]) -> Tensor:
    """The tensors one after the other; a single one stays where it is, memory-mapped."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
