"""Recording of work on a GPU as CUDA graphs, whose launches are replayed at once."""

from collections.abc import Callable

import torch

WARM_UPS = 2
"""Runs before a recording: Triton compiles in the first, and cuBLAS selects its algorithms."""

Record = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes work that reads and writes fixed tensors; returns a function that replays it."""


def recorder(device: torch.device) -> Record:
    """Return a function that records graphs on a GPU. They share a memory pool, so only one may run at a time, and a
    stream, since cuBLAS keeps a workspace for each. A recording waits for all work on the GPU. Other threads may use
    the GPU meanwhile: NCCL's watchdog does. What the function returns keeps the graph's memory. It raises
    torch.OutOfMemoryError if there is none, and RuntimeError for work that can't be recorded."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(work: Callable[[], object]) -> Callable[[], object]:
        usual = torch.cuda.current_stream(device)
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        usual.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        finally:
            torch.cuda.set_stream(usual)  # PyTorch leaves it out if the recording fails
        return graph.replay

    return record
