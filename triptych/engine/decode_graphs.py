"""Decode steps as CUDA graphs, one for each bucket of batch sizes: what a step launches is recorded once, and replayed
over inputs that stay at the same addresses."""

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
"""Runs before a recording: Triton compiles in the first, and cuBLAS makes its choices."""

Record = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes a step that reads and writes fixed tensors; returns what runs it again."""


class DecodeGraphs:
    """The recorded steps. ``cache``'s last page is scratch: padding rows write there."""

    def __init__(self, decoder: Decoder, cache: KVTensors, sizes: list[int], max_pages: int, record: Record) -> None:
        """Records a step for each of ``sizes``, ascending. ``max_pages``: the most that the page tables of a step's
        requests have together."""
        self._decoder = decoder
        self._cache = cache
        self._sizes = sizes
        self._max_pages = max_pages + sizes[-1]  # a padding row has one
        num_pages, self._page_size = cache.keys[0].shape[:2]
        self._scratch_page = num_pages - 1
        self._device = cache.keys[0].device
        largest = self._inputs(sizes[-1])
        self._buffer = torch.zeros(len(packed(largest)), dtype=torch.uint8, device=self._device)
        self._logits = torch.empty(sizes[-1], decoder.num_logits, device=self._device)
        # the largest first: the others then find room in the memory that it has freed
        self._replays = {size: record(self._step(size)) for size in reversed(sizes)}

    def suits(self, batch: ForwardBatch) -> bool:
        """Whether a step, in host memory, can be replayed."""
        num_pages = sum(len(table) for table in batch.attention.page_tables)
        return (
            only_decodes(batch)
            and len(batch.tokens) <= self._sizes[-1]
            and num_pages <= self._max_pages - self._sizes[-1]
        )

    def replay(self, batch: ForwardBatch) -> Tensor:
        """The logits of a step in host memory that suits, as ``Decoder`` returns them. They hold until the next one."""
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
        """One copy: the pages come last, so that those that there are suffice."""
        attention = batch.attention
        tables = PagedTables.on_cpu(attention.query_lens, attention.kv_lens, attention.page_tables, tile=1)
        inputs = [batch.tokens, batch.positions, attention.slots, tables.kv_lens, tables.page_starts, tables.pages]
        on_host = packed(inputs, pin_memory=self._device.type == "cuda")
        self._buffer[: len(on_host)].copy_(on_host, non_blocking=True)

    def _inputs(self, size: int) -> list[Tensor]:
        """Of a step of ``size`` rows, with as many pages as there may be: shapes only."""
        tokens, slots, kv_lens, page_starts = (torch.empty(size, dtype=torch.int64) for _ in range(4))
        positions = torch.empty(3, size, dtype=torch.float64)
        return [tokens, positions, slots, kv_lens, page_starts, torch.empty(self._max_pages, dtype=torch.int64)]

    def _step(self, size: int) -> Callable[[], object]:
        """A step over this bucket's part of the buffer, which holds padding only."""
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
            attention=AttentionBatch(
                query_lens=[1] * size,
                kv_lens=[1] * size,  # the host's; kernels read those in the tables
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
            ),
        )
        self._fill(padded(_no_rows(batch), size, self._scratch_page, self._page_size))
        return lambda: self._logits[:size].copy_(self._decoder(batch, self._cache))


def record_graphs(decoder: Decoder, cache: KVTensors, max_num_seqs: int, context_length: int) -> DecodeGraphs | None:
    """The graphs of a decoder on a GPU, up to ``max_num_seqs`` rows; None, with a line in the log, for one that can't
    be recorded. Raises StartError when there is no memory for them."""
    if decoder.config.moe is not None:
        log.info("no CUDA graphs: which experts run is decided on the host")
        return None
    device = cache.keys[0].device
    began, before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    sizes = bucket_sizes(max_num_seqs)
    max_pages = max_num_seqs * pages_needed(context_length, cache.keys[0].shape[1])
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
    """Records into one pool of memory, since only one graph runs at a time, and on one stream, since cuBLAS keeps a
    workspace for each. Other threads may go on using the GPU meanwhile: NCCL's looks after the steps before."""
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
    """A step of no tokens, in host memory."""
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        none,
        torch.empty(3, 0, dtype=torch.float64),
        none,
        batch.media_embeddings,
        none,
        AttentionBatch([], [], [], none),
    )
