"""Runs steps on a GPU, and prepares the next step while one runs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from triptych.engine.page_tables import PageTables
from triptych.engine.request import Request
from triptych.engine.runner import ChunkInputs, Forward, Runner
from triptych.engine.scheduler import Chunk
from triptych.engine.state_records import StateRecords
from triptych.layers.attention.base import KVTensors


@dataclass(frozen=True)
class _Prepared:
    """Inputs of a request's next token, for the pages that it had."""

    request: Request
    start: int
    tables: PageTables
    inputs: ChunkInputs


class GpuRunner(Runner):
    """``Runner`` for a decoder on ``device``. ``run`` launches the forward pass, prepares sampling meanwhile, and
    synchronizes once, for the sampled tokens."""

    shares_cores = False

    def __init__(
        self,
        forward: Forward,
        cache: KVTensors,
        page_size: int,
        device: torch.device,
        states: StateRecords | None = None,
    ) -> None:
        """``forward``: a ``GpuForward``, which takes steps in host memory."""
        super().__init__(forward, cache, page_size, states)
        self._device = device
        self._prepared: dict[int, _Prepared] = {}

    @property
    def num_prepared(self) -> int:
        """Number of requests whose next inputs are prepared."""
        return len(self._prepared)

    def generated(self, chunks: Sequence[Chunk]) -> None:
        """Kernels and graphs go by the number of new tokens alone: on GPUs, products depend on the batch anyway."""

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Prepare the inputs of each sampling request's next token, which don't depend on that token, unless it needs a
        new page."""
        self._prepared = {}
        for chunk in chunks:
            following = Chunk(chunk.request, chunk.start + chunk.length, 1)
            tables = [table.copy() for table in chunk.request.tables]
            ends = [table.end * self._page_size for table in self.page_tables(chunk.request)]
            if chunk.samples and all(following.start < end for end in ends):
                inputs = super().chunk_inputs(following)
                self._prepared[id(chunk.request)] = _Prepared(chunk.request, following.start, tables, inputs)

    def _device_context(self) -> AbstractContextManager[object]:
        # Triton launches on the thread's current device; -1 leaves it as it is
        return torch.cuda.device(-1 if self._device.index is None else self._device.index)

    def chunk_inputs(self, chunk: Chunk) -> ChunkInputs:
        request, prepared = chunk.request, self._prepared.get(id(chunk.request))
        if (
            prepared is not None
            and prepared.request is request
            and (prepared.start, 1) == (chunk.start, chunk.length)
            and prepared.tables == request.tables  # it may have been preempted and restarted since
        ):
            return prepared.inputs
        return super().chunk_inputs(chunk)
