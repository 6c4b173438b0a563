"""The part of a layer that treats tokens one by one, built from its spec."""

from torch import nn

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.mixture import load_dense_and_experts, load_mixture
from triptych.layers.mlp import load_mlp
from triptych.layers.specs import DenseAndExpertsSpec, GatedMLPSpec, MoESpec
from triptych.layers.weights import WeightReader


def load_ffn(config: DecoderConfig, reader: WeightReader, index: int) -> nn.Module:
    """Load this rank's part of the ffn of layer ``index``. The ranks' outputs are summed."""
    layer, hidden_size, spec = f"layers.{index}", config.hidden_size, config.layers[index].ffn
    match spec:
        case GatedMLPSpec():
            return reader.all_reduced(load_mlp(spec, reader, f"{layer}.mlp", hidden_size))
        case MoESpec():
            return reader.all_reduced(load_mixture(spec, reader, f"{layer}.mlp", hidden_size))
        case DenseAndExpertsSpec():
            return load_dense_and_experts(spec, reader, layer, hidden_size, config.rms_norm_eps)
