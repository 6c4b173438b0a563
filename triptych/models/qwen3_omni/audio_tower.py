"""Qwen3-Omni's audio tower: windows of features in, embeddings out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.pinned import to_device
from triptych.models.qwen3_omni.audio import STRIDE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AudioTower:
    """``Encoder`` that turns windows of log-mel features into embeddings.

    transformers' own code pads chunks to the longest one of a call, so that an item's embeddings depend on the rest of
    its batch. Here the preprocessor has padded the chunks as for an item by itself. The module is passed what it would
    otherwise derive: the chunks, which of their tokens are valid, and where windows begin.
    """

    def __init__(self, module: "PreTrainedModel", embedding_width: int) -> None:
        self.module = module
        self.embedding_width = embedding_width
        self._chunk = 2 * module.config.n_window

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``. Inputs shorter than a chunk are batched by equal length."""
        chunks = [min(len(item.patches), self._chunk) for item in inputs]
        rows: dict[int, Tensor] = {}
        for chunk in sorted(set(chunks)):
            numbers = [number for number, length in enumerate(chunks) if length == chunk]
            rows |= zip(numbers, self._encode([inputs[number] for number in numbers], chunk), strict=True)
        return [rows[number] for number in range(len(inputs))]

    def _encode(self, inputs: Sequence[PreprocessedPart], chunk: int) -> list[Tensor]:
        """Return the embeddings of inputs that consist of whole chunks of ``chunk`` frames."""
        tokens_per_chunk = -(-chunk // STRIDE)
        valid: list[Tensor] = []
        slots = 0
        for item in inputs:
            whole, rest = divmod(item.grid[0], chunk)
            if len(item.patches) != (whole + (rest > 0)) * chunk:
                raise PlanMismatch(
                    f"{len(item.patches)} frames, {item.grid[0]} of which are valid, aren't whole chunks of {chunk}"
                )
            # only the last chunk can end in padding
            valid.append(torch.arange(slots, slots + tokens_per_chunk * whole + -(-rest // STRIDE)))
            slots += tokens_per_chunk * len(item.patches) // chunk
        device = self.module.device
        [features] = to_device([torch.cat([torch.from_numpy(item.patches) for item in inputs])], device)
        chunks = features.to(self.module.dtype).reshape(-1, chunk, features.shape[1])
        lengths = [len(one) for one in valid]
        output = self.module(
            padded_feature=chunks.transpose(1, 2),  # [chunks, bands, frames]
            chunk_lengths=torch.full((len(chunks),), chunk, device=device),
            valid_indices=torch.cat(valid).to(device),
            cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32),
        )
        rows: Tensor = output.last_hidden_state
        return list(torch.split(rows, lengths))
