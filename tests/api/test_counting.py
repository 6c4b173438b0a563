"""Which tokens belong to an answer and count: those that were generated for it, shown or not."""

import asyncio
import math
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.router_harness import PD0, RouterHarness, prompt
from triptych.api.completion_schemas import CompletionRequest
from triptych.api.generation import Generation, RequestContext, _Text
from triptych.api.observed import Observed
from triptych.messages.work import SamplingParams, TokenLogprob, Tokens
from triptych.observe.requests import RequestRecord
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.stream import MAX_JOINED
from triptych.types import RequestId


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def test_tokens_that_came_and_nobody_took_are_told_as_they_are_recorded(tokenizer: Tokenizer) -> None:
    """A choice that has all that it needs (one call, where calls aren't to be parallel) is ended by who reads it."""
    desk = RouterHarness(PD0)
    stream = desk.submit()
    fields = CompletionRequest(model="tiny", prompt="x")
    service: Any = SimpleNamespace(router=desk.router, tokenizer=tokenizer)
    client = RequestContext("", math.inf, SimpleNamespace())  # type: ignore[arg-type]
    generation = Generation(
        service, [prompt()], [SamplingParams(max_tokens=4)], fields, client, "id", _streams=[stream]
    )
    (token,) = tokenizer.encode("a")
    for _ in range(MAX_JOINED + 3):
        desk.router.handle(Tokens(stream.request, [token, token]))

    async def read() -> None:
        pieces = generation._pieces(0, _Text(tokenizer, fields), stream)
        await anext(pieces)
        generation.end(0)
        assert [piece async for piece in pieces] == []

    asyncio.run(read())
    assert stream.record.num_tokens == 2 * (MAX_JOINED + 3)
    assert generation.usage["completion_tokens"] == stream.record.num_tokens


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_string_that_the_answers_end_completes_takes_no_token_away(tokenizer: Tokenizer, reason: str) -> None:
    """The first byte of a character is U+FFFD once nothing follows it."""
    text = _Text(tokenizer, CompletionRequest(model="tiny", prompt="x", stop="\ufffd"))
    shown = [*tokenizer.encode("a"), tokenizer.encode("é")[0]]
    tokens = [*shown, min(tokenizer.eos_token_ids)] if reason == "stop" else shown
    logprobs = [TokenLogprob(-1.0, []) for _ in tokens]
    report = text.read(Tokens(RequestId("r"), tokens, logprobs, finish_reason=reason))
    assert (report.tokens, len(report.logprobs), report.finish_reason) == (tokens, len(tokens), "stop")
    assert text.shown(report) == shown, "the token that ends the answer isn't shown, as of any other"
    assert text.take(report) == "a"


def test_a_request_that_another_context_closes_is_told_of() -> None:
    """As those are that are left at shutdown."""
    told: list[RequestRecord] = []

    async def app(*_: Any) -> None:
        await asyncio.Future()

    scope = {"type": "http", "method": "GET", "headers": []}

    async def start() -> Any:
        request = Observed(app, [told.append])(scope, None, None)  # type: ignore[arg-type]
        copy_context().run(request.send, None)  # type: ignore[attr-defined]
        return request

    asyncio.run(start()).close()
    assert [record.ended > 0 for record in told] == [True]
