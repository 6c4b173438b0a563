"""What adapters of all families with encoders share: which of a checkpoint's tensors are whose, and loading of
both."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.errors import CheckpointError
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WeightFormat
from triptych.layers.parallel import SINGLE_RANK, Group
from triptych.layers.weights import DecoderKeys
from triptych.models.base import ModelConfig
from triptych.models.registry import backbone_of
from triptych.models.shared.tower_weights import TowerWeights


@dataclass(frozen=True)
class WeightPrefixes:
    """How a checkpoint names its tensors."""

    towers: Mapping[str, str]
    """Prefix of each tower's tensors, by the tower's name."""
    decoder: str
    """Prefix of the decoder's tensors."""
    head: str = "lm_head.weight"
    """Name of the output projection."""
    others: tuple[str, ...] = ()
    """Prefixes of parts of the model that aren't loaded."""


class TowerAdapter(ABC):
    """``ModelAdapter`` of a family with an encoder; subclasses set ``towers`` and ``layouts``, and read their towers.

    Raises CheckpointError for a config that lacks a setting or asks for something unsupported.
    """

    towers: ClassVar[str]
    """What the encoder is made of, for documentation."""
    layouts: Sequence[WeightPrefixes]
    """The naming schemes of checkpoints, in order of preference."""
    decoder_config: DecoderConfig
    embedding_width: int

    def __init__(
        self, config: ModelConfig, text: Mapping[str, Any], *, tied: bool, num_deepstack_layers: int = 0
    ) -> None:
        """``text`` are the settings of the language model, and ``tied`` says whether its head is its embedding."""
        backbone = backbone_of({**config, "text_config": text})
        self.decoder_config = backbone.decoder_config(
            text, tie_embeddings=tied, num_deepstack_layers=num_deepstack_layers
        )
        self.embedding_width = self.decoder_config.hidden_size * (1 + num_deepstack_layers)

    @property
    def unread(self) -> Sequence[str]:
        """Beginnings of the names, as ``tower_keys`` returns them, of tensors that the encoder doesn't need."""
        return ()

    @abstractmethod
    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Read the encoder's tensors. Raises CheckpointError as ``TowerWeights`` does."""

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the encoder alone.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support.
        """
        reader = TowerWeights(checkpoint, self.tower_keys(checkpoint.tensors), weights, device)
        encoder = self.read_encoder(reader)
        reader.finish(self.unread)
        return encoder

    def encoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of the towers' tensors, sorted. Raises CheckpointError for an unknown key."""
        return self._split_keys(all_keys)[0]

    def tower_keys(self, all_keys: Iterable[str]) -> dict[str, str]:
        """Return the keys of the towers' tensors by their names within the model: the tower's name, a dot, and the rest
        after its prefix. Raises CheckpointError for an unknown key."""
        keys = list(all_keys)
        prefixes = self.weight_prefixes(keys).towers
        return {
            f"{tower}.{key.removeprefix(prefix)}": key
            for key in self.encoder_keys(keys)
            for tower, prefix in prefixes.items()
            if key.startswith(prefix)
        }

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of the decoder's tensors, sorted. Raises CheckpointError for an unknown key."""
        return self._split_keys(all_keys)[1]

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """Load a rank's shard of the decoder alone.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support or a group size that doesn't divide the decoder.
        """
        self._split_keys(checkpoint.tensors)
        prefixes = self.weight_prefixes(checkpoint.tensors)
        # a tower's tensors may be among those with the decoder's prefix
        towers = [
            one.removeprefix(prefixes.decoder) for one in prefixes.towers.values() if one.startswith(prefixes.decoder)
        ]
        names = self.decoder_config.names
        names = replace(names, ignored_modules=(*names.ignored_modules, *towers))
        keys = DecoderKeys(prefixes.decoder, prefixes.head, names)
        return Decoder.load(self.decoder_config, checkpoint, keys, weights, device, group=group)

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Return the size of the weights in the checkpoint, in bytes: ``{"encoder": …, "decoder": …}``."""
        encoder, decoder = self._split_keys(tensors)
        return {
            "encoder": sum(tensors[key].num_bytes for key in encoder),
            "decoder": sum(tensors[key].num_bytes for key in decoder),
        }

    def weight_prefixes(self, all_keys: Iterable[str]) -> WeightPrefixes:
        """Return the first of ``layouts`` whose decoder prefix occurs in the checkpoint."""
        prefixes = tuple(layout.decoder for layout in self.layouts)
        found = {prefix for prefix in prefixes for key in all_keys if key.startswith(prefix)}
        return next((layout for layout in self.layouts if layout.decoder in found), self.layouts[0])

    def _split_keys(self, all_keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the sorted keys of the towers' tensors and of the decoder's."""
        keys = sorted(all_keys)
        prefixes = self.weight_prefixes(keys)
        towers = tuple(prefixes.towers.values())
        encoder: list[str] = []
        decoder: list[str] = []
        for key in keys:
            if key.startswith(towers):
                encoder.append(key)
            elif key.startswith((prefixes.decoder, prefixes.head.removesuffix("weight"))):
                decoder.append(key)
            elif not key.startswith(prefixes.others):
                known = "… nor in ".join((*towers, prefixes.decoder))
                raise CheckpointError(f"tensor {key!r} is neither in {known}…")
        return encoder, decoder
