"""A GPU's steps on a CPU: kernels in Triton's interpreter, and graphs that launch their steps again instead of being
replayed. As a program, a rank other than 0 of a group that computes so."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.generation import PAGE_SIZE
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.engine.buckets import decode_sizes, mixed_sizes
from triptych.engine.gpu_forward import GpuForward
from triptych.engine.step_broadcast import receive_step
from triptych.engine.step_graphs import GraphSizes, StepGraphs
from triptych.layers.attention.base import AttentionBackend, KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.attention.triton_backend import TritonAttention
from triptych.layers.decoder import Decoder
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.parallel import SINGLE_RANK, Group, ProcessGroup, ready_key, rendezvous
from triptych.layers.weights import DecoderKeys
from triptych.models.registry import family_of, resolve

CPU = torch.device("cpu")
NUM_PAGES = 20
MAX_NUM_SEQS, MAX_PAGES, BUDGET = 5, 60, 12


def load(folder: Path, backend: AttentionBackend, group: Group = SINGLE_RANK) -> Decoder:
    checkpoint, config = Checkpoint(folder), load_config(folder)
    adapter = resolve(family_of(config).adapter)(config)
    keys = DecoderKeys("model.language_model.", "lm_head.weight")
    weights = WEIGHT_FORMATS["float32"]
    return Decoder.load(adapter.decoder_config, checkpoint, keys, weights, CPU, backend=backend, group=group)


def load_for_gpu(folder: Path, group: Group = SINGLE_RANK) -> Decoder:
    return load(folder, TritonAttention(num_processors=2), group)


def cache_of(decoder: Decoder) -> KVTensors:
    """Filled with NaN, so that whatever reads what it shouldn't says so."""
    specs = decoder.config.cache_specs(cache_format(torch.float32))
    cache = KVTensors.allocate(specs, [NUM_PAGES + 1], PAGE_SIZE, CPU)
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    return cache


class Recorder:
    """Launches a recorded step again, and counts."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, step: Callable[[], object]) -> Callable[[], object]:
        self.num_recorded += 1
        step()

        def replay() -> None:
            self.num_replayed += 1
            step()

        return replay


def forward_of(decoder: Decoder, cache: KVTensors, recorder: Recorder | None) -> GpuForward:
    """With graphs, if there is a recorder."""
    with torch.inference_mode():
        sizes = GraphSizes(decode_sizes(MAX_NUM_SEQS), mixed_sizes(BUDGET), MAX_NUM_SEQS, MAX_PAGES)
        graphs = StepGraphs(decoder, cache, sizes, recorder) if recorder else None
    return GpuForward(decoder, CPU, graphs)


def join(path: str, rank: int, size: int) -> ProcessGroup:
    """A rank's end of the group that meets in the file ``path``, once all are there."""
    store = rendezvous(path, size)
    store.set(ready_key(rank), "")
    store.wait([ready_key(other) for other in range(size)])
    return ProcessGroup(store, rank, size, CPU)


def run_rank(path: str, folder: str, rank: int, size: int) -> None:
    """Computes steps until rank 0 is gone."""
    torch.set_num_threads(1)
    group = join(path, rank, size)
    decoder = load_for_gpu(Path(folder), group)
    cache = cache_of(decoder)
    forward = forward_of(decoder, cache, Recorder())
    width = decoder.config.hidden_size * (1 + decoder.config.num_deepstack_layers)
    with torch.inference_mode():
        while True:
            forward(receive_step(group, width, decoder.dtype), cache)


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
