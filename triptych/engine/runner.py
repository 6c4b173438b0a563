"""Shapes and devices: turns a scheduler's step into one forward pass of the decoder."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from triptych.engine.prompt_logprobs import Asked, score
from triptych.engine.sampler import Choice, SamplingInput, sample
from triptych.engine.sampling_batch import num_candidates
from triptych.engine.scheduler import Chunk
from triptych.errors import TriptychError
from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.decoder import AfterLayer, ForwardBatch
from triptych.messages.work import PromptLogprobs

Forward = Callable[[ForwardBatch, KVTensors, AfterLayer | None], Tensor]
"""A decoder, or what stands before one: runs a step and returns its logits, as ``Decoder.forward`` does."""


@dataclass(frozen=True)
class MediaEmbeddings:
    """Embedding rows for media tokens of a step. ``index`` is int64 of shape (M,): which of the step's tokens;
    ``rows`` is of shape (M, row width) in the row dtype."""

    index: Tensor
    rows: Tensor

    @classmethod
    def none(cls, embedding_width: int, dtype: torch.dtype) -> "MediaEmbeddings":
        """For a step without media tokens."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, embedding_width, dtype=dtype))

    def of_tokens(self, start: int, end: int, offset: int) -> "MediaEmbeddings":
        """Those of the step's tokens ``[start, end)``, which come to begin at ``offset`` in another step."""
        within = (self.index >= start) & (self.index < end)
        return MediaEmbeddings(self.index[within] - start + offset, self.rows[within])

    @classmethod
    def joined(cls, parts: "Sequence[MediaEmbeddings]") -> "MediaEmbeddings":
        """Several, of the same step and of one row width, as one."""
        return cls(torch.cat([part.index for part in parts]), torch.cat([part.rows for part in parts]))


@dataclass(frozen=True)
class ChunkInputs:
    """What a chunk brings to a step besides its tokens: their rope positions, on three axes; its request's page table,
    int64 [pages]; and their slots."""

    positions: list[list[float]]
    page_table: Tensor
    slots: list[int]


@dataclass(frozen=True)
class StepOutput:
    """What a step has brought: ``drawn``, the next token of every chunk that samples, and ``scored``, what was asked
    about prompts; both in the order of the chunks. An error in the place of either ends that chunk's request alone;
    None in that of a token: the chunk's last token is to be computed again."""

    drawn: list[Choice]
    scored: Sequence[PromptLogprobs | TriptychError] = ()


class Runner:
    """Runs steps on a decoder and its KV tensors. ``run`` is the only part that takes long."""

    def __init__(self, decoder: Forward, cache: KVTensors, page_size: int) -> None:
        self.decoder = decoder
        self._cache = cache
        self._page_size = page_size

    def batch(self, chunks: Sequence[Chunk], media: MediaEmbeddings) -> ForwardBatch:
        """The step's tokens, packed in the order of ``chunks``. By lists and one way to make tensors of them: between
        two steps the processor has none of this in its caches, and each further function costs more than the work."""
        inputs = [self._inputs(chunk) for chunk in chunks]
        starts = accumulate((chunk.length for chunk in chunks), initial=0)
        wanted = [start + token for start, chunk in zip(starts, chunks, strict=False) for token in chunk.wanted]
        return ForwardBatch(
            tokens=torch.tensor(
                [token for c in chunks for token in c.request.tokens[c.start : c.start + c.length]], dtype=torch.int64
            ),
            positions=torch.tensor(
                [[position for one in inputs for position in one.positions[axis]] for axis in range(3)],
                dtype=torch.float64,
            ),
            media_index=media.index,
            media_embeddings=media.rows,
            logits_index=torch.tensor(wanted, dtype=torch.int64),
            attention=AttentionBatch(
                query_lens=[c.length for c in chunks],
                kv_lens=[c.start + c.length for c in chunks],
                page_tables=[one.page_table for one in inputs],
                slots=torch.tensor([slot for one in inputs for slot in one.slots], dtype=torch.int64),
            ),
            num_largest=[number for chunk in chunks for number in num_largest(chunk)],
        )

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Called while a step of these chunks runs: what can be done now for those that will go on. On CPUs nothing,
        since the step has the cores."""

    def run(
        self,
        batch: ForwardBatch,
        draws: Sequence[SamplingInput],
        asked: Sequence[Asked] = (),
        after_layer: AfterLayer | None = None,
    ) -> StepOutput:
        """``draws`` are for the chunks that sample, in order; ``asked`` is what ``asked_of`` makes of the chunks;
        ``after_layer`` as ``Decoder.forward`` has it."""
        with self._placed(), torch.inference_mode():
            logits = self._logits(batch, after_layer)
            scored = score(logits, asked) if asked else []
            if asked:
                taken = {row for one in asked for row in range(one.first_row, one.first_row + len(one.tokens))}
                logits = logits[[row for row in range(logits.shape[0]) if row not in taken]]
            return StepOutput(sample(logits, draws) if draws else [], scored)

    def _placed(self) -> AbstractContextManager[object]:
        """Around a step, on the thread that computes."""
        return nullcontext()

    def _logits(self, batch: ForwardBatch, after_layer: AfterLayer | None) -> Tensor:
        return self.decoder(batch, self._cache, after_layer)

    def _inputs(self, chunk: Chunk) -> ChunkInputs:
        pages, size = chunk.request.pages, self._page_size
        return ChunkInputs(
            positions=chunk.request.positions_of(chunk.start, chunk.length),
            page_table=torch.tensor(pages, dtype=torch.int64),
            slots=[
                pages[token // size] * size + token % size for token in range(chunk.start, chunk.start + chunk.length)
            ],
        )


def num_largest(chunk: Chunk) -> list[int]:
    """For each token that the chunk wants logits of, as ``ForwardBatch.num_largest`` has it."""
    return [0] * chunk.num_scored + [num_candidates(chunk.request.sampling)] * chunk.samples
