"""Models whose layers keep state answer as transformers does, whatever is reused, preempted or lost."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.conftest import Model
from tests.support.backbones import BACKBONES
from tests.support.disturbed import LONG_TEXTS, START, check_lost_instances, check_preemption, served
from tests.support.harness import FLOAT32, Messages, Running
from tests.support.image_cases import CASES, Case, picture
from tests.support.tiny import make_tiny
from triptych.config import RankSizes
from triptych.engine.loop import EngineLoop
from triptych.layers.decoder import AfterLayer, ForwardBatch
from triptych.messages.stats import InstanceStats
from triptych.prompt.prompt import PromptBuilder

PAGE = FLOAT32.page_size
REQUESTS = [case.messages for case in LONG_TEXTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(make_tiny(tmp_path_factory.mktemp("states"), BACKBONES["qwen3_5"], seed=4), LONG_TEXTS)


async def hits(service: Running, messages: Messages, expected: list[int] | None = None) -> int:
    """Asks for an answer, and returns how many tokens of the prompt were found in the prefix cache."""
    scheduler = service.engine_loops()[0].scheduler
    before = scheduler.num_prefix_hits
    answer = await service.answer(messages, max_tokens=32 if expected else 8)
    assert expected is None or answer == expected
    return scheduler.num_prefix_hits - before


def whole(model: Model, case: int) -> int:
    """Tokens before a prompt's last one in whole pages."""
    return (len(model.prompts[case].tokens) - 1) // PAGE * PAGE


def test_prefixes_are_found_where_a_state_was_kept(model: Model) -> None:
    """At the end of a prompt, and every 64 tokens; without a snapshot, pages are of no use."""

    async def ask(service: Running) -> None:
        found = [await hits(service, REQUESTS[case], model.answers[case]) for case in (0, 0, 1, 1, 2, 2)]
        assert found[:2] == [0, whole(model, 0)]
        assert found[2] == len(START) // 64 * 64, "the last regular snapshot of the common beginning"
        assert found[3:] == [whole(model, 1), 0, whole(model, 2)]

    engine = replace(FLOAT32, max_num_batched_tokens=64, state_snapshot_interval=64, state_snapshots=6)
    served(model, "1PD", engine, ask)


def test_states_after_pictures_are_found_for_the_same_pictures(tmp_path: Path) -> None:
    """Snapshots within images and after them; a further image keeps what is before it."""
    first, second, other = picture(200, 150, 1), picture(96, 160, 2), picture(96, 160, 3)
    cases = [
        Case("one image", (first, "What is this?")),
        Case("two images", (first, second, "What differs?")),
        Case("another second one", (first, other, "What differs?")),
    ]
    shown = Model(make_tiny(tmp_path, "qwen3_5", seed=4), cases)
    rows = PromptBuilder(shown.folder).build(cases[0].messages).items[0].placement.rows

    async def ask(service: Running) -> None:
        found = [await hits(service, cases[case].messages, shown.answers[case]) for case in (0, 1, 2, 0, 1, 2)]
        assert found[0] == 0 and rows // PAGE * PAGE <= found[1] == found[2] < whole(shown, 0)
        assert found[3:] == [whole(shown, case) for case in range(3)]

    engine = replace(FLOAT32, max_num_batched_tokens=24, state_snapshot_interval=PAGE, state_snapshots=40)
    served(shown, "1E1PD", engine, ask)


def test_every_turn_of_a_conversation_finds_the_last_one(model: Model) -> None:
    async def ask(service: Running) -> None:
        turns: Messages = []
        last = 0
        for number in range(5):
            turns.append({"role": "user", "content": [{"type": "text", "text": f"Question {number}, of many? "}]})
            found = await hits(service, turns)
            assert found >= last, f"turn {number}"
            last = (len(service.frontend.api.prompt_builder.build(turns).tokens) - 1) // PAGE * PAGE
            turns.append({"role": "assistant", "content": [{"type": "text", "text": "Yes."}]})

    served(model, "1PD", replace(FLOAT32, state_snapshots=3), ask)


def test_snapshots_are_evicted_apart_from_pages(model: Model) -> None:
    async def ask(service: Running) -> None:
        (loop,) = service.engine_loops()
        found = [await hits(service, REQUESTS[case], model.answers[case]) for case in (0, 1, 0, 0)]
        assert found == [0, 0, 0, whole(model, 0)]
        loop.add_stats(stats := InstanceStats())
        assert stats.language is not None
        slots = stats.language.state_slots, stats.language.state_slots_used
        snapshots = stats.language.state_snapshots, stats.language.state_snapshots_cached
        assert (slots, snapshots) == ((FLOAT32.max_num_seqs, 0), (1, 1))

    served(model, "1PD", replace(FLOAT32, state_snapshots=1), ask)


def test_decode_reuses_pages_and_receives_the_state(model: Model) -> None:
    """Also with a single slot, and through a receive pool of one block."""

    async def ask(service: Running) -> None:
        _, decode = service.engine_loops()
        rows = [await rows_received(service, decode, case) for case in (0, 0)]
        assert rows[1] < rows[0] / 2, "decode has the first pages, and prefill a snapshot"
        assert await service.answers(REQUESTS) == model.answers

    async def rows_received(service: Running, decode: EngineLoop, case: int) -> int:
        counters = decode.incoming.receiver.counters
        before = counters.rows
        assert await service.answer(REQUESTS[case]) == model.answers[case]
        return counters.rows - before

    engine = replace(FLOAT32, max_num_seqs=1, max_num_batched_tokens=32, kv_receive_blocks=1, receive_block_rows=8)
    served(model, "1P1D", engine, ask)


@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_preempted_requests_start_again(model: Model, topology: str) -> None:
    check_preemption(model, topology, REQUESTS)


def test_lost_instances_are_replaced(model: Model) -> None:
    check_lost_instances(model, REQUESTS)


def fail_once(loop: EngineLoop, when: Callable[[ForwardBatch, list[int]], bool]) -> list[ForwardBatch]:
    """Have the first step of several requests fail for which ``when`` holds, given it and where its chunks start, after
    it has changed the states. Returns a list that the step is appended to."""
    failed: list[ForwardBatch] = []
    whole_step = loop.runner.logits

    def failing(batch: ForwardBatch, after_layer: AfterLayer | None) -> Tensor:
        logits = whole_step(batch, after_layer)
        assert batch.state is not None
        if len(batch.state.starts) > 1 and when(batch, batch.state.starts) and not failed:
            failed.append(batch)
            raise RuntimeError("after the states have changed")
        return logits

    loop.runner.logits = failing  # type: ignore[method-assign]
    return failed


def test_a_failed_step_is_computed_again_from_the_beginning(model: Model) -> None:
    """A step that has changed several states can't be repeated as it was."""

    async def ask(service: Running) -> None:
        (loop,) = service.engine_loops()
        failed = fail_once(loop, lambda batch, starts: min(starts) > 100)
        assert await service.answers(REQUESTS[:2]) == model.answers[:2]
        assert failed

    served(model, "1PD", replace(FLOAT32, max_num_batched_tokens=64), ask)


def test_pictures_of_a_failed_step_are_encoded_again(tmp_path: Path) -> None:
    """Their rows have left the receive pool for the step."""
    cases = [
        Case("first", (picture(200, 150, 1), "What is this?")),
        Case("second", (picture(96, 160, 2), "And what is this?")),
    ]
    shown = Model(make_tiny(tmp_path, "qwen3_5", seed=4), cases)

    async def ask(service: Running) -> None:
        (loop,) = service.engine_loops()
        failed = fail_once(loop, lambda batch, starts: min(starts) == 0 and len(batch.media_index) > 0)
        assert await service.answers([case.messages for case in cases]) == shown.answers
        assert failed

    served(shown, "1E1PD", FLOAT32, ask)


@pytest.mark.slow
def test_unequal_numbers_of_ranks(model: Model) -> None:
    """Which divide the convolution's channels differently."""

    async def ask(service: Running) -> None:
        assert await service.answers(2 * REQUESTS) == 2 * model.answers

    for sizes in ("P=2,D=1", "P=1,D=2"):
        engine = replace(FLOAT32, tensor_parallel_size=RankSizes.parse(sizes), max_num_batched_tokens=64)
        served(model, "1P1D", engine, ask)


@pytest.mark.slow
def test_every_turn_with_one_more_image_finds_the_last_one(tmp_path: Path) -> None:
    async def ask(service: Running) -> None:
        turns: Messages = []
        last = 0
        for number in range(4):
            turns += Case("", (picture(96 + 32 * number, 160, 30 + number), f"And number {number}?")).messages
            found = await hits(service, turns)
            assert found >= last, f"turn {number}"
            last = (len(service.frontend.api.prompt_builder.build(turns).tokens) - 1) // PAGE * PAGE
            turns.append({"role": "assistant", "content": [{"type": "text", "text": "Yes."}]})

    engine = replace(FLOAT32, max_num_batched_tokens=64, state_snapshots=3)
    served(Model(make_tiny(tmp_path, "qwen3_5", seed=4), []), "1E1PD", engine, ask)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_a_prompt_shorter_than_a_page(model: Model, topology: str) -> None:
    """Cold and, as far as there is something to find, warm; beside a prompt of several pages."""
    assert len(model.prompts[2].tokens) < 64 < len(model.prompts[0].tokens)

    async def ask(service: Running) -> None:
        assert [await hits(service, REQUESTS[2], model.answers[2]) for _ in range(2)] == [0, 0]
        assert await service.answers(2 * REQUESTS) == 2 * model.answers

    served(model, topology, replace(FLOAT32, page_size=64), ask)


@pytest.mark.slow
def test_a_large_image_again_with_one_snapshot_and_few_pages(tmp_path: Path) -> None:
    large = Model(make_tiny(tmp_path, "qwen3_5", seed=4), [case for case in CASES if case.name == "large image"])
    pages = len(large.prompts[0].tokens) + 32 + PAGE

    async def ask(service: Running) -> None:
        async with asyncio.timeout(60):
            found = [await hits(service, large.cases[0].messages, large.answers[0]) for _ in range(2)]
        assert found == [0, whole(large, 0)]

    engine = replace(FLOAT32, max_num_batched_tokens=24, state_snapshots=1, kv_cache_tokens=pages)
    served(large, "1E1PD", engine, ask)
