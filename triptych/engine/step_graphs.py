"""Steps as CUDA graphs, one for each bucket of sizes: launches are recorded once, and replayed over inputs at fixed
addresses."""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.engine.buckets import bucket_for, decode_sizes, mixed_sizes
from triptych.engine.kv_size import gib
from triptych.errors import StartError
from triptych.layers.attention.base import AttentionBatch, KVTensors, pages_needed
from triptych.layers.attention.tables import PagedTables
from triptych.layers.cuda_graphs import Record, recorder
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.pinned import to_device

log = logging.getLogger(__name__)


def only_decodes(batch: ForwardBatch) -> bool:
    """Whether every request has one new token, and none is a media token."""
    return not len(batch.media_index) and all(query_len == 1 for query_len in batch.attention[0].query_lens)


@dataclass(frozen=True)
class GraphSizes:
    """Which steps are recorded, and the largest ones."""

    decodes: list[int]
    """Requests in a step that only decodes, ascending."""
    mixed: list[int]
    """Tokens in any other step, ascending."""
    max_num_seqs: int
    """Requests in a step."""
    max_pages: int
    """Length of the page tables of a step's requests."""


@dataclass(frozen=True)
class _Shape:
    """Number of elements of a recorded step's inputs."""

    tokens: int
    sequences: int
    decodes: int
    tiles: int
    logits: int
    """Tokens with logits. If all have them, they are in the order of the tokens."""

    @property
    def only_decodes(self) -> bool:
        return not self.tiles


class StepGraphs:
    """Recorded steps of a decoder whose layers share page tables. The last page of ``cache`` is scratch: padding tokens
    are written there. They belong to no request, so kernels attend from none of them."""

    def __init__(self, decoder: Decoder, cache: KVTensors, sizes: GraphSizes, record: Record) -> None:
        """Record a step for each size. Steps other than decodes are left out if layers split prompts differently, or
        continue with fewer tokens than they begin with before their last layer."""
        self._decoder = decoder
        self._cache = cache
        self._sizes = sizes
        num_pages, self._page_size = cache.tensors[0].shape[:2]
        self._scratch_page = num_pages - 1
        self._device = cache.device
        width = decoder.config.hidden_size * (1 + decoder.config.num_deepstack_layers)
        self._no_media = torch.empty(0, width, dtype=decoder.dtype, device=self._device)
        shapes = [_Shape(size, size, size, 0, size) for size in sizes.decodes]
        self._tile = self._tile_of_all_layers() if sizes.mixed else None
        if self._tile is not None:
            shapes += [self._mixed_shape(size, self._tile) for size in sizes.mixed]
        self._decodes = {shape.tokens: shape for shape in shapes if shape.only_decodes}
        self._mixed = {shape.tokens: shape for shape in shapes if not shape.only_decodes}
        self._places = {shape: self._places_of(shape) for shape in shapes}
        largest = max(places[-1].stop for places in self._places.values())
        self._buffer = torch.zeros(largest, dtype=torch.int64, device=self._device)
        self._embedded = self._no_media.new_zeros(max(self._mixed, default=0), width)
        self._logits = torch.empty(max(shape.logits for shape in shapes), decoder.num_logits, device=self._device)
        self._steps: list[Callable[[], object]] = []  # graphs read and write their tensors by address
        self._replays: dict[_Shape, Callable[[], object]] = {}
        # the largest first: the others then fit in the memory that it has freed
        for shape in sorted(shapes, key=lambda shape: -shape.tokens):
            self._steps.append(self._step(shape))
            self._replays[shape] = record(self._steps[-1])

    @property
    def extent(self) -> tuple[int, int, int]:
        """The number of graphs, and the largest numbers of requests that only decode and of tokens in other steps."""
        return len(self._steps), max(self._decodes), max(self._mixed, default=0)

    def can_replay(self, batch: ForwardBatch) -> bool:
        """Whether there is a recorded step for ``batch``, which is in host memory."""
        return self._shape_for(batch) is not None

    def replay(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of a step in host memory that ``can_replay`` accepts, as ``Decoder`` does. They are valid
        until the next step."""
        shape = self._shape_for(batch)
        assert shape is not None
        self._fill(shape, batch)
        self._replays[shape]()
        count = len(batch.logits_index)
        if shape.logits < shape.tokens or count == len(batch.tokens):
            return self._logits[:count]
        return self._logits[batch.logits_index.to(self._device, non_blocking=True)]

    def _shape_for(self, batch: ForwardBatch) -> _Shape | None:
        (attention,) = batch.attention
        if batch.choice is not None or attention.ends is not None:
            return None
        if sum(len(table) for table in attention.page_tables) > self._sizes.max_pages:
            return None
        shapes = self._decodes if only_decodes(batch) else self._mixed
        size = bucket_for(len(batch.tokens), list(shapes))
        if size is None:
            return None
        shape = shapes[size]
        fits = len(attention.query_lens) <= self._sizes.max_num_seqs and len(batch.logits_index) <= shape.logits
        return shape if fits else None

    def _mixed_shape(self, num_tokens: int, tile: int) -> _Shape:
        """Return the shape of steps with prompts. Its last sequence has no tokens, and unused tiles belong to it."""
        most = self._sizes.max_num_seqs
        tiles = num_tokens // tile + min(most, num_tokens // 2)
        return _Shape(num_tokens, most + 1, min(most, num_tokens), tiles, min(most, num_tokens - 1))

    def _tile_of_all_layers(self) -> int | None:
        """Return the number of a prompt's tokens that the kernels of all layers process at once, from a step over the
        scratch page; None if there is no such number."""
        config, length = self._decoder.config, min(2, self._page_size)
        if config.last_keeping_layer < config.num_layers - 1:
            return None
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        attention = AttentionBatch(
            query_lens=[length],
            kv_lens=[length],
            page_tables=[torch.tensor([self._scratch_page])],
            slots=self._scratch_page * self._page_size + torch.arange(length, device=self._device),
        )
        self._decoder(
            ForwardBatch(
                tokens=torch.zeros(length, dtype=torch.int64, device=self._device),
                positions=torch.zeros(3, length, dtype=torch.float64, device=self._device),
                media_index=nothing,
                media_embeddings=self._no_media,
                logits_index=nothing.new_zeros(1),
                attention=[attention],
            ),
            self._cache,
        )
        return attention.tile_sizes[0] if len(attention.tile_sizes) == 1 else None

    def _fill(self, shape: _Shape, batch: ForwardBatch) -> None:
        """Copy the inputs to the device at once. The pages come last, so that only the used part is copied."""
        (attention,) = batch.attention
        tables = PagedTables.on_cpu(attention.query_lens, attention.kv_lens, attention.page_tables, self._tile or 1)
        lengths = (tables.query_starts, tables.query_lens, tables.kv_lens, tables.page_starts)
        empty = shape.sequences - 1
        inputs = [
            (batch.tokens, 0),
            (batch.positions.view(torch.int64), 0),  # 0.0 has the same bits
            (attention.slots, self._scratch_page * self._page_size),
            (batch.logits_index, 0),
            *((one, 0) for one in lengths),
            (tables.decodes, -1),
            (tables.tiles.view(-1), empty),
            (tables.pages, 0),
        ]
        places = self._places[shape]
        size = places[-1].start + len(tables.pages)
        on_host = torch.empty(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        words = on_host.numpy()  # whose slices are quicker than a tensor's
        for (values, padding), place in zip(inputs, places, strict=True):
            target = words[place].reshape(*values.shape[:-1], -1)
            target[..., : values.shape[-1]] = values.numpy()
            target[..., values.shape[-1] :] = padding
        self._buffer[:size].copy_(on_host, non_blocking=True)
        if not shape.only_decodes:
            self._embed(shape, batch)

    def _embed(self, shape: _Shape, batch: ForwardBatch) -> None:
        """Write the embeddings of all tokens, as if all were media tokens: a graph can't know which are."""
        tokens = self._buffer[: shape.tokens]
        rows, hidden_size = self._embedded[: shape.tokens], self._decoder.config.hidden_size
        rows[:, :hidden_size] = self._decoder.embed(tokens)
        rows[:, hidden_size:] = 0
        if len(batch.media_index):
            index, media = to_device([batch.media_index, batch.media_embeddings], self._device)
            rows.index_copy_(0, index, media.to(rows.dtype))

    def _places_of(self, shape: _Shape) -> list[slice]:
        """Return where a step's inputs are in the buffer, with the largest number of pages. All begin at multiples of
        16 bytes, for which kernels are compiled."""
        of_tokens, of_sequences = (shape.tokens, 3 * shape.tokens, shape.tokens), [shape.sequences] * 4
        pages = self._sizes.max_pages
        sizes = [*of_tokens, shape.logits, *of_sequences, shape.decodes, 2 * shape.tiles, pages]
        starts = itertools.accumulate((size + size % 2 for size in sizes), initial=0)
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]

    def _step(self, shape: _Shape) -> Callable[[], object]:
        """Return a step over this shape's part of the buffer, filled with padding."""
        views = [self._buffer[place] for place in self._places[shape]]
        tokens, positions, slots, logits_index, *lengths, decodes, tiles, pages = views
        query_starts, query_lens, kv_lens, page_starts = lengths
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        is_media = nothing if shape.only_decodes else torch.arange(shape.tokens, device=self._device)
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions.view(torch.float64).view(3, -1),
            media_index=is_media,
            media_embeddings=self._embedded[: len(is_media)],
            logits_index=logits_index,
            attention=[
                AttentionBatch(
                    query_lens=[1] * shape.tokens,  # these lists are read by the host; kernels read the tables
                    kv_lens=[1] * shape.tokens,
                    page_tables=[nothing] * shape.tokens,
                    slots=slots,
                    tables=PagedTables(
                        query_starts, query_lens, kv_lens, page_starts, decodes, tiles.view(-1, 2), pages
                    ),
                )
            ],
        )
        self._fill(shape, _no_rows(self._no_media))
        return lambda: self._logits[: shape.logits].copy_(self._decoder(batch, self._cache))


def record_graphs(
    decoder: Decoder, cache: KVTensors, max_num_seqs: int, max_num_batched_tokens: int, context_length: int
) -> StepGraphs | None:
    """Record graphs for a decoder on a GPU, up to ``max_num_seqs`` requests and ``max_num_batched_tokens`` tokens.
    Returns None, and logs why, for a decoder that can't be recorded. Raises StartError if memory runs out."""
    if decoder.config.has_experts:
        log.info("no CUDA graphs: which experts run is decided on the host")
        return None
    if decoder.config.has_state:
        log.info("no CUDA graphs: layers keep state")
        return None
    if len(decoder.config.cache_groups.windows) > 1:
        log.info("no CUDA graphs: layers don't share page tables")
        return None
    if decoder.config.per_layer is not None:
        log.info("no CUDA graphs: embeddings per layer are read in host memory")
        return None
    device = cache.device
    torch.cuda.empty_cache()  # as a recording does, so that what is taken can be told
    began, before = time.monotonic(), torch.cuda.memory_reserved(device)
    sizes = GraphSizes(
        decodes=decode_sizes(max_num_seqs),
        mixed=mixed_sizes(max_num_batched_tokens),
        max_num_seqs=max_num_seqs,
        max_pages=max_num_seqs * pages_needed(context_length, cache.page_size),
    )
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            graphs = StepGraphs(decoder, cache, sizes, recorder(device))
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise StartError(
            "no memory is left for CUDA graphs: give --kv-cache-memory less, lower --max-num-seqs or "
            "--max-num-batched-tokens, or use --no-cuda-graphs"
        ) from error
    took = max(0, torch.cuda.memory_reserved(device) - before)  # other processes may share the GPU
    log.info(
        "recorded %d CUDA graphs, up to %d requests that decode and %d tokens, in %.1f s and %s of PyTorch's memory",
        *graphs.extent,
        time.monotonic() - began,
        gib(took),
    )
    return graphs


def _no_rows(no_media: Tensor) -> ForwardBatch:
    """Return a step without tokens, in host memory."""
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        none,
        torch.empty(3, 0, dtype=torch.float64),
        none,
        no_media,
        none,
        [AttentionBatch([], [], [], none)],
    )
