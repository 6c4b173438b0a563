"""Layers with a sliding window, or with attention in chunks, release pages while a request goes on, and answers stay
those of transformers.

The window is 16 tokens, in every second layer; prompts and answers are up to 20 times as long.
"""

from dataclasses import replace

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.backbones import BACKBONES
from tests.support.disturbed import check_lost_instances, check_preemption, served
from tests.support.harness import FLOAT32, Running
from tests.support.image_cases import Case
from tests.support.tiny import make_tiny
from triptych.config import RankSizes
from triptych.engine.cache_manager import most_pages
from triptych.layers.cache_spec import ChunkWindow, first_sent
from triptych.messages.stats import InstanceStats

LAYERS, WINDOW, PAGE = ["sliding_attention", "full_attention"] * 2, 16, FLOAT32.page_size
START = "The quick brown fox jumps over the lazy dog. " * 3
CASES = [
    Case("long", (START + "Pack my box with five dozen liquor jugs. " * 4 + "What?",)),
    Case("with the same beginning", (START + "How vexingly quick daft zebras jump! Who?",)),
    Case("short", ("Why?",)),
]
REQUESTS = [case.messages for case in CASES]
SMALL = replace(FLOAT32, max_num_seqs=1, max_num_batched_tokens=64)
"""For one request at a time; layers with a window have as many pages as it needs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    config = {"use_sliding_window": True, "layer_types": LAYERS, "sliding_window": WINDOW}
    made = Model(make_tiny(tmp_path_factory.mktemp("windows"), "qwen2", config=config, seed=4), CASES)
    assert len(made.prompts[0].tokens) > 18 * WINDOW
    return made


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 512])
def test_chunks(model: Model, chunk: int) -> None:
    async def ask(service: Running) -> None:
        assert await service.answers(REQUESTS) == model.answers

    served(model, "1PD", replace(FLOAT32, max_num_batched_tokens=chunk), ask)


@pytest.mark.slow
def test_two_ranks(model: Model) -> None:
    async def ask(service: Running) -> None:
        assert await service.answers(REQUESTS) == model.answers

    served(model, "1PD", replace(FLOAT32, tensor_parallel_size=RankSizes(2), max_num_batched_tokens=64), ask)


@pytest.mark.parametrize("blocks", [1, 1024])
def test_decode_receives_only_what_it_reads(model: Model, blocks: int) -> None:
    """Also through a receive pool of one block, and prefill has no more pages than one prompt needs."""

    async def ask(service: Running) -> None:
        assert await service.answers(REQUESTS) == model.answers
        _, decode = service.engine_loops()
        tokens = sum(2 * len(prompt.tokens) + 2 * (WINDOW - 1) for prompt in model.prompts)
        assert decode.incoming.receiver.counters.rows == 2 * tokens, "a key and a value each"

    engine = replace(SMALL, max_num_seqs=2, kv_receive_blocks=blocks, receive_block_rows=8)
    served(model, "1P1D", engine, ask)


def test_prefixes_are_found_until_a_window_is_evicted(model: Model) -> None:
    """Without its last pages in the layers with a window, a prefix is of no use."""

    async def ask(service: Running) -> None:
        (loop,) = service.engine_loops()
        pools, hits = loop.scheduler.cache.pools, []
        assert [pool.num_pages for pool in pools] == [256, most_pages(WINDOW, PAGE, 64)]
        loop.add_stats(stats := InstanceStats())
        assert stats.language is not None
        assert {one.layers: one.pages for one in stats.language.kv_cache} == {
            "full": pools[0].num_pages,
            f"window {WINDOW}": pools[1].num_pages,
        }
        for case in (0, 0, 1, 1, 2, 0):
            before = loop.scheduler.num_prefix_hits
            assert await service.answer(REQUESTS[case]) == model.answers[case]
            hits.append(loop.scheduler.num_prefix_hits - before)
        cold, warm, other, other_warm, _, evicted = hits
        assert (cold, other, evicted) == (0, 0, 0)
        assert warm == (len(model.prompts[0].tokens) - 1) // PAGE * PAGE
        assert other_warm == (len(model.prompts[1].tokens) - 1) // PAGE * PAGE
        assert pools[0].num_cached > 30, "the other layers' pages are there"

    served(model, "1PD", SMALL, ask)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Attends in chunks in all of four layers but one, to which the 32 tokens of an answer add more than two."""
    return Model(make_tiny(tmp_path_factory.mktemp("chunks"), BACKBONES["llama4"], seed=4), CASES)


CHUNK = ChunkWindow(BACKBONES["llama4"].config["attention_chunk_size"])


def test_finished_chunks_are_released(chunked: Model) -> None:
    async def ask(service: Running) -> None:
        (loop,) = service.engine_loops()
        pools, hits = loop.scheduler.cache.pools, []
        assert [pool.num_pages for pool in pools] == [256, most_pages(CHUNK, PAGE, 64)] == [256, 17]
        for case in (0, 0, 1):
            before = loop.scheduler.num_prefix_hits
            assert await service.answer(REQUESTS[case]) == chunked.answers[case]
            hits.append(loop.scheduler.num_prefix_hits - before)
        assert hits[:2] == [0, (len(chunked.prompts[0].tokens) - 1) // PAGE * PAGE]

    assert len(chunked.prompts[0].tokens) > 17 * PAGE
    served(chunked, "1PD", SMALL, ask)


def test_decode_receives_only_an_unfinished_chunk(chunked: Model) -> None:
    """Through a receive pool of one block."""

    async def ask(service: Running) -> None:
        assert await service.answers(REQUESTS) == chunked.answers
        _, decode = service.engine_loops()
        lengths = [len(prompt.tokens) for prompt in chunked.prompts]
        tokens = sum(length + 3 * (length - first_sent(CHUNK, 0, length)) for length in lengths)
        assert decode.incoming.receiver.counters.rows == 2 * tokens, "a key and a value each"

    engine = replace(SMALL, max_num_seqs=2, kv_receive_blocks=1, receive_block_rows=8)
    served(chunked, "1P1D", engine, ask)


@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_preempted_requests_start_again(model: Model, topology: str) -> None:
    check_preemption(model, topology, REQUESTS)


@pytest.mark.slow
def test_lost_instances_are_replaced(model: Model) -> None:
    check_lost_instances(model, REQUESTS)
