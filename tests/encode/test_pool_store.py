"""Rows in a pool: Mooncake's own master and clients, values that others wrote, and a pool that isn't there."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encode_harness import stored_name
from tests.support.mooncake_pool import Master, mooncake_master
from tests.support.serving import wait_for
from triptych.clock import SystemClock
from triptych.config.pool import PoolAddress
from triptych.encode import pool_protocol, pool_store
from triptych.encode.pool_process import PoolProcess
from triptych.encode.pool_protocol import PoolRequest
from triptych.encode.pool_store import PoolStore
from triptych.encode.store import EmbeddingRows
from triptych.encode.stored_rows import decoded, encoded
from triptych.errors import ConfigError
from triptych.executor import started_executor

pytest.importorskip("mooncake.store", exc_type=ImportError)

WIDTH = 64
KEY, OTHER_KEY = bytes(32), bytes(31) + b"\1"


def rows(value: int, number: int = 4) -> EmbeddingRows:
    return np.full((number, WIDTH), value % 251, np.uint8)


def found(store: PoolStore, *texts: str) -> list[int | None]:
    result = store.lookup([stored_name(text) for text in texts]).result(20)
    return [None if one is None else int(one[0, 0]) for one in result]


def put(store: PoolStore, *texts: str, value: int = 1) -> None:
    store.put([stored_name(text) for text in texts], rows(value))
    store.flush()


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has other work, answers may take longer; the deadlines are the slow test's matter."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(pool_store, "LOOKUP_SECONDS", 20.0)
        monkeypatch.setattr(pool_store, "PUT_SECONDS", 20.0)


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with mooncake_master() as master:
        yield master


def test_what_one_puts_another_finds_under_each_name(master: Master) -> None:
    with master.store() as first, master.store() as second:
        put(first, "a/0", "b/0", "a", value=7)
        put(first, "alone", value=8)
        assert found(second, "nowhere", "a/0", "alone", "b/0", "a") == [None, 7, 8, 7, 7]
        assert [(tier.name, tier.hits) for tier in second.tiers] == [("pool", 4)]
        big = np.random.default_rng(1).integers(0, 256, (512, 4096), np.uint8)
        first.put([stored_name("big")], big)
        first.flush()
        (one,) = second.lookup([stored_name("big")]).result(20)
        assert one is not None
        assert np.array_equal(one, big)
        second.evict([stored_name("a"), stored_name("never")])
        second.flush()
        assert found(first, "a/0", "a", "alone") == [None, None, 8]
        put(second, "a/0", "a", value=9)
        assert found(first, "a/0") == [9]


def test_wrong_values_are_none_and_are_removed(master: Master) -> None:
    """Bits that flipped, another name's rows, those of who lacks the key, and anything else."""
    right, other = stored_name("right"), stored_name("other")
    value = bytearray(b"".join(encoded(rows(5), right, KEY)))
    flipped = bytearray(value)
    flipped[-3] ^= 4
    wrong = {
        "flipped": flipped,
        "another's": bytearray(b"".join(encoded(rows(6), other, KEY))),
        "without key": bytearray(b"".join(encoded(rows(6), right))),
        "another key": bytearray(b"".join(encoded(rows(6), right, OTHER_KEY))),
        "short": value[:-1], "long": value + b"x", "head": value[:9], "noise": bytearray(b"\xff" * 3000),
    }  # fmt: skip
    assert master.lender is not None
    with master.store(KEY) as store:
        for kind, one in wrong.items():
            name = f"triptych-rows/{right}"
            master.lender.call(PoolRequest("put", [name], [len(one)]), 5, [one])
            assert found(store, "right") == [None], kind
            assert master.lender.call(PoolRequest("get", [name]), 5)[0].sizes == [0], f"{kind}: it is removed"
        put(store, "right", value=5)
        assert found(store, "right") == [5]


@given(st.data())
def test_changed_values_are_never_rows(data: st.DataObject) -> None:
    value = bytearray(b"".join(encoded(rows(5), "name", KEY)))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    assert decoded(value, "name", KEY) is None
    assert decoded(bytearray(data.draw(st.binary(max_size=300))), "name", KEY) is None


def test_items_of_any_size_are_found(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose rows are more than a message may have."""
    names = [f"large/{number}" for number in range(6)]
    with master.store() as store:
        for number, name in enumerate(names):
            store.put([stored_name(name)], np.full((256, 1024), number, np.uint8))
        store.flush()
        monkeypatch.setattr(pool_protocol, "MAX_BODY", 2**19)
        monkeypatch.setattr(pool_store, "NAMES_AT_ONCE", 4, raising=False)
        assert found(store, *names) == [0, 1, 2, 3, 4, 5]
        assert store.is_there


class HastyClock(SystemClock):
    """A clock whose time passes with each look at it."""

    step = late = 0.0

    def now(self) -> float:
        self.late += self.step
        return super().now() + self.late


def test_what_arrives_in_time_is_found_and_the_pool_is_asked_again(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_store, "LOOKUP_SECONDS", 5.0)
    clock, names = HastyClock(), [f"slow/{number}" for number in range(30)]
    with master.store(clock=clock) as store:
        for number, name in enumerate(names):
            put(store, name, value=number)
        clock.step = 1.5
        assert found(store, names[0]) == [None], "it waited for too long"
        assert store.is_there
        clock.step = 0.05
        numbers = found(store, *names)
        clock.step = 0.0
        assert numbers[0] == 0
        assert numbers[-1] is None
        assert all(one in (None, number) for number, one in enumerate(numbers))
        assert store.is_there
        assert found(store, *names) == list(range(30))


def test_a_full_pool_costs_its_rows_alone() -> None:
    with mooncake_master(lends=False) as master:
        master.lend(16 * 2**20)
        with master.store() as store:
            for number in range(24):
                store.put([stored_name(str(number))], np.full((256, 4096), number, np.uint8))
                store.flush()
            assert store.is_there
            kept = found(store, *map(str, range(24)))
            assert all(one in (None, number) for number, one in enumerate(kept))
            assert any(one is not None for one in kept)


def test_a_pool_that_is_not_there_costs_no_time() -> None:
    """Neither at the start nor later; what it is to keep is dropped."""
    clock = SystemClock()
    address = PoolAddress("127.0.0.1:9")
    began = clock.now()
    store = PoolStore(lambda: PoolProcess.start(address, "127.0.0.1", clock), clock, started_executor)
    for number in range(100):
        store.put([stored_name(str(number))], rows(number))
        store.evict([stored_name(str(number))])
        assert store.lookup([stored_name(str(number))]).result(0) == [None]
    assert clock.now() - began < 1
    store.close()


@pytest.mark.parametrize(
    "text", ["", "mooncake://pool.example:50051", "mooncake://[::1]:1,4GiB", "mooncake://10.0.0.5:50051,500MB"]
)
def test_addresses(text: str) -> None:
    address = PoolAddress.parse(text)
    assert PoolAddress.parse(str(address)) == address
    assert bool(address.master) == bool(text)


@pytest.mark.parametrize(
    "text",
    [
        "redis://a:1",
        "mooncake://a",
        "mooncake://a:0",
        "mooncake://a:99999",
        "mooncake://a:1,",
        "mooncake://a:1,9%",
        "a:1",
    ],
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ConfigError):
        PoolAddress.parse(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "kill", "lender"])
def test_a_pool_that_fails_costs_time_and_no_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its master hangs, or is killed and started again, or the process whose memory it has is killed. Lookups end in
    time, find right rows or none, and find rows again afterwards."""
    monkeypatch.setattr(pool_store, "LONGEST_PAUSE", 2.0)
    choice, clock = random.Random(7), SystemClock()
    longest = 0.0
    with mooncake_master() as master, master.store() as store:
        for cycle in range(3):
            for fails in (False, True):
                if fails:
                    {"hang": master.hang, "kill": master.kill, "lender": master.end_lender}[kind]()
                until = clock.now() + (4 if fails else 3)
                while clock.now() < until:
                    number = choice.randrange(40)
                    began = clock.now()
                    one = found(store, f"{number}/part", str(number))
                    longest = max(longest, clock.now() - began)
                    assert all(value in (None, number) for value in one)
                    store.put([stored_name(f"{number}/part"), stored_name(str(number))], rows(number))
                    if choice.random() < 0.05:
                        store.evict([stored_name(str(number))])
                if fails:
                    {"hang": master.go_on, "kill": master.start, "lender": lambda: None}[kind]()
                    if kind != "hang":  # who had lent a master memory that forgot it is to lend it again
                        master.end_lender()
                        master.lend()

            def works(cycle: int = cycle) -> bool:
                put(store, f"again {cycle}", value=cycle)
                return found(store, f"again {cycle}") == [cycle]

            wait_for(works, 60)
    bound = pool_store.LOOKUP_SECONDS + pool_store.PUT_SECONDS
    assert longest < bound + 0.5, "within the deadlines, and what a busy machine adds"
