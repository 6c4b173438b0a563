"""Adapter of text-only models: decoder parameters and tensor names.

Tensors are named ``model.…`` and ``lm_head.weight`` (absent when tied), both in most published files and in those saved
by transformers 5; ``model.language_model.…`` in files of models that have towers in other sizes. Both store experts'
weights one by one; stacked ones, as the modules hold them, load as well.
"""

from collections.abc import Iterable, Mapping

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.errors import CheckpointError
from triptych.layers.decoder import Decoder
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WeightFormat
from triptych.layers.parallel import SINGLE_RANK, Group
from triptych.layers.weights import DecoderKeys
from triptych.models.base import ModelConfig
from triptych.models.registry import backbone_of
from triptych.models.shared.settings import text_section

NESTED = "model.language_model."


class TextAdapter:
    """``ModelAdapter`` of a text-only model. Raises CheckpointError for an unsupported config."""

    def __init__(self, config: ModelConfig) -> None:
        backbone = backbone_of(config)
        text = text_section(config)
        tied = bool({**text, **config}.get("tie_word_embeddings", backbone.ties_embeddings))
        self.decoder_config = backbone.decoder_config(text, tie_embeddings=tied)
        self.embedding_width = self.decoder_config.hidden_size

    def encoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return no keys: there is no encoder."""
        return []

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of all tensors that the decoder uses, sorted. Raises CheckpointError for a key that isn't the
        decoder's."""
        keys = sorted(all_keys)
        names = self._names(keys)
        for key in keys:
            if not names.owns(key):
                raise CheckpointError(f"tensor {key!r} belongs to no part of a text-only model")
        return [key for key in keys if not names.ignores(key)]

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Raises CheckpointError."""
        raise CheckpointError(f"{checkpoint.folder}: a text-only model has no encoder")

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """Load a rank's shard of the decoder.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support or a group size that doesn't divide the decoder.
        """
        self.decoder_keys(checkpoint.tensors)
        names = self._names(checkpoint.tensors)
        return Decoder.load(self.decoder_config, checkpoint, names, weights, device, group=group)

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Return the size of the weights in the checkpoint, in bytes: ``{"encoder": 0, "decoder": …}``."""
        return {"encoder": 0, "decoder": sum(tensors[key].num_bytes for key in self.decoder_keys(tensors))}

    def _names(self, all_keys: Iterable[str]) -> DecoderKeys:
        """Return the names of the decoder's tensors in a checkpoint with these keys."""
        prefix = NESTED if any(key.startswith(NESTED) for key in all_keys) else "model."
        return DecoderKeys(prefix, self.decoder_config.names.head, self.decoder_config.names)
