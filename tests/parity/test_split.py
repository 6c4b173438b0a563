"""Prefill and decode in two instances: the same tokens as transformers, and as in one."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, Running, running, together
from tests.support.image_cases import CASES
from tests.support.stage_loops import decode_loops, kv_rows
from triptych.clock import SystemClock
from triptych.config import EngineConfig, TransferConfig
from triptych.errors import MediaNotServed
from triptych.messages.work import SamplingParams
from triptych.observe.requests import RequestRecord

REQUESTS = [case.messages for case in CASES]
TEXTS = [case.messages for case in CASES if not case.images]


def answered(
    model: Model, topology: str, engine: EngineConfig = FLOAT32, fabric: str = "auto", **sampling: Any
) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine, transfer=TransferConfig(fabric=fabric)) as service:
            answers = await service.answers(REQUESTS, **sampling)
            assert kv_rows(service) > 0
            return answers

    return asyncio.run(run())


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("topology", ["1E1P1D", pytest.param("1EP1D", marks=pytest.mark.slow)])
def test_prefill_chunks(model: Model, topology: str, chunk: int) -> None:
    assert answered(model, topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == model.answers


@pytest.mark.parametrize("block_rows", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in (8, 100))])
def test_kv_through_a_receive_pool_of_one_block(model: Model, block_rows: int) -> None:
    engine = replace(FLOAT32, kv_receive_blocks=1, receive_blocks=1, receive_block_rows=block_rows)
    short = [answer[:4] for answer in model.answers]
    assert answered(model, "1E1P1D", engine, max_tokens=4) == short


@pytest.mark.parametrize("fabric", ["nixl", "mooncake"])
def test_fabrics_that_cross_hosts(model: Model, fabric: str) -> None:
    assert answered(model, "1E1P1D", fabric=fabric) == model.answers


BROKEN = "drop=0.04,corrupt=0.04,half=0.04,delay=0.05,duplicate=0.05,reorder=0.1,seconds=0.02"


def test_writes_that_break_are_mended(model: Model) -> None:
    """Lost, garbled, half done, late, twice, in any order: each row is checked, and comes again until it is right."""

    async def run() -> tuple[list[list[int]], int]:
        small = replace(FLOAT32, kv_receive_blocks=8, receive_blocks=8, receive_block_rows=8)
        async with running(model.folder, "1E1P1D", small, transfer=TransferConfig(inject_faults=BROKEN)) as service:
            answers = await service.answers(REQUESTS, max_tokens=8)
            return answers, sum(host.incoming.stats().counters.resent for host in decode_loops(service))

    answers, resent = asyncio.run(run())
    assert resent > 0
    assert answers == [answer[:8] for answer in model.answers]


def test_without_prefix_caches(model: Model) -> None:
    assert answered(model, "1E1P1D", replace(FLOAT32, enable_prefix_caching=False)) == model.answers


def test_one_sequence_at_a_time(model: Model) -> None:
    assert answered(model, "1E1P1D", replace(FLOAT32, max_num_seqs=1)) == model.answers


def test_many_requests_with_all_pools_tiny(model: Model) -> None:
    """No deadlock and no starvation, whichever side waits."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 4
    pages = -(-longest // FLOAT32.page_size) + 1
    engine = replace(
        FLOAT32,
        kv_cache_tokens=pages * FLOAT32.page_size,
        receive_blocks=2,
        receive_block_rows=4,
        kv_receive_blocks=3,
        max_num_seqs=8,
    )

    async def run() -> list[list[int]]:
        async with running(model.folder, "2E1P2D", engine) as service:
            return await service.answers(REQUESTS * 3, max_tokens=4)

    assert asyncio.run(run()) == [answer[:4] for answer in model.answers] * 3


def test_preemption_where_it_decodes(model: Model) -> None:
    """A cache that holds little more than the longest answer: a preempted request is prefilled again elsewhere, with
    what was generated so far."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1
    engine = replace(FLOAT32, kv_cache_tokens=pages * FLOAT32.page_size)

    async def run() -> tuple[list[list[int]], int]:
        async with running(model.folder, "1E2P1D", engine, prepare=together(len(REQUESTS))) as service:
            answers = await service.answers(REQUESTS)
            return answers, decode_loops(service)[0].scheduler.num_preemptions

    answers, preemptions = asyncio.run(run())
    assert preemptions > 0
    assert answers == model.answers


def test_preempted_requests_with_equal_prompts_reuse_each_others_pages(model: Model) -> None:
    """What one lost, the other has kept: nothing is prefilled again, nor is anything decoded twice."""
    engine = replace(FLOAT32, kv_cache_tokens=FLOAT32.page_size * 13)
    texts = [[{"role": "user", "content": "x" * length}] for length in (41, 57)]

    async def run() -> None:
        starting = running(model.folder, "1P1D", engine, prepare=together(6 * len(texts)))
        async with starting as service, running(model.folder, "1PD") as plain:
            expected = [await plain.answer(messages, max_tokens=60) for messages in texts]
            assert await service.answers(texts * 6, max_tokens=60) == expected * 6
            assert decode_loops(service)[0].scheduler.num_preemptions > 0

    asyncio.run(run())


def test_sampling_continues_from_the_prefill_instances_token(model: Model) -> None:
    """Seeds, penalties, bias, log probabilities and grammars: as in one instance."""
    choices = 'start: "a cat" | "two dogs" | "no idea"'
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1234, "logprobs": 3},
        {"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 7},
        {"logprobs": 0, "logit_bias": {5: 3.0}, "min_tokens": 8},
        {"grammar": choices, "ignore_eos": False},
        {"max_tokens": 1},
    ]

    async def run(topology: str) -> list[Any]:
        async with running(model.folder, topology) as service:
            return [
                await asyncio.gather(*(reports(service, messages, **one) for messages in REQUESTS)) for one in settings
            ]

    together, split = asyncio.run(run("1E1PD")), asyncio.run(run("1E1P1D"))
    for one, expected, found in zip(settings, together, split, strict=True):
        assert found == expected, one


async def reports(service: Running, messages: Any, **sampling: Any) -> list[tuple[int, list[int], str | None]]:
    """Every token of an answer, with its likeliest alternatives, and why it ended."""
    front = service.frontend.api
    prompt = front.prompt_builder.build(messages)
    settings = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | sampling))
    stream = front.router.lifecycle.submit(
        RequestRecord("id", "POST", SystemClock()), prompt, settings, sorted(front.tokenizer.eos_token_ids)
    )
    reports = [report async for report in stream]
    tokens = [token for report in reports for token in report.tokens]
    logprobs = [[top for top, _ in entry.top] for report in reports for entry in report.logprobs]
    likeliest = logprobs or [[] for _ in tokens]
    return [(token, top, reports[-1].finish_reason) for token, top in zip(tokens, likeliest, strict=True)]


def test_kv_that_the_decode_instance_has_is_not_sent(model: Model) -> None:
    async def run() -> None:
        async with running(model.folder, "1E1P1D") as service:
            for messages, answer in zip(REQUESTS, model.answers, strict=True):
                prompt = service.frontend.api.prompt_builder.build(messages)
                decoder: Any = decode_loops(service)[0].runner.decoder
                layers = decoder.config.num_layers
                before = kv_rows(service)
                assert await service.answer(messages) == answer
                first = kv_rows(service)
                assert first - before <= 2 * layers * len(prompt.tokens)
                assert await service.answer(messages) == answer
                left = len(prompt.tokens) - (len(prompt.tokens) - 1) // FLOAT32.page_size * FLOAT32.page_size
                assert kv_rows(service) - first == 2 * layers * left

    asyncio.run(run())


def test_text_needs_no_encoder(model: Model) -> None:
    async def run() -> list[list[int]]:
        async with running(model.folder, "1P1D") as service:
            return await service.answers(TEXTS)

    expected = [answer for case, answer in zip(CASES, model.answers, strict=True) if not case.images]
    assert expected
    assert asyncio.run(run()) == expected


def test_without_an_encoder_images_are_rejected_and_not_listed(model: Model) -> None:
    async def run() -> None:
        async with running(model.folder, "1P1D") as service:
            router = service.frontend.router
            assert router.availability.can_serve
            assert not router.availability.takes_media
            with pytest.raises(MediaNotServed):
                await service.answer(next(case.messages for case in CASES if case.images))

    asyncio.run(run())


def test_neither_instance_computes_what_is_the_others(model: Model) -> None:
    async def run() -> tuple[int, int]:
        async with running(model.folder, "1E1P1D") as service:
            await service.answers(REQUESTS)
            prefill = [host for host in service.engine_loops() if not host.decodes]
            return prefill[0].num_computed_tokens, decode_loops(service)[0].num_computed_tokens

    prefilled, decoded = asyncio.run(run())
    assert prefilled <= sum(len(prompt.tokens) for prompt in model.prompts)
    assert decoded == sum(len(answer) - 1 for answer in model.answers)
