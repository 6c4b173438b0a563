"""Answers don't depend on what the KV cache knows already, and what it knows isn't asked for again."""

import asyncio
from dataclasses import replace

import pytest

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, Messages, Running, running
from tests.support.image_cases import CASES, picture, png
from triptych.encode.loop import EncodeLoop

REQUESTS = [case.messages for case in CASES]
PAGE = FLOAT32.page_size


def computed(service: Running) -> int:
    """Tokens that went through the decoder so far."""
    return sum(host.num_computed_tokens for host in service.engine_loops())


def encodings(service: Running) -> int:
    """Transfers that encoders were asked for so far."""
    hosts = [host for instance in service.instances for host in instance.loops if isinstance(host, EncodeLoop)]
    return sum(host.num_requested for host in hosts)


def chat(*turns: str, images: int = 2) -> Messages:
    """A conversation that begins with pictures; every second turn is the assistant's."""
    pictures = [{"type": "image", "data": png(picture(128, 96 + 32 * number, number))} for number in range(images)]
    messages: Messages = [
        {"role": ("user", "assistant")[number % 2], "content": [{"type": "text", "text": text}]}
        for number, text in enumerate(turns)
    ]
    messages[0]["content"] = [*pictures, *messages[0]["content"]]
    return messages


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD"])
def test_the_second_time_the_answer_is_the_same_and_little_is_computed(model: Model, topology: str) -> None:
    async def run() -> None:
        async with running(model.folder, topology) as service:
            for messages, answer in zip(REQUESTS, model.answers, strict=True):
                before = computed(service), encodings(service)
                assert await service.answer(messages) == answer
                assert await service.answer(messages) == answer
                prompt = len(service.frontend.api.prompt_builder.build(messages).tokens)
                # the second time: what is left of the prompt's last page, and the answer but for its last token
                again = prompt - (prompt - 1) // PAGE * PAGE + len(answer) - 1
                assert computed(service) - before[0] <= prompt + len(answer) - 1 + again

    asyncio.run(run())


def test_answers_are_the_same_without_the_cache(model: Model) -> None:
    async def run() -> list[list[int]]:
        async with running(model.folder, "1E1PD", replace(FLOAT32, enable_prefix_caching=False)) as service:
            first = await service.answers(REQUESTS)
            assert await service.answers(REQUESTS) == first
            return first

    assert asyncio.run(run()) == model.answers


def test_a_second_chat_turn_does_not_encode_images_again(model: Model) -> None:
    async def run() -> None:
        async with running(model.folder, "1E1PD") as service:
            await service.answer(chat("What differs?"), max_tokens=4)
            assert encodings(service) == 2
            before = computed(service)
            second = chat("What differs?", "The colours do.", "And what else?")
            warm = await service.answer(second)
            assert encodings(service) == 2, "the pictures are in the KV cache"
            prompt = len(service.frontend.api.prompt_builder.build(second).tokens)
            assert computed(service) - before < prompt / 2 + 32
            async with running(model.folder, "1E1PD") as fresh:
                assert await fresh.answer(second) == warm

    asyncio.run(run())


def test_another_text_before_the_picture_or_another_salt_is_another_prefix(model: Model) -> None:
    async def run() -> None:
        async with running(model.folder, "1E1PD") as service:
            await service.answer(chat("What?"), max_tokens=1)
            asked = encodings(service)
            other = [{"role": "system", "content": "Be brief."}, *chat("What?")]
            await service.answer(other, max_tokens=1)
            assert encodings(service) == 2 * asked
            await service.answer(chat("What?"), max_tokens=1, cache_salt="mine")
            assert encodings(service) == 3 * asked
            await service.answer(chat("What?"), max_tokens=1, cache_salt="mine")
            assert encodings(service) == 3 * asked

    asyncio.run(run())


def test_shared_prefixes_on_a_cache_that_is_too_small(model: Model) -> None:
    """Pages of prefixes are taken back, requests preempted and started over with what is left of theirs."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    engine = replace(FLOAT32, kv_cache_tokens=(-(-longest // PAGE) + 2) * PAGE, receive_blocks=2, receive_block_rows=8)

    async def run() -> tuple[list[list[int]], int]:
        async with running(model.folder, "1E1PD", engine) as service:
            await service.answers(REQUESTS[:4])
            answers = await service.answers([*REQUESTS, *REQUESTS])
            return answers, service.engine_loops()[0].scheduler.num_preemptions

    answers, preemptions = asyncio.run(run())
    assert preemptions > 0
    assert answers == [*model.answers, *model.answers]
