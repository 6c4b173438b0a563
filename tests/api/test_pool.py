"""Two encode instances over a pool that outlives them: Mooncake's own master and clients."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mooncake_pool import Master, mooncake_master
from tests.support.serving import Served, image, image_part, served, wait_for
from triptych.config import EncodeConfig
from triptych.encode import pool_store
from triptych.encode.loop import EncodeLoop
from triptych.encode.pool_store import PoolStore
from triptych.encode.store import TieredStore

pytest.importorskip("mooncake.store", exc_type=ImportError)


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with mooncake_master() as master:
        yield master


def encode_loops(service: Served) -> list[EncodeLoop]:
    loops = [loop for instance in service.running.instances for loop in instance.loops]
    return [loop for loop in loops if isinstance(loop, EncodeLoop)]


def pools(service: Served) -> list[PoolStore]:
    stores = [loop.store for loop in encode_loops(service)]
    tiers = [tier for one in stores if isinstance(one, TieredStore) for tier in one.stores]
    return [tier for tier in tiers if isinstance(tier, PoolStore)]


def num_encoded(service: Served) -> int:
    """Items that went through the towers."""
    return sum(loop.num_encoded for loop in encode_loops(service))


def test_the_tower_of_another_instance_does_not_run_again(
    folder: Path, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No instance keeps anything itself, and those that encoded the pictures first are gone."""
    monkeypatch.setattr(pool_store, "LOOKUP_SECONDS", 20.0)  # a machine that has other work
    monkeypatch.setattr(pool_store, "PUT_SECONDS", 20.0)
    settings = EncodeConfig(encode_cache_mb=0, embedding_store=master.address)
    pictures = [image_part(image(seed=number)) for number in range(6)]
    with served(folder, "2E1PD", encode=settings) as service:
        wait_for(lambda: all(one.is_there for one in pools(service)), 30)
        answers = [service.text([one]) for one in pictures]
        assert num_encoded(service) == len(pictures)
        assert min(loop.num_encoded for loop in encode_loops(service)) > 0, "both have encoded"
        for one in pools(service):
            one.flush()
        assert [service.text([one]) for one in pictures] == answers
        asyncio.run_coroutine_threadsafe(service.running.end("e0"), service.loop).result(30)
        assert [service.text([one]) for one in pictures] == answers
        assert num_encoded(service) == len(pictures)
