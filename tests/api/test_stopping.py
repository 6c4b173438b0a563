"""Answers that end at a stop string: where generation stops, and which tokens count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scraping import Scrape, scrape
from tests.support.serving import Served, served, wait_for

COMPLETIONS = "/v1/completions"
LATE = 100
"""Steps that an instance on a busy machine may run before it is notified that an answer is complete."""


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Served]:
    """With prefill and decode apart, so that the first token comes from another instance."""
    with served(folder, "1P1D") as service:
        yield service
        wait_for(service.everything_is_back)


def ask(service: Served, prompts: list[str], **fields: Any) -> Any:
    body = {"model": service.model, "prompt": prompts, "ignore_eos": True, "temperature": 0} | fields
    with service.client() as client:
        response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def counted(service: Served) -> Scrape:
    """Return the metrics once instances report that nothing runs."""
    wait_for(service.everything_is_back)
    with service.client() as client:
        hosts = service.running.engine_loops()
        wait_for(lambda: scrape(client).total("instance_steps_total") == sum(host.num_steps for host in hosts))
        return scrape(client)


def early(text: str, *others: str) -> str:
    """Return a substring near the text's beginning that the other texts lack."""
    return next(text[at : at + 4] for at in range(4, 40) if not any(text[at : at + 4] in other for other in others))


def test_generation_stops_at_a_stop_string(service: Served) -> None:
    long, short = (choice["text"] for choice in ask(service, ["Once", "Twice"], max_tokens=800)["choices"])
    stop = early(short, long)
    before = counted(service)
    answer = ask(service, ["Once", "Twice"], max_tokens=800, stop=[stop])
    after = counted(service)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert [choice["text"] for choice in answer["choices"]] == [long, short[: short.index(stop)]]

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    usage = answer["usage"]
    assert usage["completion_tokens"] < 800 + 60
    assert grown("generation_tokens_total") == usage["completion_tokens"]
    assert grown("request_generation_tokens_sum") == usage["completion_tokens"]
    assert grown("instance_computed_tokens_total") <= usage["total_tokens"] + LATE
    assert grown("request_success_total", finished_reason="stop") == 1
    assert grown("request_success_total", finished_reason="abort") == 0


def test_early_stops_free_their_slots_at_once(service: Served) -> None:
    """With more requests than slots, each frees its slot when it stops, not when all have."""
    prompts = ["Twice"] * 40
    stop = early(ask(service, prompts[:1], max_tokens=60)["choices"][0]["text"])
    before = counted(service)
    answer = ask(service, prompts, max_tokens=1500, stop=[stop])
    after = counted(service)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    steps = after.total("instance_steps_total") - before.total("instance_steps_total")
    assert steps <= 2 * 60 + LATE, "two batches of them, none of which runs to max_tokens"


def test_stop_strings_with_prefill_and_decode_apart(service: Served, apart: Served) -> None:
    whole = ask(service, ["Twice"], max_tokens=60)["choices"][0]["text"]
    first = whole[0]  # which ends the answer while the prompt's keys and values may be on their way
    for stop in (first, early(whole)):
        before = counted(apart)
        answer = ask(apart, ["Twice"] * 8, max_tokens=800, stop=stop)
        after = counted(apart)
        assert [choice["text"] for choice in answer["choices"]] == [whole[: whole.index(stop)]] * 8
        tokens = after.total("generation_tokens_total") - before.total("generation_tokens_total")
        assert tokens == answer["usage"]["completion_tokens"] <= 8 * 60
        finished = after.total("request_success_total", finished_reason="stop")
        assert finished - before.total("request_success_total", finished_reason="stop") == 8


def test_stop_strings_apply_after_min_tokens(service: Served) -> None:
    """As in vLLM, a stop string that ends within the first min_tokens tokens doesn't end the answer."""
    whole = ask(service, ["Twice"], max_tokens=60)["choices"][0]["text"]
    letters = sorted(set(whole[:10]))
    fields: dict[str, Any] = {"max_tokens": 60, "stop": letters[:16]}
    assert ask(service, ["Twice"], **fields)["usage"]["completion_tokens"] <= 10
    held = ask(service, ["Twice"], min_tokens=30, **fields)
    assert held["usage"]["completion_tokens"] > 30
    assert whole.startswith(held["choices"][0]["text"])
