"""``/ready`` reports whether a request would succeed: it probes with one, and no more often than necessary."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.scraping import scrape
from tests.support.serving import Served, image, image_part, served, wait_for
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


def test_a_probe_uses_all_stages_and_its_result_is_reused(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(lambda: ready(alone).status_code == 200)
    assert encoded(alone) == 1, "the image went through the tower"
    for _ in range(20):
        assert ready(alone).json() == {"ready": True}
    assert encoded(alone) == 1
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(readiness, "STALE_SECONDS", 0.0)
    wait_for(lambda: ready(alone).status_code == 200 and encoded(alone) > 1)
    with alone.client() as client:
        assert scrape(client).total("time_to_first_token_seconds_count") == 0, "a probe counts as no client's request"
    wait_for(alone.everything_is_back)


@pytest.mark.parametrize("stage", ["steps", "encoder"])
def test_the_service_is_not_ready_while_a_stage_fails_or_hangs(
    alone: Served, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Although the instances still send heartbeats."""
    for name in ("FRESH_SECONDS", "FRESH_FAILURE_SECONDS"):
        monkeypatch.setattr(readiness, name, 0.05)
    monkeypatch.setattr(readiness, "STALE_SECONDS", 0.1)
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
    assert (response.status_code, "still running" in response.json()["reason"]) == (503, True)
    assert time.monotonic() - began < 15, "it doesn't wait for a stage that hangs"
    gate.opened.set()
    wait_for(lambda: ready(alone).status_code == 200)
    wait_for(alone.everything_is_back)


def test_no_probe_is_needed_while_clients_requests_make_progress(
    alone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 60.0)
    assert alone.text([image_part(image(seed=950))])
    before = encoded(alone)
    monkeypatch.setattr(readiness, "STALE_SECONDS", 0.0)
    for _ in range(5):
        assert ready(alone).status_code == 200
    assert encoded(alone) == before


def test_concurrent_polls_share_one_probe(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    service = alone.running.frontend.api
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)

    async def crowd() -> tuple[int, set[str]]:
        polled = Readiness(service.router, service.prompt_builder, sorted(service.tokenizer.eos_token_ids))
        reasons = await asyncio.gather(*(polled.why_not_ready() for _ in range(200)))
        return polled.num_probes, set(reasons)

    probes, reasons = asyncio.run_coroutine_threadsafe(crowd(), alone.loop).result(30)
    assert probes == 1
    assert len(reasons) == 1
    wait_for(alone.everything_is_back)
