"""Reads the tensors of a part of a model, a decoder or its towers, and linear layers in whatever format they are
stored."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.checkpoint.reader import Checkpoint, listed
from triptych.errors import CheckpointError
from triptych.layers.block_weight import BlockType, BlockWeight
from triptych.layers.linear import Linear, WeightFormat
from triptych.layers.stored.format import ACTIVATION_TENSORS
from triptych.layers.stored.linears import DenseWeight, StoredLinear, linear_of
from triptych.layers.stored.registry import read_formats

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of weights that aren't quantized."""


class StoredReader:
    """Every method raises CheckpointError, naming the tensor, for one that is missing or doesn't have the shape that
    follows from the config."""

    def __init__(
        self, checkpoint: Checkpoint, key_of: Callable[[str], str], weights: WeightFormat, device: torch.device
    ) -> None:
        """``key_of`` returns the checkpoint's name of a tensor. Raises CheckpointError, too, for a format of quantized
        weights that isn't served."""
        self.weights = weights
        self.device = device
        self.formats = read_formats(checkpoint.quantization, checkpoint.tensors)
        self.keys_read: set[str] = set()
        """The checkpoint's names of what has been read."""
        self._checkpoint = checkpoint
        self._key_of = key_of

    def renamed(self, key_of: Callable[[str], str]) -> "StoredReader":
        """Return a reader of the same checkpoint by other names. What it reads counts as read here."""
        other = copy(self)
        other._key_of = key_of
        return other

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint."""
        return tuple(self._checkpoint.info(self._key_of(name)).shape)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as the checkpoint's files name it."""
        return self._checkpoint.info(self._key_of(name)).dtype

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor ``name``."""
        return self._key_of(name) in self._checkpoint.tensors

    def tensor(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = ()) -> Tensor:
        """Return a tensor as stored: on the CPU, memory-mapped. Raises CheckpointError, too, if it is of none of
        ``dtypes``, named as in PyTorch; empty: it may be of any."""
        key = self._key_of(name)
        tensor = self._checkpoint.read_shaped({key: shape})[key]
        found = str(tensor.dtype).removeprefix("torch.")
        if dtypes and found not in dtypes:
            raise self.wrong(name, f"is {found}, not {' or '.join(dtypes)}")
        self.keys_read.add(key)
        return tensor

    def has_layer(self, name: str) -> bool:
        """Return whether the checkpoint has the weight of the linear layer ``name``."""
        layer = _Layer(self, name)
        return any(map(layer.has, ("weight", *self._markers)))

    def has_stack(self, name: str) -> bool:
        """Return whether the checkpoint has the weights of a stack of layers, ``name``."""
        member = _StackMember(self, name, 0, 1)
        return any(map(member.has, ("weight", *self._markers)))

    def stored(self, name: str, outputs: int, inputs: int) -> StoredLinear:
        """Return the weight of the linear layer ``name``."""
        return self._blocks(f"{name}.weight", (outputs, inputs)) or self._load(_Layer(self, name), (outputs, inputs))

    def _blocks(self, name: str, shape: tuple[int, int]) -> BlockWeight | None:
        """Return a weight of a GGUF file as it is, or None if it is dequantized, or isn't as it should be."""
        key = self._key_of(name)
        info = self._checkpoint.tensors.get(key)
        if not self.weights.keeps_blocks or info is None or info.entry is None or info.shape != shape:
            return None
        kind = BlockType.__members__.get(info.entry.kind)
        if kind is None or not info.entry.is_plain or info.entry.row_bytes * kind.inputs != shape[1] * kind.num_bytes:
            return None
        self.keys_read.add(key)
        return BlockWeight(self._checkpoint.read_blocks(key), kind, shape[1])

    def stack(self, name: str, shape: tuple[int, int, int], *, transposed: bool) -> list[StoredLinear]:
        """Return the weights of a stack of layers, ``shape`` being (layers, out, in), from one tensor or, if they are
        quantized, one for each kind. If it is ``transposed``, tensors are [layers, in, out]."""
        layers, outputs, inputs = shape
        read: dict[str, Tensor] = {}
        members = [_StackMember(self, name, number, layers, transposed, read) for number in range(layers)]
        return [self._load(member, (outputs, inputs)) for member in members]

    def _load(self, layer: "_Layer | _StackMember", shape: tuple[int, int]) -> StoredLinear:
        found = None if self.formats is None else self.formats.of_layer(layer, shape)
        if found is None:
            return DenseWeight(layer.read("weight", shape, FLOATS))
        weight = found.load(layer, shape)
        for kind in filter(layer.has, ACTIVATION_TENSORS):
            key = layer.name_of(kind)
            self.tensor(key, self.shape(key))
        return weight

    @property
    def _markers(self) -> tuple[str, ...]:
        return () if self.formats is None else self.formats.markers

    def linear(self, parts: Sequence[StoredLinear], bias: Tensor | None, *, is_sensitive: bool = False) -> Linear:
        """Make the layer that concatenates the outputs of ``parts``; see ``linear_of``."""
        return linear_of(parts, bias, self.weights, self.device, is_sensitive=is_sensitive)

    def check_all_read(self, keys: Iterable[str], part: str) -> None:
        """Raise CheckpointError, which names one and counts them, if some of the checkpoint's tensors ``keys`` weren't
        read: ``part``, the decoder or a tower, has no place for them."""
        if unread := [key for key in keys if key not in self.keys_read and not self._is_empty_bias(key)]:
            raise CheckpointError(f"{self._checkpoint.folder}: the {part} has no place for tensor {listed(unread)}")

    def _is_empty_bias(self, key: str) -> bool:
        """Return whether a tensor is a bias of zeros, which AutoGPTQ gives to every quantized layer."""
        layer = key.removesuffix("bias")
        if layer == key or not any(layer + marker in self._checkpoint.tensors for marker in self._markers):
            return False
        bias = self._checkpoint.read([key])[key]
        return bias.is_meta or not bias.any()

    def wrong(self, name: str, problem: str) -> CheckpointError:
        """Return the error that there is a problem with ``name``, a tensor or a layer."""
        return CheckpointError(f"{self._checkpoint.folder}: {self._key_of(name)}: {problem}")


@dataclass(frozen=True)
class _Layer:
    """``LayerTensors`` of a layer."""

    reader: StoredReader
    name: str

    def name_of(self, kind: str) -> str:
        return f"{self.name}.{kind}"

    def has(self, kind: str) -> bool:
        return self.reader.has(self.name_of(kind))

    def shape(self, kind: str) -> tuple[int, ...]:
        return self.reader.shape(self.name_of(kind))

    def dtype(self, kind: str) -> str:
        return self.reader.dtype(self.name_of(kind))

    def read(self, kind: str, shape: Sequence[int], dtypes: Sequence[str] = ()) -> Tensor:
        return self.reader.tensor(self.name_of(kind), shape, dtypes)

    def wrong(self, problem: str) -> CheckpointError:
        return self.reader.wrong(f"{self.name}.weight", problem)


@dataclass(frozen=True)
class _StackMember:
    """``LayerTensors`` of a layer of a stack. The stack's weight has its name; other tensors, its name and the kind:
    ``_blocks``, ``_scale`` or ``_weight_scale``."""

    reader: StoredReader
    name: str
    number: int
    layers: int
    transposed: bool = False
    stacks: dict[str, Tensor] = field(default_factory=dict)
    """What has been read of the stack, by kind."""

    def name_of(self, kind: str) -> str:
        if kind == "weight":
            return self.name
        names = [f"{self.name}_{kind}", f"{self.name}_{kind.removeprefix('weight_')}"]
        return next(filter(self.reader.has, names), names[-1])

    def has(self, kind: str) -> bool:
        return self.reader.has(self.name_of(kind))

    def shape(self, kind: str) -> tuple[int, ...]:
        _, *rest = self.reader.shape(self.name_of(kind)) or [1]  # a single value is that of all layers
        return self._turned(rest)

    def dtype(self, kind: str) -> str:
        return self.reader.dtype(self.name_of(kind))

    def read(self, kind: str, shape: Sequence[int], dtypes: Sequence[str] = ()) -> Tensor:
        if kind not in self.stacks:
            name = self.name_of(kind)
            whole = () if not self.reader.shape(name) and not shape else (self.layers, *self._turned(shape))
            self.stacks[kind] = self.reader.tensor(name, whole, dtypes)
        stack = self.stacks[kind]
        own = stack[self.number] if stack.dim() else stack
        return own.T if self.transposed and own.dim() == 2 else own

    def wrong(self, problem: str) -> CheckpointError:
        return self.reader.wrong(self.name, problem)

    def _turned(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(reversed(shape)) if self.transposed and len(shape) == 2 else tuple(shape)
