"""Steps on a GPU, with and without CUDA graphs, against the CPU's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import load_adapter
from tests.support.generation import PAGE_SIZE, Generating, prompts
from triptych.checkpoint.reader import Checkpoint
from triptych.engine.gpu_forward import GpuForward
from triptych.engine.gpu_runner import GpuRunner
from triptych.engine.runner import Runner
from triptych.engine.step_graphs import record_graphs
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.decoder import AfterLayer, Decoder, ForwardBatch
from triptych.layers.linear import CUDA_FORMATS, WEIGHT_FORMATS, WeightFormat
from triptych.messages.work import SamplingParams

CPU = torch.device("cpu")
POOL = 11
LENGTHS = [7, 13, 1, 9, 20, 5, 2]
SAMPLINGS = [
    SamplingParams(max_tokens=5 + index, temperature=index % 3 * 0.5, seed=index) for index in range(len(LENGTHS))
]


def load(folder: Path, weights: WeightFormat, device: torch.device) -> Decoder:
    return load_adapter(folder).load_decoder(Checkpoint(folder), weights, device)


def cache_of(decoder: Decoder, device: torch.device) -> KVTensors:
    """Make a cache filled with NaN, which reveals reads of unwritten slots."""
    specs = decoder.config.cache_specs(cache_format(decoder.dtype))
    cache = KVTensors.allocate(specs, [POOL + 1], PAGE_SIZE, device)
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    return cache


def answers(decoder: Decoder, device: torch.device, with_graphs: bool) -> list[list[int]]:
    cache = cache_of(decoder, device)
    graphs = record_graphs(decoder, cache, 5, 12, 64) if with_graphs else None
    runner = GpuRunner(GpuForward(decoder, device, graphs), cache, PAGE_SIZE, device)
    return Generating(runner, decoder, POOL).answers(prompts(decoder.config.vocab_size, LENGTHS), SAMPLINGS)


@pytest.mark.parametrize("moe", [False, True])
def test_answers_are_those_of_the_cpu(checkpoint_folder: Callable[..., Path], gpu: torch.device, moe: bool) -> None:
    """In fp32: chunked prompts with decodes, media, preemptions, more requests than fit. MoE has no graphs."""
    folder = checkpoint_folder(moe=moe)
    plain = load(folder, WEIGHT_FORMATS["float32"], CPU)
    generating = Generating(Runner(plain, cache_of(plain, CPU), PAGE_SIZE), plain, POOL)
    expected = generating.answers(prompts(plain.config.vocab_size, LENGTHS), SAMPLINGS)
    assert generating.num_preemptions > 0
    decoder = load(folder, CUDA_FORMATS["float32"], gpu)
    assert answers(decoder, gpu, with_graphs=False) == expected
    assert answers(decoder, gpu, with_graphs=True) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_run(checkpoint_folder: Callable[..., Path], gpu: torch.device, dtype: str) -> None:
    """Answers may differ from fp32's, and with the batch, but logits are never NaN, which would repeat token 0."""
    for with_graphs in (False, True):
        found = answers(load(checkpoint_folder(), CUDA_FORMATS[dtype], gpu), gpu, with_graphs)
        assert [len(answer) for answer in found] == [sampling.max_tokens for sampling in SAMPLINGS]
        assert len({token for answer in found for token in answer}) > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_step_has_the_logits_of_a_launched_one(
    checkpoint_folder: Callable[..., Path], gpu: torch.device, dtype: str
) -> None:
    decoder = load(checkpoint_folder(), CUDA_FORMATS[dtype], gpu)
    logits: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for with_graphs in logits:
        cache = cache_of(decoder, gpu)
        graphs = record_graphs(decoder, cache, 5, 12, 64) if with_graphs else None
        runner = _Keeping(GpuForward(decoder, gpu, graphs), cache, PAGE_SIZE, gpu)
        # greedy and of one length, so that both make the same steps as long as their logits are about the same
        greedy = [SamplingParams(max_tokens=4, temperature=0, logit_bias={3: 1000.0})] * 3
        Generating(runner, decoder, POOL).answers(prompts(decoder.config.vocab_size, [5, 3, 4]), greedy)
        logits[with_graphs] = runner.kept
    assert len(logits[True]) == len(logits[False])
    for one, other in zip(logits[True], logits[False], strict=True):
        tolerance = 1e-3 if dtype == "float32" else 0.5
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


class _Keeping(GpuRunner):
    """Records each step's logits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: list[torch.Tensor] = []

    def logits(self, batch: ForwardBatch, after_layer: AfterLayer | None) -> torch.Tensor:
        logits = super().logits(batch, after_layer)
        self.kept.append(logits.clone())
        return logits


def test_launching_a_step_does_not_synchronize(checkpoint_folder: Callable[..., Path], gpu: torch.device) -> None:
    """The forward pass of a mixed step, and of a replayed one, is launched while the GPU does something else."""
    decoder = load(checkpoint_folder(), CUDA_FORMATS["float32"], gpu)
    cache = cache_of(decoder, gpu)
    runner = GpuRunner(GpuForward(decoder, gpu, record_graphs(decoder, cache, 5, 12, 64)), cache, PAGE_SIZE, gpu)
    generating = Generating(runner, decoder, POOL)
    inputs = prompts(decoder.config.vocab_size, LENGTHS), SAMPLINGS
    generating.answers(*inputs)  # compiles
    launch = runner.logits

    def strict(batch: ForwardBatch, after_layer: AfterLayer | None) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch, after_layer)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.logits = strict  # type: ignore[method-assign]
    generating.answers(*inputs)
