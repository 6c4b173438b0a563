"""The part of a layer that treats tokens one by one, built from its spec."""

from torch import nn

from triptych.layers.mixture import load_mixture
from triptych.layers.mlp import load_mlp
from triptych.layers.specs import FfnSpec, GatedMLPSpec, MoESpec
from triptych.layers.weights import WeightReader


def load_ffn(spec: FfnSpec, hidden_size: int, reader: WeightReader, prefix: str) -> nn.Module:
    """Load this rank's part of a layer's ffn; ``prefix`` is its name in the decoder. The ranks' outputs are summed."""
    match spec:
        case GatedMLPSpec():
            module: nn.Module = load_mlp(spec, reader, prefix, hidden_size)
        case MoESpec():
            module = load_mixture(spec, reader, prefix, hidden_size)
    return reader.all_reduced(module)
