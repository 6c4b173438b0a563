"""What every store of rows promises, and what single ones do."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encode_harness import stored_name
from triptych.clock import SystemClock
from triptych.encode import store as stores
from triptych.encode.file_store import FileStore
from triptych.encode.store import EmbeddingRows, EmbeddingStore, Found, MemoryStore, TieredStore, part_name, row_name
from triptych.executor import started_executor
from triptych.messages.stats import CacheTier

WIDTH = 10


def rows(number: int, value: int = 0) -> EmbeddingRows:
    return np.full((number, WIDTH), value, dtype=np.uint8)


def found(store: EmbeddingStore, *names: str) -> list[int | None]:
    """The first byte of what is stored under each name."""
    result = store.lookup([stored_name(one) for one in names]).result(20)
    return [None if one is None else int(one[0, 0]) for one in result]


def put(store: EmbeddingStore, *names: str, number: int = 1, value: int = 1) -> None:
    store.put([stored_name(one) for one in names], rows(number, value))


class Written(FileStore):
    """Files that are written when ``put`` and ``evict`` return."""

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        super().put(names, rows)
        self.flush()

    def evict(self, names: Sequence[str]) -> None:
        super().evict(names)
        self.flush()


@pytest.fixture(params=["memory", "files", "tiers", "no memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddingStore]:
    """Each with room for a few rows."""
    files = Written(tmp_path, 600, SystemClock(), started_executor)
    memory = MemoryStore(0 if request.param == "no memory" else 3 * WIDTH)
    single: dict[str, EmbeddingStore] = {"memory": memory, "files": files}
    yield single.get(request.param) or TieredStore([memory, files])
    files.close()


def test_rows_are_found_under_each_of_their_names_and_counted_once(store: EmbeddingStore) -> None:
    put(store, "a", "content", number=2, value=7)
    before = store.num_bytes
    put(store, "b", "content", number=2, value=7)
    assert store.num_bytes == before
    assert found(store, "b", "a", "content", "c", "a") == [7, 7, 7, None, 7]
    (one,) = store.lookup([stored_name("a")]).result(20)
    assert one is not None
    assert one.shape == (2, WIDTH)
    assert one.dtype == np.uint8


def test_the_least_recently_used_rows_make_room() -> None:
    store = MemoryStore(3 * WIDTH)
    for text in "abc":
        put(store, text)
    assert found(store, "a") == [1]
    put(store, "d")
    assert found(store, "a", "b", "c", "d") == [1, None, 1, 1]
    put(store, "two", number=2)
    assert found(store, "a", "c", "d", "two") == [None, None, 1, 1]


def test_rows_that_exceed_the_limit_evict_nothing(store: EmbeddingStore) -> None:
    put(store, "a")
    put(store, "huge", number=80)
    assert found(store, "a", "huge") == [1, None]


def test_what_is_put_again_stays_as_it_is(store: EmbeddingStore) -> None:
    put(store, "a", value=1)
    put(store, "a", value=2)
    assert found(store, "a") == [1]


def test_what_is_evicted_is_gone_under_all_names(store: EmbeddingStore) -> None:
    put(store, "a", "b")
    put(store, "c")
    store.evict([stored_name("b"), stored_name("never")])
    assert found(store, "a", "b", "c") == [None, None, 1]
    put(store, "b", value=3)
    assert found(store, "a", "b") == [None, 3]


def test_no_room_keeps_nothing() -> None:
    store = MemoryStore(0)
    put(store, "a")
    assert found(store, "a") == [None]
    assert store.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from(["put", "lookup", "evict"]), st.lists(st.integers(0, 9), min_size=1))))
def test_names_and_bytes_are_accounted_for(steps: list[tuple[str, list[int]]]) -> None:
    """Rows under a name are always those of its content, which the name's last digit says here."""
    store = MemoryStore(5 * WIDTH)
    for step, numbers in steps:
        content = numbers[0] % 3
        names = [stored_name(f"{number}/{content}") for number in numbers]
        if step == "put":
            store.put(names, rows(content + 1, content))
        elif step == "evict":
            store.evict(names)
        every = [stored_name(f"{number}/{content}") for number in range(10) for content in range(3)]
        kept = store.lookup(every).result()
        assert store.num_bytes == sum(one.nbytes for one in {id(one): one for one in kept if one is not None}.values())
        assert store.num_bytes <= store.max_bytes
        for number, one in enumerate(kept):
            assert one is None or np.array_equal(one, rows(number % 3 + 1, number % 3))


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one part that many items have, the latest names are kept."""
    monkeypatch.setattr(stores, "MAX_NAMES", 4)
    store = MemoryStore(3 * WIDTH)
    for number in range(10):
        put(store, str(number), "content")
    assert [number for number in range(10) if found(store, str(number)) == [1]] == [7, 8, 9]


def test_names_say_all_that_determines_rows() -> None:
    names = [row_name(*fields) for fields in (("m", "a", ""), ("m", "a", "s"), ("n", "a", ""), ("ma", "", ""))]
    names += [part_name(names[0], 0), part_name(names[0], 1), part_name(names[1], 0)]
    assert len(set(names)) == 7


class Slow:
    """A store whose answers are at the test's hands."""

    num_bytes = max_bytes = 0
    tiers: list[CacheTier] = []  # noqa: RUF012 - it has none

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[str], Future[Found]]] = []
        self.kept: list[Sequence[str]] = []

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        self.asked.append((names, Future()))
        return self.asked[-1][1]

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        self.kept.append(names)

    def evict(self, names: Sequence[str]) -> None: ...


def test_a_later_tier_is_asked_for_what_the_first_lacks_and_fills_it() -> None:
    memory, slow = MemoryStore(9 * WIDTH), Slow()
    store = TieredStore([memory, slow])
    put(memory, "here")
    looked_up = store.lookup([stored_name("here"), stored_name("there"), stored_name("nowhere")])
    assert not looked_up.done()
    ((names, answer),) = slow.asked
    assert names == [stored_name("there"), stored_name("nowhere")]
    answer.set_result([rows(1, 5), None])
    assert [one is not None for one in looked_up.result(0)] == [True, True, False]
    assert found(store, "here", "there") == [1, 5]
    assert len(slow.asked) == 1
    assert slow.kept == []


def test_a_tier_that_fails_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    slow, last = Slow(), MemoryStore(9 * WIDTH)
    put(last, "a")
    looked_up = TieredStore([slow, last]).lookup([stored_name("a"), stored_name("b")])
    slow.asked[0][1].set_exception(OSError("no disk"))
    assert [one is not None for one in looked_up.result(0)] == [True, False]
    assert "a tier of the encoder cache has failed" in caplog.text
