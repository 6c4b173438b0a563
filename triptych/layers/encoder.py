"""The protocols of encoders and model adapters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.layers.decoder import Decoder, DecoderConfig
from triptych.layers.linear import WeightFormat
from triptych.layers.parallel import SINGLE_RANK, Group


class PreprocessedPart(Protocol):
    """One preprocessed part of an item: the fields of ``triptych.models.base.EncoderInput`` that an encoder reads."""

    @property
    def patches(self) -> NDArray[np.float32]:
        """float32 [patches, values per patch]."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of patches in time, rows and columns."""

    @property
    def tower(self) -> str:
        """Name of the tower that encodes the part."""

    @property
    def layout(self) -> tuple[int, ...]:
        """What the tower needs to know of the part beyond its grid."""


class Encoder(Protocol):
    """Stage E's loaded model, or one of its towers."""

    embedding_width: int
    """Values per embedding: hidden size × (1 + number of deepstack layers)."""

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """Return each input's embeddings [rows, embedding_width], in order, in the tower's dtype.

        A row holds the embedding, then the deepstack features. All inputs are one batch, whose composition affects an
        input's embeddings only by rounding. Raises PlanMismatch for an input whose patches don't fill its grid.
        """


class ModelAdapter(Protocol):
    """What a family provides to the engine, constructed from the checkpoint's config.

    It is the only code that knows the names of a checkpoint's tensors. All methods raise CheckpointError for an
    unsupported config or checkpoint.
    """

    embedding_width: int
    """Values per embedding: hidden size × (1 + number of deepstack layers)."""
    decoder_config: DecoderConfig
    """Parameters of the whole decoder, before it is divided among ranks."""

    def encoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of the encoder's tensors, sorted. Raises for a key of neither encoder nor decoder."""

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of the decoder's tensors, sorted. Raises like ``encoder_keys``."""

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the encoder, and nothing of the decoder."""

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """Load a rank's shard of the decoder, and nothing of the encoder."""

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Return the size of the weights in the checkpoint, in bytes: ``{"encoder": …, "decoder": …}``."""
