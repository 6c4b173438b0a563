"""Builds a decoder's layers from a checkpoint's tensors, one at a time, checking every name and shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import CheckpointError
from triptych.models.checkpoint import Checkpoint
from triptych.models.layers import Linear, PlainFormat, RMSNorm, WeightFormat

HEAD = "head.weight"
"""The decoder's own name of the output projection."""


@dataclass(frozen=True)
class DecoderKeys:
    """How a checkpoint names a decoder's tensors.

    The decoder's own names are those of transformers' text models (``layers.0.self_attn.q_proj.weight``): the
    checkpoint's are ``prefix`` and that name, except for the output projection, which is ``head``.
    ``experts_transposed`` says that stacked expert weights are [experts, in, out] rather than [experts, out, in].
    """

    prefix: str
    head: str
    experts_transposed: bool = False

    def key(self, name: str) -> str:
        """The checkpoint's name of the decoder's tensor ``name``."""
        return self.head if name == HEAD else self.prefix + name

    def owns(self, key: str) -> bool:
        """Whether the checkpoint's tensor ``key`` belongs to the decoder."""
        return key == self.head or key.startswith(self.prefix)


class WeightReader:
    """Reads a decoder's tensors. Every method raises CheckpointError, naming the key, for one that is missing or of
    another shape than the config makes it."""

    def __init__(self, checkpoint: Checkpoint, keys: DecoderKeys, weights: WeightFormat, device: torch.device) -> None:
        self.weights = weights
        self.device = device
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

    def linear(self, layers: dict[str, int], in_features: int, bias: bool = False) -> Linear:
        """The named layers, each with its number of outputs, fused into one that concatenates their outputs."""
        weight = concatenate([self.tensor(f"{name}.weight", (out, in_features)) for name, out in layers.items()])
        biases = [self.tensor(f"{name}.bias", (out,)) for name, out in layers.items()] if bias else []
        return self.weights.linear(weight, concatenate(biases) if bias else None, self.device)

    def plain_linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """A layer whose weight is kept in the activations' dtype, whatever the weight format."""
        weight = self.tensor(f"{name}.weight", (out_features, in_features))
        return PlainFormat(self.weights.activations).linear(weight, None, self.device)

    def experts(self, name: str, num_experts: int, out_features: int, in_features: int) -> list[Linear]:
        """One layer per expert from the stacked weights called ``name``."""
        if self._keys.experts_transposed:
            stacked = self.tensor(name, (num_experts, in_features, out_features)).transpose(1, 2)
        else:
            stacked = self.tensor(name, (num_experts, out_features, in_features))
        return [self.weights.linear(weight, None, self.device) for weight in stacked]

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
