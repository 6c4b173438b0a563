"""Reads the tensors of a tower that is built of our own layers, and checks every name and shape."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers import native
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.linear import LayerNorm, Linear, RMSNorm, WeightFormat
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation
from triptych.layers.stored.linears import StoredLinear, concatenate
from triptych.layers.stored.reader import StoredReader
from triptych.layers.tower_layer import MLP

ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "silu": Activation.SILU,
}
"""By their names in configs."""


def tower_activation(name: str, setting_name: str) -> Activation:
    """Return the activation that a setting names. Raises CheckpointError for one that isn't served."""
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {setting_name} {name!r} is not served; served are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


class TowerWeights:
    """Every method raises CheckpointError, naming the tensor, if one is missing or doesn't have the shape that follows
    from the config."""

    def __init__(
        self, checkpoint: Checkpoint, keys: Mapping[str, str], weights: WeightFormat, device: torch.device
    ) -> None:
        """``keys`` maps the tower's own names of all its tensors to the checkpoint's.

        On a CPU, kernels are compiled now, if necessary, rather than while the first item waits.
        """
        if device.type == "cpu":
            native.library()
        self.weights = weights
        self.device = device
        # of a missing tensor, the error names the tower's own
        self._stored = StoredReader(checkpoint, lambda name: keys.get(name, name), weights, device)
        self._keys = keys

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as stored: on the CPU, memory-mapped."""
        return self._stored.tensor(name, shape)

    def stored(self, name: str, outputs: int, inputs: int) -> StoredLinear:
        """Return the weight of a linear layer, in whatever format it is stored."""
        return self._stored.stored(name, outputs, inputs)

    def parameter(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the device, in the activations' dtype."""
        return self.tensor(name, *shape).to(self.device, self.weights.activations)

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        """Load a norm over ``size`` values."""
        return LayerNorm(self.parameter(f"{name}.weight", size), self.parameter(f"{name}.bias", size), eps)

    def rms_norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """Load an RMSNorm over ``size`` values; ``offset`` is added to the stored weights."""
        weight = self.tensor(f"{name}.weight", size)
        if offset:
            weight = weight.float() + offset  # before it is rounded
        return RMSNorm(weight.to(self.device, self.weights.activations), eps)

    def linear(self, names: Sequence[str], outputs: int, inputs: int, bias: bool | Sequence[bool] = True) -> Linear:
        """Load layers of ``outputs`` each as one that concatenates their outputs; ``bias`` says of all, or of each,
        whether they have biases."""
        parts = [self.stored(name, outputs, inputs) for name in names]
        having = [bias] * len(names) if isinstance(bias, bool) else bias
        biases = [
            self.tensor(f"{name}.bias", outputs) if has_bias else torch.zeros(outputs, device=self.device)
            for name, has_bias in zip(names, having, strict=True)
            if any(having)
        ]
        return self.linear_of(parts, concatenate(biases) if biases else None)

    def attention(
        self, inputs: Sequence[str], output: str, width: int, num_heads: int, biases: tuple[bool | Sequence[bool], bool]
    ) -> TowerAttention:
        """Load attention of states of ``width`` values. ``inputs`` name the layers of queries, keys and values,
        separate or fused; ``biases`` say whether these, and the output's, have biases."""
        return TowerAttention(
            [self.linear(inputs, 3 // len(inputs) * width, width, biases[0])],
            self.linear([output], width, width, biases[1]),
            num_heads,
            (width // num_heads) ** -0.5,
            self.weights.bf16_attention,
        )

    def mlp(self, names: Sequence[str], sizes: tuple[int, int, int], activation: Activation, bias: bool = True) -> MLP:
        """Load an MLP of two layers; ``sizes`` are those of its input, between its layers, and of its output."""
        inputs, inner, outputs = sizes
        up, down = names
        return MLP(self.linear([up], inner, inputs, bias), activation, self.linear([down], outputs, inner, bias))

    def gated_mlp(
        self, names: Sequence[str], sizes: tuple[int, int, int], activation: Activation, bias: bool = True
    ) -> GatedMLP:
        """Load an MLP of a layer of gates, one of their factors, and another one; ``sizes`` are as in ``mlp``."""
        inputs, inner, outputs = sizes
        gates = self.linear(names[:2], inner, inputs, bias)
        return GatedMLP(gates, self.linear(names[2:], outputs, inner, bias), activation)

    def paired_attention(self, names: Sequence[str], num_heads: int, width: int) -> Linear:
        """Load the query, key and value layers [width, width] of attention that rotates a head's values 0 and 1, 2 and
        3, … as pairs. In the result, i and i + head_dim / 2 of queries and keys are a pair: products don't change."""
        parts = [self.stored(name, width, width) for name in names]
        biases = [self.tensor(f"{name}.bias", width) for name in names]
        pairs = torch.arange(width).view(num_heads, -1, 2).transpose(1, 2).flatten()
        turned = [part.rows(pairs) for part in parts[:2]], [bias[pairs] for bias in biases[:2]]
        return self.linear_of([*turned[0], *parts[2:]], concatenate([*turned[1], *biases[2:]]))

    def linear_of(self, parts: Sequence[StoredLinear], bias: Tensor | None = None) -> Linear:
        """Return layers, whose weights have been read, as one that concatenates their outputs."""
        return self._stored.linear(parts, bias)

    def scaled_linear(self, name: str, scales: str, outputs: int, inputs: int) -> Linear:
        """Load a layer whose outputs are multiplied by factors, the tensor ``scales``, as one with scaled weights."""
        factors = self.tensor(scales, outputs).float()
        weight = self.stored(name, outputs, inputs).dequantized().float() * factors[:, None]
        return self.weights.linear(weight, self.tensor(f"{name}.bias", outputs).float() * factors, self.device)

    def patch_projection(self, name: str, outputs: int, patch: int | tuple[int, int], bias: bool = False) -> Linear:
        """Load a convolution [outputs, 3, side, side], or one over frames, too, [outputs, 3, frames, side, side], whose
        inputs are single patches, as a product of flattened patches. ``patch`` is the side, or (frames, side)."""
        *frames, side = [patch] if isinstance(patch, int) else patch
        weight = self.tensor(f"{name}.weight", outputs, 3, *frames, side, side).flatten(1)
        vector = self.tensor(f"{name}.bias", outputs) if bias else None
        return self.weights.high_precision(weight, vector, self.device)

    def convolution(self, name: str, outputs: int, inputs: int, size: int, bias: bool = False) -> Linear:
        """Load a convolution [outputs, inputs, size, size] as a product over [size, size, inputs]."""
        weight = self.tensor(f"{name}.weight", outputs, inputs, size, size).permute(0, 2, 3, 1).flatten(1)
        return self.weights.high_precision(weight, self.tensor(f"{name}.bias", outputs) if bias else None, self.device)

    def flat_projection(self, name: str, outputs: int, patch_size: int) -> Linear:
        """Load a layer over flattened patches, without bias."""
        weight = self.stored(name, outputs, 3 * patch_size**2).dequantized()
        return self.weights.high_precision(weight, None, self.device)

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise CheckpointError, which names one and counts them, if there are tensors that weren't read, but for those
        whose names start with one of ``ignored``."""
        keys = [key for name, key in self._keys.items() if not name.startswith(tuple(ignored))]
        self._stored.check_all_read(keys, "tower")
