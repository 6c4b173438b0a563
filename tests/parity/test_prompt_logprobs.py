"""Log probabilities of prompts are those of transformers, however the prompts are computed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, Messages, Running, running, together
from tests.support.image_cases import CASES
from triptych.clock import SystemClock
from triptych.config import EngineConfig
from triptych.messages.work import PromptLogprobs, SamplingParams, Tokens
from triptych.observe.requests import RequestRecord

REQUESTS = [case.messages for case in CASES]
TOP = 5
CLOSE = 1e-4


async def reports(service: Running, messages: Messages, **sampling: Any) -> list[Tokens]:
    front = service.frontend.api
    prompt = front.prompt_builder.build(messages)
    settings = SamplingParams(**({"max_tokens": 8, "ignore_eos": True, "prompt_logprobs": TOP} | sampling))
    stream = front.router.lifecycle.submit(
        RequestRecord("id", "POST", SystemClock()), prompt, settings, sorted(front.tokenizer.eos_token_ids)
    )
    return [report async for report in stream]


async def logprobs_of(service: Running, messages: Messages, **sampling: Any) -> tuple[PromptLogprobs, list[int]]:
    """What an answer says of its prompt, and its tokens."""
    first, *others = await reports(service, messages, **sampling)
    assert first.prompt_logprobs is not None, "they come with the first token"
    assert not any(report.prompt_logprobs for report in others), "they come once"
    return first.prompt_logprobs, [token for report in (first, *others) for token in report.tokens]


def arrays(scored: PromptLogprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and log probabilities, [N, 1 + most] each, and ranks [N]."""
    width = 1 + scored.most
    tokens, logprobs = np.frombuffer(scored.tokens, "<i4"), np.frombuffer(scored.logprobs, "<f4")
    return tokens.reshape(-1, width), logprobs.reshape(-1, width), np.frombuffer(scored.ranks, "<i4")


def check(model: Model, case: int, scored: PromptLogprobs, most: int = TOP) -> None:
    prompt = model.prompts[case]
    expected = model.reference.logits(prompt, model.cases[case].images)[:-1].log_softmax(dim=-1)
    following = torch.tensor(prompt.tokens[1:])[:, None]
    own = expected.gather(1, following)
    tokens, logprobs, ranks = arrays(scored)
    assert scored.most == most
    assert tokens[:, 0].tolist() == prompt.tokens[1:]
    np.testing.assert_allclose(logprobs[:, :1], own.numpy(), atol=CLOSE)
    np.testing.assert_allclose(logprobs[:, 1:], torch.topk(expected, most).values.numpy(), atol=CLOSE)
    # what is said of a token is that token's: two that are about as likely may be in either order
    np.testing.assert_allclose(logprobs, expected.gather(1, torch.tensor(tokens).long()).numpy(), atol=CLOSE)
    lowest, highest = ((expected >= own + by).sum(dim=-1).numpy() for by in (CLOSE, -CLOSE))
    assert ((lowest <= ranks) & (ranks <= highest)).all()


def check_all(model: Model, found: Sequence[tuple[PromptLogprobs, list[int]]], length: int = 8) -> None:
    for case, (scored, answer) in enumerate(found):
        check(model, case, scored)
        assert answer == model.answers[case][:length]


@pytest.mark.parametrize("chunk", [5, pytest.param(64, marks=pytest.mark.slow), 4096])
@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_prompt_logprobs_are_those_of_transformers(model: Model, topology: str, chunk: int) -> None:
    """All at once, beside requests that don't ask for any."""

    async def run() -> list[tuple[PromptLogprobs, list[int]]]:
        async with running(model.folder, topology, replace(FLOAT32, max_num_batched_tokens=chunk)) as service:
            asking = (logprobs_of(service, messages) for messages in REQUESTS)
            found, others = await asyncio.gather(
                asyncio.gather(*asking), service.answers(REQUESTS[:3], max_tokens=8, cache_salt="other")
            )
            assert others == [answer[:8] for answer in model.answers[:3]]
            return list(found)

    check_all(model, asyncio.run(run()))


@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_cached_prompt_tokens_are_computed_for_prompt_logprobs(model: Model, topology: str) -> None:
    """And others find what was computed for it."""

    async def run() -> None:
        async with running(model.folder, topology) as service:
            computing = next(host for host in service.engine_loops() if host.prefills)
            assert computing.decodes == (topology != "1E1P1D")
            for case in (6, 1):
                length = len(model.prompts[case].tokens)
                await service.answer(REQUESTS[case], max_tokens=1)
                before = computing.num_computed_tokens
                scored, _ = await logprobs_of(service, REQUESTS[case], max_tokens=1)
                assert computing.num_computed_tokens - before == length
                check(model, case, scored)
                (last,) = await reports(service, REQUESTS[case], max_tokens=1)
                assert last.reused == 0
                before = computing.num_computed_tokens
                (last,) = await reports(service, REQUESTS[case], max_tokens=1, prompt_logprobs=None)
                assert last.prompt_logprobs is None
                assert last.reused > length / 2
                assert computing.num_computed_tokens - before < length / 2

    asyncio.run(run())


def test_preempted_requests_report_prompt_logprobs_once_and_completely(model: Model) -> None:
    """Answers of 32 tokens, during which others come."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1
    engine: EngineConfig = replace(FLOAT32, kv_cache_tokens=pages * FLOAT32.page_size, max_num_batched_tokens=48)

    async def run() -> tuple[list[tuple[PromptLogprobs, list[int]]], int]:
        competing = together(len(REQUESTS), with_rows=True)
        async with running(model.folder, "1E1PD", engine, prepare=competing) as service:
            found = await asyncio.gather(*(logprobs_of(service, messages, max_tokens=32) for messages in REQUESTS))
            return list(found), service.engine_loops()[0].scheduler.num_preemptions

    found, preemptions = asyncio.run(run())
    assert preemptions > 0
    check_all(model, found, 32)


def test_each_request_gets_the_number_of_logprobs_it_requests(model: Model) -> None:
    async def run() -> list[tuple[PromptLogprobs, list[int]]]:
        async with running(model.folder, "1E1PD") as service:
            wanted = [0, 20, 3]
            found = await asyncio.gather(
                *(
                    logprobs_of(service, REQUESTS[0], prompt_logprobs=most, temperature=0.9, seed=most)
                    for most in wanted
                )
            )
            for most, (scored, _) in zip(wanted, found, strict=True):
                check(model, 0, scored, most)
            return list(found)

    asyncio.run(run())
