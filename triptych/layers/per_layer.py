"""Embeddings per layer: each token has values of its own for every layer, from a second embedding and from a projection
of the first.

The references are ``Gemma4TextModel.project_per_layer_inputs`` and ``Gemma4TextDecoderLayer`` in transformers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.linear import frozen
from triptych.layers.pointwise import Activation
from triptych.layers.weights import WeightReader


class PerLayerEmbeddings(nn.Module):
    """Computes the values of a step's tokens for all layers, on every rank. ``table`` [vocab, layers * values] stays in
    the checkpoint's memory mapping, on GPUs, too: it may be larger than all other weights, and a step reads few of its
    rows."""

    def __init__(self, config: DecoderConfig, reader: WeightReader) -> None:
        super().__init__()
        spec = config.per_layer
        assert spec is not None
        width = config.num_layers * spec.size
        self.size = spec.size
        self.table = frozen(reader.tensor("embed_tokens_per_layer.weight", (spec.vocab_size, width)))
        self.projection = reader.replicated("per_layer_model_projection", width, config.hidden_size)
        self.projection_scale = config.hidden_size**-0.5
        self.norm = reader.norm("per_layer_projection_norm", spec.size, config.rms_norm_eps)
        # rounded, as in transformers
        self.register_buffer("scale", torch.tensor(spec.size**0.5, dtype=reader.weights.activations), persistent=False)

    scale: Tensor  # []

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return [T, layers, values] for ``tokens`` [T] and their embeddings ``hidden`` [T, hidden]."""
        rows = F.embedding(tokens.to(self.table.device), self.table).to(hidden.device, hidden.dtype) * self.scale
        projected = (self.projection(hidden) * self.projection_scale).view(-1, self.size)
        normed = self.norm(projected).view(rows.shape)
        return (normed.add_(rows) * 2**-0.5).view(len(tokens), -1, self.size)


class PerLayerInput(nn.Module):
    """Adds a layer's values to the residual stream: gated by it, projected and normalised."""

    def __init__(self, config: DecoderConfig, reader: WeightReader, layer: str) -> None:
        """``layer`` is the layer's name."""
        super().__init__()
        spec = config.per_layer
        assert spec is not None
        self.gate = reader.replicated(f"{layer}.per_layer_input_gate", spec.size, config.hidden_size)
        self.projection = reader.replicated(f"{layer}.per_layer_projection", config.hidden_size, spec.size)
        self.norm = reader.norm(f"{layer}.post_per_layer_input_norm", config.hidden_size, config.rms_norm_eps)
        self.activation = Activation[spec.activation.upper()]

    def forward(self, hidden: Tensor, values: Tensor) -> Tensor:
        """``hidden`` [T, hidden], ``values`` [T, values] → [T, hidden]."""
        gated = self.activation(self.gate(hidden)) * values
        return hidden + self.norm(self.projection(gated))
