"""Qwen2, Qwen3 and Qwen3-MoE, without a tower: decoder parameters, and the names in the checkpoints.

All tensors are called ``model.…`` and ``lm_head.weight`` (absent when tied), published and saved by transformers 5
alike. Experts' weights are published, and saved, one by one; stacks of them, as the modules hold them, load as well.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.errors import CheckpointError
from triptych.layers.decoder import Decoder
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WeightFormat
from triptych.layers.parallel import SINGLE_RANK, Group
from triptych.models.base import ModelConfig
from triptych.models.shared.backbone import QWEN2, QWEN3, BackboneDefaults, decoder_config, decoder_keys

PREFIX, HEAD = "model.", "lm_head.weight"


class TextAdapter:
    """``ModelAdapter`` of a model that has no tower. Raises CheckpointError as the others do."""

    backbone: ClassVar[BackboneDefaults]

    def __init__(self, config: ModelConfig) -> None:
        tied = bool(config.get("tie_word_embeddings", False))
        self.decoder_config = decoder_config(config, self.backbone, tie_embeddings=tied)
        self.embedding_width = self.decoder_config.hidden_size

    def tower_keys(self, all_keys: Iterable[str]) -> list[str]:
        """None."""
        return []

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """All keys, sorted. Raises CheckpointError for one that isn't the decoder's."""
        keys = sorted(all_keys)
        for key in keys:
            if not key.startswith(PREFIX) and key != HEAD:
                raise CheckpointError(f"tensor {key!r} belongs to no part of a model of text alone")
        return keys

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Raises CheckpointError."""
        raise CheckpointError(f"{checkpoint.folder}: a model of text alone has no tower")

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """The decoder. Raises CheckpointError for tensors missing, misshapen or unknown, and ConfigError for a weight
        format that the device can't use and a group whose size doesn't divide the decoder."""
        self.decoder_keys(checkpoint.tensors)
        keys = decoder_keys(self.decoder_config, checkpoint, PREFIX, HEAD)
        return Decoder.load(self.decoder_config, checkpoint, keys, weights, device, group=group)

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Bytes in the checkpoint of each half: ``{"tower": 0, "decoder": …}``."""
        return {"tower": 0, "decoder": sum(tensors[key].num_bytes for key in self.decoder_keys(tensors))}


class Qwen2(TextAdapter):
    """Model type ``qwen2``: Qwen2 and Qwen2.5."""

    backbone = QWEN2


class Qwen3(TextAdapter):
    """Model type ``qwen3``."""

    backbone = QWEN3


class Qwen3Moe(TextAdapter):
    """Model type ``qwen3_moe``."""

    backbone = replace(QWEN3, head_dim=None, experts=True, norm_topk_prob=False, windows="all")
