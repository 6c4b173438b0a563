"""Turns a scheduled step into one forward pass of the decoder."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from triptych.engine.page_tables import PageTable, PageTables
from triptych.engine.prompt_logprobs import PromptLogprobsQuery, prompt_logprobs_queries, score
from triptych.engine.request import Request
from triptych.engine.sampler import SampleResult, SamplingInput, sample
from triptych.engine.sampling_batch import num_candidates
from triptych.engine.scheduler import Chunk
from triptych.engine.state_records import StateRecords
from triptych.engine.state_slots import NUM_TABLES, StateTables
from triptych.errors import TriptychError
from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.decoder import AfterLayer, ForwardBatch
from triptych.layers.delta_rule.base import DeltaBatch
from triptych.layers.state_tensors import StateBatch
from triptych.layers.token_choice import TokenChoice
from triptych.messages.work import PromptLogprobs

Forward = Callable[[ForwardBatch, KVTensors, AfterLayer | None], Tensor]
"""A decoder, or a wrapper around one: runs a step and returns its logits, like ``Decoder.forward``."""


@dataclass(frozen=True)
class MediaEmbeddings:
    """Embeddings of a step's M media tokens."""

    index: Tensor
    """Positions among the step's tokens: int64 [M]."""
    rows: Tensor
    """[M, row width] in the row dtype."""

    @classmethod
    def none(cls, embedding_width: int, dtype: torch.dtype) -> "MediaEmbeddings":
        """Return embeddings of a step without media tokens."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, embedding_width, dtype=dtype))

    def slice_tokens(self, start: int, end: int, offset: int) -> "MediaEmbeddings":
        """Return the embeddings of the step's tokens ``[start, end)``, re-indexed for a step in which these begin at
        ``offset``."""
        within = (self.index >= start) & (self.index < end)
        return MediaEmbeddings(self.index[within] - start + offset, self.rows[within])

    @classmethod
    def joined(cls, parts: "Sequence[MediaEmbeddings]") -> "MediaEmbeddings":
        """Concatenate embeddings of the same step."""
        return cls(torch.cat([part.index for part in parts]), torch.cat([part.rows for part in parts]))


@dataclass
class ChunkInputs:
    """Inputs of a chunk besides its tokens."""

    positions: list[list[float]]
    """Rope positions on three axes."""
    pages: list[list[int]]
    """The request's pages in each group of layers."""
    released: list[int]
    """By group, the request's tokens before the first page."""
    slots: list[list[int]]
    """By group, slots of the chunk's tokens in the KV cache."""
    ends: list[int]
    """Where the keys end that each token of the chunk attends to; empty unless it has tokens of atomic spans."""


@dataclass(frozen=True)
class StepOutput:
    """Results of a step, in the order of its chunks. An error ends its chunk's request alone."""

    sampled: list[SampleResult]
    """The next token of every chunk that samples; None if the chunk's last token must be computed again."""
    scored: Sequence[PromptLogprobs | TriptychError] = ()
    """Prompt log probabilities, for every chunk with a query."""


class Runner:
    """Runs steps on a decoder and its KV tensors. Only ``run`` takes long."""

    shares_cores = True
    """Whether steps run on the cores that other threads need, too."""

    def __init__(self, decoder: Forward, cache: KVTensors, page_size: int, states: StateRecords | None = None) -> None:
        """``states`` are those of the cache, which may belong to several ranks; None for a model without state."""
        self.decoder = decoder
        self.cache = cache
        self.states = states
        self._page_size = page_size

    def job(
        self,
        chunks: Sequence[Chunk],
        media: MediaEmbeddings,
        sampling_inputs: Sequence[SamplingInput],
        after_layer: AfterLayer | None,
    ) -> Callable[[], StepOutput]:
        """Return what runs a step on the compute thread: ``run`` of its ``batch``."""
        queries = prompt_logprobs_queries(chunks)
        return partial(self.run, self.batch(chunks, media), sampling_inputs, queries, after_layer)

    def batch(self, chunks: Sequence[Chunk], media: MediaEmbeddings) -> ForwardBatch:
        """Pack a step's tokens in the order of ``chunks``. Built from lists in few calls: caches are cold between
        steps, so each call costs more than its work."""
        inputs = [self.chunk_inputs(chunk) for chunk in chunks]
        starts = accumulate((chunk.length for chunk in chunks), initial=0)
        ends, generated = step_ends(chunks, inputs), self.generated(chunks)
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
            attention=[
                AttentionBatch(
                    query_lens=[c.length for c in chunks],
                    kv_lens=[c.start + c.length - one.released[group] for c, one in zip(chunks, inputs, strict=True)],
                    page_tables=page_tables(inputs, group),
                    slots=torch.tensor([slot for one in inputs for slot in one.slots[group]], dtype=torch.int64),
                    ends=None if ends is None else ends - released_tokens(chunks, inputs, group),
                    generated=generated,
                )
                for group in range(len(inputs[0].pages))
            ],
            state=None if self.states is None else state_batch(chunks),
            num_largest=[number for chunk in chunks for number in num_largest(chunk)],
            choice=token_choice(chunks),
        )

    def generated(self, chunks: Sequence[Chunk]) -> list[bool] | None:
        """Return ``AttentionBatch.generated`` of a step. A prompt's last token may be alone in its chunk, by what else
        is in the step or cached. Its logits must not depend on that."""
        return [chunk.length == 1 and chunk.start >= chunk.request.num_prompt for chunk in chunks]

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Called while a step with these chunks runs, to prepare the next one. Does nothing on CPUs, since the step
        uses all cores."""

    def run(
        self,
        batch: ForwardBatch,
        sampling_inputs: Sequence[SamplingInput],
        queries: Sequence[PromptLogprobsQuery] = (),
        after_layer: AfterLayer | None = None,
    ) -> StepOutput:
        """Run a step. ``sampling_inputs`` are those of the chunks that sample, in order; ``queries`` is what
        ``prompt_logprobs_queries`` returns for the chunks; ``after_layer`` is passed to the decoder."""
        with self._device_context(), torch.inference_mode():
            if self.states is not None and batch.state is not None:
                self.states.begin(batch.state)
                logits = self.logits(batch, after_layer)
                self.states.end(batch.state)
            else:
                logits = self.logits(batch, after_layer)
            scored = score(logits, queries) if queries else []
            if queries:
                taken = {row for one in queries for row in range(one.first_row, one.first_row + len(one.tokens))}
                logits = logits[[row for row in range(logits.shape[0]) if row not in taken]]
            return StepOutput(sample(logits, sampling_inputs) if sampling_inputs else [], scored)

    def _device_context(self) -> AbstractContextManager[object]:
        """Return a context manager around a step, entered on the compute thread."""
        return nullcontext()

    def logits(self, batch: ForwardBatch, after_layer: AfterLayer | None) -> Tensor:
        """Run the decoder and return its logits, float32 [L, vocab]."""
        return self.decoder(batch, self.cache, after_layer)

    def chunk_inputs(self, chunk: Chunk) -> ChunkInputs:
        """Return a chunk's positions, page tables and slots."""
        tables, size = self.page_tables(chunk.request), self._page_size
        tokens = range(chunk.start, chunk.start + chunk.length)
        return ChunkInputs(
            positions=chunk.request.positions_of(chunk.start, chunk.length),
            pages=[list(table.pages) for table in tables],
            released=[table.first * size for table in tables],
            slots=[_slots(table, tokens, size) for table in tables],
            ends=chunk.request.ends_of(chunk.start, chunk.length),
        )

    def page_tables(self, request: Request) -> PageTables:
        """Return the request's tables in groups of layers, without those of its state."""
        return request.tables if self.states is None else request.tables[:-NUM_TABLES]


def step_ends(chunks: Sequence[Chunk], inputs: Sequence[ChunkInputs]) -> Tensor | None:
    """Return where the keys end that each of a step's tokens attends to, int64 [T]; None if all attend up to
    themselves."""
    if not any(one.ends for one in inputs):
        return None
    ends = [one.ends or range(c.start + 1, c.start + c.length + 1) for c, one in zip(chunks, inputs, strict=True)]
    return torch.tensor([end for chunk_ends in ends for end in chunk_ends], dtype=torch.int64)


def released_tokens(chunks: Sequence[Chunk], inputs: Sequence[ChunkInputs], group: int) -> Tensor:
    """Return for each of a step's tokens how many of its request's tokens precede the page table, int64 [T]."""
    released = torch.tensor([one.released[group] for one in inputs])
    return released.repeat_interleave(torch.tensor([chunk.length for chunk in chunks]))


def page_tables(inputs: Sequence[ChunkInputs], group: int) -> list[Tensor]:
    """Return the page table of each of a step's requests, int64 [pages]: views of one tensor, made in one call."""
    pages = [one.pages[group] for one in inputs]
    joined = torch.tensor([page for one in pages for page in one], dtype=torch.int64)
    return list(torch.split(joined, [len(one) for one in pages]))


def state_batch(chunks: Sequence[Chunk]) -> StateBatch:
    """Return what a step of these chunks does with their requests' states."""
    own = [StateTables.of(chunk.request.tables) for chunk in chunks]
    slots = [tables.slot.pages[0] for tables in own]
    starts = [chunk.start for chunk in chunks]
    delta = DeltaBatch([chunk.length for chunk in chunks], slots, [start == 0 for start in starts])
    entries = list(zip(own, slots, starts, strict=True))
    loads = [(snapshot, slot, start) for tables, slot, start in entries for snapshot in tables.loading.pages]
    saves = [(snapshot, slot) for tables, slot, _ in entries for snapshot in tables.saving.pages]
    return StateBatch(delta, starts, loads, saves)


def token_choice(chunks: Sequence[Chunk]) -> TokenChoice | None:
    """Return the LoRAs or second weights of a step's tokens."""
    if not any(chunk.request.has_own_weights for chunk in chunks):
        return None
    return TokenChoice.of([one for chunk in chunks for one in chunk.request.weights_of(chunk.start, chunk.length)])


def _slots(table: PageTable, tokens: range, page_size: int) -> list[int]:
    pages, first = table.pages, table.first
    return [pages[token // page_size - first] * page_size + token % page_size for token in tokens]


def num_largest(chunk: Chunk) -> list[int]:
    """Return ``ForwardBatch.num_largest`` of each token whose logits the chunk needs."""
    of_next = [num_candidates(chunk.request.sampling)] if chunk.samples else []
    return [0] * chunk.num_scored + of_next
