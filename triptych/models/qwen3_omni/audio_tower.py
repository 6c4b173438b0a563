"""Qwen3-Omni's audio tower: windows of features in, embeddings out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.errors import PlanMismatch
from triptych.layers.encoder import TowerItem
from triptych.layers.pinned import to_device
from triptych.models.qwen3_omni.audio import STRIDE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AudioTower:
    """See ``triptych.layers.encoder.Encoder``; a row is an embedding.

    transformers' own code would fill chunks up to the longest of those that it is called with, and so make an item's
    rows depend on the others. Here the preprocessor has filled them up, as for an item by itself, so the tower is told
    what it would otherwise work out: chunks, which of their tokens count, and where windows begin.
    """

    def __init__(self, module: "PreTrainedModel", embedding_width: int) -> None:
        self.module = module
        self.embedding_width = embedding_width
        self._chunk = 2 * module.config.n_window

    @torch.inference_mode()
    def encode(self, inputs: Sequence[TowerItem]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``. Those that are shorter than a chunk go by themselves, with others as
        short."""
        chunks = [min(len(item.patches), self._chunk) for item in inputs]
        rows: dict[int, Tensor] = {}
        for chunk in sorted(set(chunks)):
            numbers = [number for number, length in enumerate(chunks) if length == chunk]
            rows |= zip(numbers, self._encode([inputs[number] for number in numbers], chunk), strict=True)
        return [rows[number] for number in range(len(inputs))]

    def _encode(self, inputs: Sequence[TowerItem], chunk: int) -> list[Tensor]:
        """Of inputs that consist of whole chunks of so many frames."""
        tokens_per_chunk = -(-chunk // STRIDE)
        counted: list[Tensor] = []
        slots = 0
        for item in inputs:
            whole, rest = divmod(item.grid[0], chunk)
            if len(item.patches) != (whole + (rest > 0)) * chunk:
                raise PlanMismatch(
                    f"{len(item.patches)} frames, {item.grid[0]} of which count, aren't chunks of {chunk}"
                )
            # only the last chunk can have tokens that don't count, at its end
            counted.append(torch.arange(slots, slots + tokens_per_chunk * whole + -(-rest // STRIDE)))
            slots += tokens_per_chunk * len(item.patches) // chunk
        device = self.module.device
        [features] = to_device([torch.cat([torch.from_numpy(item.patches) for item in inputs])], device)
        chunks = features.to(self.module.dtype).reshape(-1, chunk, features.shape[1])
        lengths = [len(one) for one in counted]
        output = self.module(
            padded_feature=chunks.transpose(1, 2),  # [chunks, bands, frames]
            chunk_lengths=torch.full((len(chunks),), chunk, device=device),
            valid_indices=torch.cat(counted).to(device),
            cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32),
        )
        rows: Tensor = output.last_hidden_state
        return list(torch.split(rows, lengths))
