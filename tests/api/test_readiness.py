"""``/ready`` says what a request would find; it asks with one, and not more often than it must."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.scraping import scrape
from tests.api.serving import Served, image, image_part, served, wait_for
from triptych.api import readiness
from triptych.api.readiness import Readiness
from triptych.encode.loop import EncodeLoop


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Served]:
    with served(folder, topology="1E1P1D", max_queue=2) as service:
        yield service


def ready(service: Served) -> httpx.Response:
    with service.client() as client:
        return client.get("/ready")


def encoded(service: Served) -> int:
    hosts = [host for instance in service.running.instances for host in instance.loops]
    return sum(host.num_encoded for host in hosts if isinstance(host, EncodeLoop))


def test_one_token_goes_through_all_stages_and_the_answer_is_kept_for_a_while(
    alone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: ready(alone).status_code == 200)
    assert encoded(alone) == 1, "the image went through the tower"
    for _ in range(20):
        assert ready(alone).json() == {"ready": True}
    assert encoded(alone) == 1
    monkeypatch.setattr(readiness, "FRESH", 0.0)
    monkeypatch.setattr(readiness, "STALE", 0.0)
    wait_for(lambda: ready(alone).status_code == 200 and encoded(alone) > 1)
    with alone.client() as client:
        assert scrape(client).total("time_to_first_token_seconds_count") == 0, "a probe is nobody's request"
    wait_for(alone.everything_is_back)


@pytest.mark.parametrize("stage", ["steps", "encoder"])
def test_a_stage_that_fails_or_hangs_is_not_ready_and_is_again_once_it_works(
    alone: Served, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """With instances whose heartbeats go on."""
    for name in ("FRESH", "FRESH_FAILURE"):
        monkeypatch.setattr(readiness, name, 0.05)
    monkeypatch.setattr(readiness, "STALE", 0.1)
    gate = getattr(alone, stage)
    wait_for(lambda: ready(alone).status_code == 200)
    gate.failures = 1000
    wait_for(lambda: "failed" in ready(alone).json().get("reason", ""))
    gate.failures = 0
    wait_for(lambda: ready(alone).status_code == 200)
    gate.close()
    time.sleep(0.2)
    began = time.monotonic()
    response = ready(alone)
    assert (response.status_code, "under way" in response.json()["reason"]) == (503, True)
    assert time.monotonic() - began < 3, "it doesn't wait for what hangs"
    gate.opened.set()
    wait_for(lambda: ready(alone).status_code == 200)
    wait_for(alone.everything_is_back)


def test_what_clients_requests_have_just_shown_is_not_asked_again(
    alone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FRESH", 60.0)
    assert alone.text([image_part(image(seed=950))])
    before = encoded(alone)
    monkeypatch.setattr(readiness, "STALE", 0.0)
    for _ in range(5):
        assert ready(alone).status_code == 200
    assert encoded(alone) == before


def test_a_crowd_that_asks_at_once_costs_one_request(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = alone.running.frontend
    loop = frontend._server.servers[0].get_loop()
    service = frontend.service
    monkeypatch.setattr(Readiness, "_shown_by_clients", lambda _: False)

    async def crowd() -> tuple[int, set[str]]:
        asked = Readiness(service.router, service.prompt_builder, sorted(service.tokenizer.eos_token_ids))
        reasons = await asyncio.gather(*(asked.reason_against() for _ in range(200)))
        return asked.num_probes, set(reasons)

    probes, reasons = asyncio.run_coroutine_threadsafe(crowd(), loop).result(30)
    assert probes == 1
    assert len(reasons) == 1
    wait_for(alone.everything_is_back)
