"""Decode steps as CUDA graphs, one for each bucket of batch sizes: launches are recorded once, and replayed over inputs
at fixed addresses."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from triptych.engine.buckets import bucket_for, bucket_sizes
from triptych.engine.kv_size import gib
from triptych.engine.padding import only_decodes, padded
from triptych.errors import StartError
from triptych.layers.attention.base import AttentionBatch, KVTensors, pages_needed
from triptych.layers.attention.tables import PagedTables
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.pinned import packed, unpacked

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a recording: Triton compiles in the first, and cuBLAS selects its algorithms."""

Record = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes a step that reads and writes fixed tensors; returns a function that replays it."""


class DecodeGraphs:
    """Recorded decode steps of a decoder whose layers share page tables. The last page of ``cache`` is scratch: padding
    rows write there."""

    def __init__(self, decoder: Decoder, cache: KVTensors, sizes: list[int], max_pages: int, record: Record) -> None:
        """Record a step for each of ``sizes``, ascending. ``max_pages``: total length of the page tables of a step's
        requests."""
        self._decoder = decoder
        self._cache = cache
        self._sizes = sizes
        self._max_pages = max_pages + sizes[-1]  # one for each padding row
        num_pages, self._page_size = cache.tensors[0].shape[:2]
        self._scratch_page = num_pages - 1
        self._device = cache.device
        largest = self._inputs(sizes[-1])
        self._buffer = torch.zeros(len(packed(largest)), dtype=torch.uint8, device=self._device)
        self._logits = torch.empty(sizes[-1], decoder.num_logits, device=self._device)
        self._steps: list[Callable[[], object]] = []  # graphs read and write their tensors by address
        self._replays: dict[int, Callable[[], object]] = {}
        # the largest first: the others then fit in the memory that it has freed
        for size in reversed(sizes):
            self._steps.append(self._step(size))
            self._replays[size] = record(self._steps[-1])

    def can_replay(self, batch: ForwardBatch) -> bool:
        """Whether there is a recorded step for ``batch``, which is in host memory."""
        num_pages = sum(len(table) for table in batch.attention[0].page_tables)
        return (
            only_decodes(batch)
            and batch.choice is None
            and len(batch.tokens) <= self._sizes[-1]
            and num_pages <= self._max_pages - self._sizes[-1]
        )

    def replay(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of a step in host memory that ``can_replay`` accepts, as ``Decoder`` does. They are valid
        until the next step."""
        num_rows = len(batch.tokens)
        size = bucket_for(num_rows, self._sizes)
        assert size is not None
        self._fill(padded(batch, size, self._scratch_page, self._page_size))
        self._replays[size]()
        logits = self._logits[:num_rows]
        if len(batch.logits_index) == num_rows:
            return logits
        return logits[batch.logits_index.to(self._device, non_blocking=True)]

    def _fill(self, batch: ForwardBatch) -> None:
        """Copy the inputs to the device at once. The pages come last, so that only the used part is copied."""
        (attention,) = batch.attention
        tables = PagedTables.on_cpu(attention.query_lens, attention.kv_lens, attention.page_tables, tile=1)
        inputs = [batch.tokens, batch.positions, attention.slots, tables.kv_lens, tables.page_starts, tables.pages]
        on_host = packed(inputs, pin_memory=self._device.type == "cuda")
        self._buffer[: len(on_host)].copy_(on_host, non_blocking=True)

    def _inputs(self, size: int) -> list[Tensor]:
        """Return uninitialized inputs of a step of ``size`` rows with the largest number of pages: only shapes and
        dtypes matter."""
        tokens, slots, kv_lens, page_starts = (torch.empty(size, dtype=torch.int64) for _ in range(4))
        positions = torch.empty(3, size, dtype=torch.float64)
        return [tokens, positions, slots, kv_lens, page_starts, torch.empty(self._max_pages, dtype=torch.int64)]

    def _step(self, size: int) -> Callable[[], object]:
        """Return a step over this bucket's part of the buffer, filled with padding."""
        tokens, positions, slots, kv_lens, page_starts, pages = unpacked(self._buffer, self._inputs(size))
        rows = torch.arange(size, device=self._device)
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        width = self._decoder.config.hidden_size * (1 + self._decoder.config.num_deepstack_layers)
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            media_index=nothing,
            media_embeddings=torch.empty(0, width, dtype=self._decoder.dtype, device=self._device),
            logits_index=rows,
            attention=[
                AttentionBatch(
                    query_lens=[1] * size,
                    kv_lens=[1] * size,  # read by the host; kernels read those in the tables
                    page_tables=[nothing] * size,
                    slots=slots,
                    tables=PagedTables(
                        query_starts=rows,
                        query_lens=torch.ones_like(rows),
                        kv_lens=kv_lens,
                        page_starts=page_starts,
                        decodes=rows,
                        tiles=nothing.reshape(0, 2),
                        pages=pages,
                    ),
                )
            ],
        )
        self._fill(padded(_no_rows(batch), size, self._scratch_page, self._page_size))
        return lambda: self._logits[:size].copy_(self._decoder(batch, self._cache))


def record_graphs(decoder: Decoder, cache: KVTensors, max_num_seqs: int, context_length: int) -> DecodeGraphs | None:
    """Record graphs for a decoder on a GPU, up to ``max_num_seqs`` rows. Returns None, and logs why, for a decoder that
    can't be recorded. Raises StartError if memory runs out."""
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
    began, before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    sizes = bucket_sizes(max_num_seqs)
    max_pages = max_num_seqs * pages_needed(context_length, cache.page_size)
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            graphs = DecodeGraphs(decoder, cache, sizes, max_pages, _recorder())
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise StartError(
            "no memory is left for CUDA graphs: give --kv-cache-memory less, lower --max-num-seqs, or use "
            "--no-cuda-graphs"
        ) from error
    took = max(0, before - torch.cuda.mem_get_info(device)[0])
    log.info(
        "recorded %d CUDA graphs, up to batch %d, in %.1f s and %s",
        len(sizes),
        sizes[-1],
        time.monotonic() - began,
        gib(took),
    )
    return graphs


def _recorder() -> Record:
    """Return a function that records graphs. They share a memory pool, since only one runs at a time, and a stream,
    since cuBLAS keeps a workspace for each. Other threads may use the GPU meanwhile: NCCL's watchdog does."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(step: Callable[[], object]) -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
        return graph.replay

    return record


def _no_rows(batch: ForwardBatch) -> ForwardBatch:
    """Return a step without tokens, in host memory."""
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        none,
        torch.empty(3, 0, dtype=torch.float64),
        none,
        batch.media_embeddings,
        none,
        [AttentionBatch([], [], [], none)],
    )
