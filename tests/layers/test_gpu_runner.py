"""The GPU runner on a CPU: kernels in Triton's interpreter, and graphs that launch their steps again instead of
replaying them. ``tests/gpu`` does the same on a GPU."""

import dataclasses
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.support.generation import PAGE_SIZE, Generating, prompts, request
from triptych.engine.buckets import bucket_for, decode_sizes, mixed_sizes
from triptych.engine.page_tables import PageTable
from triptych.engine.runner import MediaEmbeddings, Runner
from triptych.engine.scheduler import Chunk
from triptych.engine.step_broadcast import send_step
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.compiled import paged_attention
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.decoder import AfterLayer, Decoder, ForwardBatch
from triptych.layers.parallel import Group
from triptych.layers.specs import AttentionSpec
from triptych.messages.work import SamplingParams

pytest.importorskip("triton", reason="Triton isn't installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs these on it", allow_module_level=True)

from tests.support.rehearsal import (
    CPU,
    MAX_NUM_SEQS,
    MAX_PAGES,
    NUM_PAGES,
    Recorder,
    cache_of,
    forward_of,
    join,
    load,
    load_for_gpu,
)
from triptych.engine.gpu_runner import GpuRunner
from triptych.engine.step_graphs import GraphSizes, StepGraphs, record_graphs

POOL = 10
LENGTHS = [7, 13, 1, 9, 20, 5, 2]
SAMPLINGS = [
    SamplingParams(max_tokens=4 + index % 4, temperature=index % 3 * 0.5, seed=index) for index in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def plain(checkpoint_folder: Callable[..., Path]) -> Decoder:
    return load(checkpoint_folder(), CpuAttention(paged_attention()))


@pytest.fixture(scope="module")
def expected(plain: Decoder) -> list[list[int]]:
    generating = Generating(Runner(plain, cache_of(plain), PAGE_SIZE), plain, POOL)
    return generating.answers(prompts(plain.config.vocab_size, LENGTHS), SAMPLINGS)


@pytest.mark.parametrize("with_graphs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_answers_are_those_of_the_cpu(
    checkpoint_folder: Callable[..., Path], expected: list[list[int]], with_graphs: bool
) -> None:
    """Chunks of prompts with decodes, media embeddings, preemptions, more requests than fit; batches of 1 to 5."""
    decoder, recorder = load_for_gpu(checkpoint_folder()), Recorder()
    cache = cache_of(decoder)
    forward = forward_of(decoder, cache, recorder if with_graphs else None)
    generating = Generating(GpuRunner(forward, cache, PAGE_SIZE, CPU), decoder, POOL)
    assert generating.answers(prompts(decoder.config.vocab_size, LENGTHS), SAMPLINGS) == expected
    assert generating.num_preemptions > 0
    assert len(generating.batches) > 2
    assert recorder.num_recorded == (5 if with_graphs else 0)
    assert recorder.num_replayed == (generating.num_steps if with_graphs else 0)


def test_a_prompts_last_token_is_not_generated(plain: Decoder) -> None:
    """Also if it is alone in its chunk. Two generated tokens are computed together after a preemption."""
    one = request("one", [5, 6, 7], SAMPLINGS[0])
    one.tokens += [8, 9]
    one.tables = [PageTable(pages=[0, 1])]
    chunks = [Chunk(one, 0, 2), Chunk(one, 2, 1), Chunk(one, 3, 1), Chunk(one, 3, 2)]
    media = MediaEmbeddings(torch.empty(0, dtype=torch.int64), torch.empty(0, plain.config.hidden_size))
    cache = cache_of(plain)
    [attention] = Runner(plain, cache, PAGE_SIZE).batch(chunks, media).attention
    assert attention.generated == [False, False, True, False]
    on_gpu = GpuRunner(forward_of(plain, cache, None), cache, PAGE_SIZE, CPU)
    assert on_gpu.batch(chunks, media).attention[0].generated is None


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5, 12])
def test_prompt_logprobs_are_those_of_the_cpu(
    checkpoint_folder: Callable[..., Path], plain: Decoder, budget: int
) -> None:
    """In chunks and single tokens, together with replayed decodes."""
    asking = [replace(one, prompt_logprobs=index % 3) for index, one in enumerate(SAMPLINGS)]
    inputs = prompts(plain.config.vocab_size, LENGTHS), asking
    decoder, recorder = load_for_gpu(checkpoint_folder()), Recorder()
    cache = cache_of(decoder)
    on_gpu = GpuRunner(forward_of(decoder, cache, recorder), cache, PAGE_SIZE, CPU)
    on_cpu = Runner(plain, cache_of(plain), PAGE_SIZE)
    one, other = Generating(on_gpu, decoder, POOL, budget=budget), Generating(on_cpu, plain, POOL)
    assert one.answers(*inputs) == other.answers(*inputs)
    assert recorder.num_replayed > 0
    for index, length in enumerate(LENGTHS):
        mine, expected = one.scored[index], other.scored[index]
        if length == 1:
            assert mine is expected is None
            continue
        assert mine is not None
        assert expected is not None
        assert len(mine.ranks) == 4 * (length - 1)
        assert mine.tokens == expected.tokens
        logprobs = [torch.frombuffer(bytearray(scored.logprobs), dtype=torch.float32) for scored in (mine, expected)]
        torch.testing.assert_close(*logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_ranks_replay_the_same_steps(checkpoint_folder: Callable[..., Path], plain: Decoder) -> None:
    """Two ranks over gloo, each with its graphs; rank 0 samples."""
    folder, recorder, few = checkpoint_folder(), Recorder(), 3
    inputs = prompts(plain.config.vocab_size, LENGTHS[:few]), SAMPLINGS[:few]
    expected = Generating(Runner(plain, cache_of(plain), PAGE_SIZE), plain, POOL).answers(*inputs)
    with other_rank(folder) as group:
        decoder = load_for_gpu(folder, group)
        cache = cache_of(decoder)
        forward = forward_of(decoder, cache, recorder)

        def lead(batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None) -> Tensor:
            send_step(batch, group, decoder.dtype)
            return forward(batch, cache, after_layer)

        generating = Generating(GpuRunner(lead, cache, PAGE_SIZE, CPU), decoder, POOL)
        assert generating.answers(*inputs) == expected
    assert len(generating.batches) > 1
    assert recorder.num_replayed == generating.num_steps > 0


@contextmanager
def other_rank(folder: Path) -> Iterator[Group]:
    """Rank 0 of a group of two, whose rank 1 is a subprocess."""
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"
    process = subprocess.Popen([sys.executable, "-m", "tests.support.rehearsal", path, str(folder), "1", "2"])
    try:
        yield join(path, 0, 2)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_padding_changes_no_result(checkpoint_folder: Callable[..., Path], decodes: bool, size: int) -> None:
    """The logits and all pages except the scratch page stay the same."""
    decoder = load_for_gpu(checkpoint_folder())

    def compute(recorder: Recorder | None) -> tuple[Tensor, KVTensors]:
        _, cache, batch = three_decodes(decoder)
        batch = dataclasses.replace(batch if decodes else with_media(decoder, batch), num_largest=())
        if recorder is None:
            return decoder(batch, cache), cache
        sizes = GraphSizes([size], [size + 1], MAX_NUM_SEQS, MAX_PAGES)
        return StepGraphs(decoder, cache, sizes, recorder).replay(batch), cache

    recorder = Recorder()
    with torch.inference_mode():
        (logits, cache), (padded_logits, padded_cache) = compute(None), compute(recorder)
    assert recorder.num_replayed == 1
    torch.testing.assert_close(padded_logits, logits, atol=1e-5, rtol=1e-5)
    for one, other in zip(cache.tensors, padded_cache.tensors, strict=True):
        torch.testing.assert_close(one[:NUM_PAGES], other[:NUM_PAGES], atol=1e-5, rtol=1e-5, equal_nan=True)
        assert one[NUM_PAGES].isnan().all()


def with_media(decoder: Decoder, batch: ForwardBatch) -> ForwardBatch:
    """The same step, whose last token is a media token."""
    width = decoder.config.hidden_size * (1 + decoder.config.num_deepstack_layers)
    rows = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(batch, media_index=torch.tensor([2]), media_embeddings=rows)


def three_decodes(decoder: Decoder) -> tuple[Runner, KVTensors, ForwardBatch]:
    """Three requests whose prompts are computed, and the step of their last tokens."""
    cache = cache_of(decoder)
    runner = Runner(decoder, cache, PAGE_SIZE)
    requests = [
        request(str(index), tokens, SAMPLINGS[0])
        for index, tokens in enumerate(prompts(decoder.config.vocab_size, [6, 3, 9]))
    ]
    for one, pages in zip(requests, ([0, 7], [3], [19, 5, 1]), strict=True):
        one.tables = [PageTable(pages=pages)]
    width = decoder.config.hidden_size * (1 + decoder.config.num_deepstack_layers)
    media = MediaEmbeddings(torch.empty(0, dtype=torch.int64), torch.empty(0, width))
    runner.run(runner.batch([Chunk(one, 0, len(one.tokens) - 1) for one in requests], media), [])
    return runner, cache, runner.batch([Chunk(one, len(one.tokens) - 1, 1) for one in requests], media)


@pytest.mark.parametrize(
    ("sizes", "can_replay"),
    [
        (GraphSizes([1, 4], [4], 4, 6), (True, True)),
        (GraphSizes([1, 2], [4], 4, 6), (False, True)),
        (GraphSizes([1, 4], [2], 4, 6), (True, False)),
        (GraphSizes([1, 4], [4], 4, 5), (False, False)),
        (GraphSizes([1, 4], [4], 2, 6), (False, False)),
    ],
)
def test_graphs_suit_only_steps_that_fit(
    checkpoint_folder: Callable[..., Path], sizes: GraphSizes, can_replay: tuple[bool, bool]
) -> None:
    """Of decodes, and with a media token."""
    decoder = load_for_gpu(checkpoint_folder())
    _, cache, batch = three_decodes(decoder)
    with torch.inference_mode():
        graphs = StepGraphs(decoder, cache, sizes, lambda step: step)
    media = with_media(decoder, batch)
    assert (graphs.can_replay(batch), graphs.can_replay(media)) == can_replay
    (attention,) = batch.attention
    ends = dataclasses.replace(attention, ends=torch.tensor(attention.kv_lens))
    assert not graphs.can_replay(dataclasses.replace(media, attention=[ends]))


@pytest.mark.parametrize("with_graphs", [False, True])
def test_layers_are_reported_also_when_a_step_is_replayed(
    checkpoint_folder: Callable[..., Path], with_graphs: bool
) -> None:
    """A prefill instance waits for them with a prompt's last token, too."""
    decoder, recorder, layers = load_for_gpu(checkpoint_folder()), Recorder(), list[int]()
    cache = cache_of(decoder)
    forward = forward_of(decoder, cache, recorder if with_graphs else None)
    one = request("0", [1], SAMPLINGS[0])
    one.tables = [PageTable(pages=[3])]
    width = decoder.config.hidden_size * (1 + decoder.config.num_deepstack_layers)
    media = MediaEmbeddings(torch.empty(0, dtype=torch.int64), torch.empty(0, width))
    runner = GpuRunner(forward, cache, PAGE_SIZE, CPU)
    runner.run(runner.batch([Chunk(one, 0, 1)], media), [], after_layer=layers.append)
    assert layers == list(range(len(cache.layers)))
    assert recorder.num_replayed == with_graphs


def test_the_tensors_of_recorded_steps_are_kept(checkpoint_folder: Callable[..., Path]) -> None:
    """A graph holds addresses, no tensors."""
    decoder = load_for_gpu(checkpoint_folder())
    steps: list[weakref.ref[Callable[[], object]]] = []

    def record(step: Callable[[], object]) -> Callable[[], object]:
        steps.append(weakref.ref(step))
        return lambda: None

    with torch.inference_mode():
        graphs = StepGraphs(decoder, cache_of(decoder), GraphSizes([1, 4], [8], 4, 6), record)
    gc.collect()
    assert graphs
    assert [step() is not None for step in steps] == [True, True, True]


def test_layers_with_page_tables_of_their_own_are_not_recorded(plain: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, (first, *others) = cache_of(plain), plain.config.layers
    assert isinstance(first.mixer, AttentionSpec)
    windowed = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, window=5))
    monkeypatch.setattr(plain, "config", dataclasses.replace(plain.config, layers=(windowed, *others)))
    assert record_graphs(plain, cache, 2, 8, 64) is None


def test_prepared_inputs_are_used_only_while_valid(plain: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GpuRunner(plain, cache_of(plain), PAGE_SIZE, CPU)
    one = request("0", [1, 2, 3, 4, 5], SAMPLINGS[0])
    one.tables = [PageTable(pages=[3, 7])]
    runner.prepare([Chunk(one, 2, 3)])
    one.tokens.append(6)
    prepared = runner.chunk_inputs(Chunk(one, 5, 1))
    expected = Runner(plain, runner.cache, PAGE_SIZE).chunk_inputs(Chunk(one, 5, 1))
    assert prepared.positions == expected.positions == [[5]] * 3
    assert prepared.pages == expected.pages == [[3, 7]]
    assert prepared.slots == expected.slots == [[7 * 4 + 1]]
    assert runner.chunk_inputs(Chunk(one, 5, 1)) is prepared
    assert runner.chunk_inputs(Chunk(one, 4, 1)) is not prepared
    one.tables = [PageTable(pages=[8, 9])]  # preempted and restarted
    assert runner.chunk_inputs(Chunk(one, 5, 1)).slots == [[9 * 4 + 1]]
    one.tables = [PageTable(pages=[3])]
    runner.prepare([Chunk(one, 3, 3)])  # its next token is in the second page, which isn't allocated yet
    assert runner.num_prepared == 0


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 24, 32]), (9, [1, 2, 4, 8, 9])],
)
def test_buckets(most: int, sizes: list[int]) -> None:
    assert decode_sizes(most) == sizes
    found = [bucket_for(num_rows, sizes) for num_rows in range(1, most + 1)]
    assert all(size is not None and size >= num_rows for num_rows, size in enumerate(found, 1))
    assert bucket_for(most + 1, sizes) is None


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, []),
        (2, [2]),
        (64, [64]),
        (100, [64, 96, 100]),
        (512, [64, 96, 128, 192, 256, 384, 512]),
        (10_000, [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]),
    ],
)
def test_sizes_of_mixed_steps(most: int, sizes: list[int]) -> None:
    assert mixed_sizes(most) == sizes
