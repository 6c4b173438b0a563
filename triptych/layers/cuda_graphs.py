"""Recording of work on a GPU as CUDA graphs, whose launches are replayed at once."""

from collections.abc import Callable

import torch

WARM_UPS = 2
"""Runs before a recording: Triton compiles in the first, and cuBLAS selects its algorithms."""

Record = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes work that reads and writes fixed tensors; returns a function that replays it."""


def recorder() -> Record:
    """Return a function that records graphs on the current GPU. They share a memory pool, so only one may run at a
    time, and a stream, since cuBLAS keeps a workspace for each. Other threads may use the GPU meanwhile: NCCL's
    watchdog does. What the function returns keeps the graph's memory, and raises torch.OutOfMemoryError if there is
    none."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def record(work: Callable[[], object]) -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return record
