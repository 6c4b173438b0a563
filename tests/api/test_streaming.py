"""Streams equal answers for any tokens: random bytes, stop strings, reasoning and calls."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.chat import events, streamed_text
from tests.support.completions import answer
from tests.support.reasoning import IDS, thinking_service
from tests.support.serving import Served
from tests.support.tools import THINKING, TOOLS, put_together, without_ids
from triptych.measure.load.client import STREAMED, Sample, ask


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("streaming") / "thinker") as service:
        yield service


def some_stops(text: str, chance: random.Random) -> list[str]:
    """Return substrings of the text, some of which end within a character's bytes, and other strings."""
    pieces = [text[at : at + chance.randint(1, 5)] for at in (chance.randrange(len(text)) for _ in range(2))]
    return [*(piece for piece in pieces if piece.strip("\ufffd")), "never"]


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_of_random_bytes_equals_the_answer(service: Served, seed: int) -> None:
    """At this temperature all tokens of the random model are about equally likely, so most bytes aren't UTF-8."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_tokens": chance.randint(1, 120)}
    settings["skip_special_tokens"] = chance.random() < 0.5
    if text := service.text(**settings):
        settings["stop"] = some_stops(text, chance)
    made = service.post(**settings).json()
    chunks = events(service, service.body(**settings, stream_options={"include_usage": True}))
    assert streamed_text(chunks) == made["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == made["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == made["usage"]["completion_tokens"]


def test_characters_of_several_tokens_are_not_split(service: Served) -> None:
    """A grammar forces characters of two, three and four bytes; here each byte is a token."""
    wanted = "é–🙂é🙂"
    settings = {"structured_outputs": {"choice": [wanted]}, "max_tokens": 60}
    chunks = events(service, service.body(**settings))
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == wanted
    assert "\ufffd" not in "".join(deltas)
    assert sum(map(bool, deltas)) > 1, "as they come, several at a time where the frontend is late"
    for stop, kept in (("–🙂", "é"), ("🙂é🙂", "é–"), ("é🙂", "é–🙂")):
        assert streamed_text(events(service, service.body(**settings, stop=stop))) == kept
        assert service.text(**settings, stop=stop) == kept


@pytest.mark.parametrize("seed", range(8))
def test_streamed_reasoning_and_calls_equal_the_answer(thinker: Served, seed: int) -> None:
    """Tags, and invalid calls, occur at random."""
    bias = dict.fromkeys(map(str, IDS.values()), 4) | THINKING["logit_bias"]
    settings = THINKING | {"logit_bias": bias, "temperature": 1.5, "seed": seed, "max_tokens": 150, "tools": TOOLS}
    made = thinker.post(**settings).json()["choices"][0]
    streamed = put_together(events(thinker, thinker.body(**settings)))
    assert without_ids(streamed) == without_ids(made)


def test_usage_is_sent_in_every_chunk_on_request(service: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(service, service.body(max_tokens=12, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert chunks[-1]["choices"] == []
    assert counts[0] == 0, "no token comes with the role"
    only_stats = events(service, service.body(max_tokens=12, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in chunk for chunk in only_stats), "as in vLLM"


def test_a_client_sees_when_a_token_without_text_came(service: Served) -> None:
    tokenizer = service.running.frontend.api.tokenizer
    hidden = min(tokenizer.special_ids - tokenizer.eos_token_ids)
    fields = {"max_tokens": 12, "ignore_eos": True, "logit_bias": {str(hidden): 100}}

    async def asked() -> Sample:
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as client:
            return await ask(client, json.dumps(service.body(**fields) | STREAMED).encode())

    sample = asyncio.run(asked())
    assert len(events(service, service.body(**fields))) == 2, "without the usage there are no empty chunks"
    assert (sample.error, sample.tokens) == ("", 12)
    assert 0 < sample.first_tokens < 12


def test_text_completions_stream_random_bytes(service: Served) -> None:
    for seed in range(6):
        fields = {"prompt": ["a", "b"], "temperature": 2.0, "seed": seed, "max_tokens": 60, "ignore_eos": True}
        made = answer(service, "/v1/completions", **fields)
        full_text = ["", ""]
        with service.client() as client:
            text = client.post("/v1/completions", json={"model": service.model, "stream": True} | fields).text
        for line in text.split("\n"):
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                full_text[choice["index"]] += choice["text"]
        assert full_text == [choice["text"] for choice in made["choices"]]


def test_a_stop_string_ends_the_count_of_tokens_too(service: Served) -> None:
    """However many tokens arrived together with it."""
    whole = service.text(max_tokens=60)
    stop = next(whole[at : at + 3] for at in range(4, 40) if whole.find(whole[at : at + 3]) == at)
    counts = {service.post(max_tokens=60, stop=stop).json()["usage"]["completion_tokens"] for _ in range(5)}
    assert len(counts) == 1
