"""Which tokens count towards the usage: all that were generated for the answer, shown or not."""

import asyncio
import math
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.router_harness import PD0, RouterHarness, prompt, request_of
from triptych.api.answers import stream_deltas
from triptych.api.completion_schemas import CompletionRequest
from triptych.api.generation import ChoiceOutput, ChoiceText, Generation, RequestContext
from triptych.api.request_records import RequestRecordMiddleware
from triptych.clock import SystemClock
from triptych.messages.work import SamplingParams, TokenLogprob, Tokens
from triptych.observe.requests import RequestRecord
from triptych.prompt.formats.parser import AnswerParser
from triptych.prompt.formats.reasoning import THINK, Reasoning
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.stream import MAX_JOINED
from triptych.types import RequestId


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def test_unread_tokens_count_in_the_usage_as_in_the_record(tokenizer: Tokenizer) -> None:
    """A choice is ended early once it is complete: with its first call, if calls must not be parallel."""
    harness = RouterHarness(PD0)
    stream = harness.submit()
    fields = CompletionRequest(model="tiny", prompt="x")
    ends = harness.router.lifecycle
    lifecycle = SimpleNamespace(submit=lambda *_, **__: stream, complete=ends.complete, cancel=ends.cancel)
    service: Any = SimpleNamespace(lifecycle=lifecycle, tokenizer=tokenizer, recorder=None)
    context = RequestContext(request_of(), "", math.inf, SimpleNamespace())  # type: ignore[arg-type]
    generation = Generation(service, [prompt()], [SamplingParams(max_tokens=4)], fields, context, "id")
    (token,) = tokenizer.encode("a")
    for number in range(MAX_JOINED + 3):
        harness.router.handle(Tokens(stream.request, [token, token], 2 * number))

    async def read() -> None:
        outputs = generation.stream()
        await anext(outputs)
        generation.end(0)
        assert [output async for output in outputs] == []

    asyncio.run(read())
    assert stream.record.num_tokens == 2 * (MAX_JOINED + 3)
    assert generation.usage["completion_tokens"] == stream.record.num_tokens


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_string_completed_by_the_answers_end_removes_no_token(tokenizer: Tokenizer, reason: str) -> None:
    """The first byte of a character is U+FFFD once nothing follows it."""
    text = ChoiceText(tokenizer, CompletionRequest(model="tiny", prompt="x", stop="\ufffd"))
    shown = [*tokenizer.encode("a"), tokenizer.encode("é")[0]]
    tokens = [*shown, min(tokenizer.eos_token_ids)] if reason == "stop" else shown
    logprobs = [TokenLogprob(-1.0, []) for _ in tokens]
    report = text.read(Tokens(RequestId("r"), tokens, 0, logprobs, finish_reason=reason))
    assert (report.tokens, len(report.logprobs), report.finish_reason) == (tokens, len(tokens), "stop")
    assert text.shown(report) == shown, "the stop token isn't shown"
    assert "".join(text.take(report)) == "a"


@pytest.mark.parametrize("cuts", [[], [1], [3], [1, 2, 3, 4, 5]], ids=["whole", "begin", "tag", "each"])
def test_only_tokens_of_reasoning_count_as_such_however_they_arrive(tokenizer: Tokenizer, cuts: list[int]) -> None:
    pieces = ["I", " see", "</think>", "Yes", ".", "!"]

    async def outputs() -> AsyncGenerator[ChoiceOutput, None]:
        for begin, end in pairwise([0, *cuts, len(pieces)]):
            tokens = list(range(begin, end))
            yield ChoiceOutput(0, pieces[begin:end], tokens, [], "length" if end == len(pieces) else None)

    parser = AnswerParser(Reasoning.OPEN, (THINK,), (), {})
    generation = SimpleNamespace(
        num_choices=1, num_reasoning=0, stream=outputs, api=SimpleNamespace(tokenizer=tokenizer)
    )
    fields = SimpleNamespace(parallel_tool_calls=None, return_tokens_as_token_ids=None)
    chat: Any = SimpleNamespace(generation=generation, request=fields, new_parser=lambda: parser)

    async def read() -> tuple[str, str]:
        deltas = [delta async for delta in stream_deltas(chat)]
        return "".join(one.reasoning for one in deltas), "".join(one.content for one in deltas)

    assert asyncio.run(read()) == ("I see", "Yes.!")
    assert generation.num_reasoning == 3, "the tag counts"


def test_a_request_that_is_still_open_at_shutdown_is_reported() -> None:
    reported: list[RequestRecord] = []

    async def app(*_: Any) -> None:
        await asyncio.Future()

    scope = {"type": "http", "method": "GET", "headers": []}

    async def start() -> Any:
        request = RequestRecordMiddleware(app, SystemClock(), [reported.append])(scope, None, None)  # type: ignore[arg-type]
        request.send(None)
        return request

    asyncio.run(start()).close()
    assert [record.ended > 0 for record in reported] == [True]
