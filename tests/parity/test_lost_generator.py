"""An instance that generates is lost in the middle of answers: others go on with them, with the very same tokens."""

import asyncio
from typing import Any

import pytest

from tests.parity.conftest import Model
from tests.support.harness import Running, at_stake, running
from tests.support.image_cases import CASES
from triptych.clock import SystemClock
from triptych.errors import InstanceLost
from triptych.messages.work import SamplingParams
from triptych.observe.requests import RequestRecord

REQUESTS = [case.messages for case in CASES]
REGEX = "start: /[a-z]{3,9}( [a-z]{3,9}){2,40}/"
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"grammar": REGEX, "temperature": 0.7, "seed": 5},
]


async def answer_and_lose(
    service: Running, victim: str, messages: Any, settings: dict[str, Any], lose: asyncio.Event
) -> list[int]:
    """The tokens of an answer; sets the event once the victim is in the middle of one."""
    front = service.frontend.api
    prompt = front.prompt_builder.build(messages)
    sampling = SamplingParams(**({"max_tokens": 32, "ignore_eos": True} | settings))
    stream = front.router.lifecycle.submit(
        RequestRecord("id", "POST", SystemClock()), prompt, sampling, sorted(front.tokenizer.eos_token_ids)
    )
    tokens = []
    async for report in stream:
        tokens += report.tokens
        if at_stake(service, victim):
            lose.set()
    return tokens


async def answers_with_a_loss(service: Running, victim: str, settings: dict[str, Any]) -> list[list[int]]:
    lose = asyncio.Event()
    asked = [asyncio.create_task(answer_and_lose(service, victim, one, settings, lose)) for one in REQUESTS]
    await asyncio.wait_for(lose.wait(), 60)
    assert at_stake(service, victim), "it is in the middle of answers"
    await service.end(victim)
    found = await asyncio.gather(*asked)
    assert victim not in {lease.name for lease in service.frontend.router.membership}
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "seeded", "structured"])
@pytest.mark.parametrize(
    ("topology", "victim"),
    [
        ("1E1P2D", "d2"),
        pytest.param("1E2PD", "pd1", marks=pytest.mark.slow),
        pytest.param("1E1PD1P1D", "d3", marks=pytest.mark.slow),
    ],
)
def test_answers_continue_on_another_instance(
    model: Model, topology: str, victim: str, settings: dict[str, Any]
) -> None:
    async def run() -> tuple[list[list[int]], list[list[int]]]:
        async with running(model.folder, "1EPD") as whole:
            expected = await whole.answers(REQUESTS, **settings)
        async with running(model.folder, topology) as service:
            return expected, await answers_with_a_loss(service, victim, settings)

    expected, found = asyncio.run(run())
    assert found == expected
    if not settings:
        assert found == model.answers


def test_the_last_prefill_instance_is_lost_and_others_do_both(model: Model) -> None:
    """What only decodes can't go on alone with what it hasn't begun: that goes to who can."""

    async def run() -> list[list[int]]:
        async with running(model.folder, "1E1PD1P1D") as service:
            asked = [asyncio.create_task(service.answer(messages)) for messages in REQUESTS]
            await asyncio.sleep(0.02)
            await service.end("p2")
            return await asyncio.gather(*asked)

    assert asyncio.run(run()) == model.answers


@pytest.mark.slow
def test_without_another_there_is_an_error_with_a_name_and_every_page_is_back(model: Model) -> None:
    async def run() -> None:
        async with running(model.folder, "1E1P1D") as service:
            with pytest.raises(InstanceLost):
                await answers_with_a_loss(service, "d2", {"max_tokens": 64})
            async with asyncio.timeout(5):
                while not service.engine_loops()[0].idle:
                    await asyncio.sleep(0.01)
            service.engine_loops()[0].scheduler.cache.check_all_free()

    asyncio.run(run())
