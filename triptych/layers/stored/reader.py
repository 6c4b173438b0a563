"""Reads the tensors of a part of a model, a decoder or its towers, and linear layers in whatever format they are
stored."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.checkpoint.reader import Checkpoint, listed
from triptych.errors import CheckpointError
from triptych.layers.linear import Linear, WeightFormat
from triptych.layers.stored.linears import DenseWeight, StoredLinear, linear_of
from triptych.layers.stored.registry import read_format

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
        self.format = read_format(checkpoint.quantization, checkpoint.tensors)
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

    def stored(self, name: str, outputs: int, inputs: int) -> StoredLinear:
        """Return the weight of the linear layer ``name``."""
        found, layer = self.format, _Layer(self, name)
        if found is not None and any(layer.has(marker) for marker in found.markers):
            return found.load(layer, (outputs, inputs))
        return DenseWeight(layer.read("weight", (outputs, inputs), FLOATS))

    def stack(self, name: str, shape: tuple[int, int, int], *, transposed: bool) -> list[StoredLinear]:
        """Return the weights of a stack of layers, ``shape`` being (layers, out, in), from one tensor. If it is
        ``transposed``, it is [layers, in, out]."""
        layers, outputs, inputs = shape
        if transposed:
            return [DenseWeight(one.T) for one in self.tensor(name, (layers, inputs, outputs), FLOATS)]
        return [DenseWeight(one) for one in self.tensor(name, shape, FLOATS)]

    def linear(self, parts: Sequence[StoredLinear], bias: Tensor | None) -> Linear:
        """Make the layer that concatenates the outputs of ``parts``; see ``linear_of``."""
        return linear_of(parts, bias, self.weights, self.device)

    def check_all_read(self, keys: Iterable[str], part: str) -> None:
        """Raise CheckpointError, which names one and counts them, if some of the checkpoint's tensors ``keys`` weren't
        read: ``part``, the decoder or a tower, has no place for them."""
        if unread := [key for key in keys if key not in self.keys_read]:
            raise CheckpointError(f"{self._checkpoint.folder}: the {part} has no place for tensor {listed(unread)}")

    def wrong(self, name: str, problem: str) -> CheckpointError:
        """Return the error that there is a problem with ``name``, a tensor or a layer."""
        return CheckpointError(f"{self._checkpoint.folder}: {self._key_of(name)}: {problem}")


@dataclass(frozen=True)
class _Layer:
    """``LayerTensors`` of a layer."""

    reader: StoredReader
    name: str

    def has(self, kind: str) -> bool:
        return self.reader.has(f"{self.name}.{kind}")

    def shape(self, kind: str) -> tuple[int, ...]:
        return self.reader.shape(f"{self.name}.{kind}")

    def read(self, kind: str, shape: Sequence[int], dtypes: Sequence[str] = ()) -> Tensor:
        return self.reader.tensor(f"{self.name}.{kind}", shape, dtypes)

    def wrong(self, problem: str) -> CheckpointError:
        return self.reader.wrong(f"{self.name}.weight", problem)
