"""Verdicts on services that are really short of something. The policy by itself is in ``tests/router``."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.harness import FLOAT32
from tests.support.serving import CHAT, Served, served
from triptych.engine.loop import EngineLoop
from triptych.observe.pipeline import Pipeline, Verdict

pytestmark = pytest.mark.slow


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def asked(service: Served, count: int, key: str = "", **settings: Any) -> Iterator[None]:
    """That many requests are in flight, of the holder of that key, and are given up at the end."""
    left = threading.Event()
    headers = bearer(key) if key else {}

    def ask(number: int) -> None:
        body = service.body(f"{number} " * 40, stream=True, **settings)
        with service.client() as client, client.stream("POST", CHAT, json=body, headers=headers) as response:
            for _ in response.iter_raw():
                if left.is_set():
                    return

    threads = [threading.Thread(target=ask, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        left.set()
        for thread in threads:
            thread.join(30)


def verdict(service: Served, stage: str, says: str) -> Verdict:
    """The first verdict that names the stage and has these words."""
    deadline, seen = time.monotonic() + 30, list[str]()
    with service.client() as client, client.stream("GET", "/ui/events?rate=2") as response:
        for line in response.iter_lines():
            if line:
                found = msgspec.json.decode(line.removeprefix("data: "), type=Pipeline).verdict
                if found.stage == stage and says in found.sentence:
                    return found
                seen.append(found.sentence)
                assert time.monotonic() < deadline, json.dumps(seen[-10:], indent=1)
    raise AssertionError("the stream has ended")


def slowed(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return run(*args)

    return slow


def test_a_tiny_kv_cache(folder: Path) -> None:
    engine = replace(FLOAT32, kv_cache_tokens=512)
    with served(folder, "1PD", engine=engine) as service:
        service.steps.delay = 0.02
        with asked(service, 12, max_tokens=150):
            found = verdict(service, "decode", "the KV cache of pd0 is ")
        assert "--kv-cache-memory" in found.advice


def test_one_slow_decode_instance_of_several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder, "1P3D") as service:
        service.steps.delay = 0.02
        [slow] = [one for one in service.running.instances if one.name == "d2"]
        for loop in slow.loops:
            if isinstance(loop, EngineLoop):
                monkeypatch.setattr(loop.runner, "run", slowed(loop.runner.run, 0.15))
        with asked(service, 12, max_tokens=400):
            found = verdict(service, "decode", "at d2 and ")
        assert "d2" in found.advice


def test_one_client_floods_the_service(folder: Path) -> None:
    """Each key is a client. Until another has requests, too, the flood is the load of the service."""
    engine = replace(FLOAT32, max_num_seqs=2)
    with served(folder, "1PD", engine=engine, api_key=("flooding", "modest")) as service:
        service.headers = bearer("modest")
        service.steps.delay = 0.05
        with asked(service, 16, "flooding", max_tokens=400):
            verdict(service, "prefill", " requests wait")
            with asked(service, 1, "modest", max_tokens=200):
                found = verdict(service, "client", "One client binds: ")
                with service.client() as client:
                    running = client.get("/ui/requests?status=running").json()
        [(flooding, most), (_, fewest)] = Counter(one["client"] for one in running).most_common()
        assert fewest <= 2 < most
        assert found.sentence.startswith(f"One client binds: {flooding} has 9")
        assert "--max-queue-per-client" in found.advice
