"""Shapes and devices: turns a scheduler's step into one forward pass of the decoder."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.language.sampler import Draw, Drawn, sample
from triptych.language.scheduler import Chunk
from triptych.models.attention.base import AttentionBatch, KVTensors
from triptych.models.decoder import AfterLayer, ForwardBatch

Forward = Callable[[ForwardBatch, KVTensors, AfterLayer | None], Tensor]
"""A decoder, or what stands before one: runs a step and returns its logits, as ``Decoder.forward`` does."""


@dataclass(frozen=True)
class MediaRows:
    """Embedding rows for media tokens of a step. ``index`` is int64 of shape (M,): which of the step's tokens;
    ``rows`` is of shape (M, row width) in the row dtype."""

    index: Tensor
    rows: Tensor

    @classmethod
    def none(cls, row_width: int, dtype: torch.dtype) -> "MediaRows":
        """For a step without media tokens."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, row_width, dtype=dtype))


class Runner:
    """Runs steps on a decoder and its KV tensors. ``run`` is the only part that takes long."""

    def __init__(self, decoder: Forward, cache: KVTensors, page_size: int) -> None:
        self.decoder = decoder
        self._cache = cache
        self._page_size = page_size

    def batch(self, chunks: Rows[Chunk], media: MediaRows) -> ForwardBatch:
        """The step's tokens, packed in the order of ``chunks``."""
        tokens = [token for c in chunks for token in c.sequence.tokens[c.start : c.start + c.length]]
        positions = np.concatenate([c.sequence.positions_of(c.start, c.length) for c in chunks], axis=1)
        ends = np.cumsum([c.length for c in chunks])
        return ForwardBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            positions=torch.from_numpy(positions),
            media_index=media.index,
            media_rows=media.rows,
            logits_index=torch.tensor(
                [e - 1 for e, c in zip(ends, chunks, strict=True) if c.samples], dtype=torch.int64
            ),
            attention=self._attention(chunks),
        )

    def run(self, batch: ForwardBatch, draws: Rows[Draw], after_layer: AfterLayer | None = None) -> list[Drawn]:
        """The next token of every chunk that samples, in order. ``after_layer`` as ``Decoder.forward`` has it."""
        with torch.inference_mode():
            logits = self.decoder(batch, self._cache, after_layer)
            return sample(logits, draws) if draws else []

    def _attention(self, chunks: Rows[Chunk]) -> AttentionBatch:
        tables = [torch.tensor(c.sequence.pages, dtype=torch.int64) for c in chunks]
        slots = []
        for chunk, table in zip(chunks, tables, strict=True):
            token = torch.arange(chunk.start, chunk.start + chunk.length)
            slots.append(table[token // self._page_size] * self._page_size + token % self._page_size)
        return AttentionBatch(
            query_lens=[c.length for c in chunks],
            kv_lens=[c.start + c.length for c in chunks],
            page_tables=tables,
            slots=torch.cat(slots),
        )
