import numpy as np

from triptych.encode.cache import EmbeddingRows, EncoderCache


def rows(size: int) -> EmbeddingRows:
    return np.zeros((size, 10), dtype=np.uint8)


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache = EncoderCache(30)
    for key in "abc":
        cache.put(key, rows(1))
    assert cache.get("a") is not None
    cache.put("d", rows(1))
    assert [key for key in "abcd" if cache.get(key) is None] == ["b"]
    assert cache.num_bytes == 30


def test_a_big_entry_evicts_only_what_it_needs() -> None:
    cache = EncoderCache(30)
    for key in "abc":
        cache.put(key, rows(1))
    cache.put("big", rows(2))
    assert [key for key in ("a", "b", "c", "big") if cache.get(key) is not None] == ["c", "big"]
    assert (cache.hits, cache.misses) == (2, 2)


def test_an_entry_that_exceeds_the_limit_evicts_nothing() -> None:
    cache = EncoderCache(30)
    cache.put("a", rows(1))
    cache.put("huge", rows(4))
    assert cache.get("huge") is None
    assert cache.get("a") is not None


def test_putting_again_counts_once() -> None:
    cache = EncoderCache(30)
    first = rows(1)
    cache.put("a", first)
    cache.put("a", rows(1))
    assert cache.get("a") is first
    assert cache.num_bytes == 10


def test_a_limit_of_zero_keeps_nothing() -> None:
    cache = EncoderCache(0)
    cache.put("a", rows(1))
    assert cache.get("a") is None
    assert cache.num_bytes == 0


def test_an_item_is_cached_while_all_its_parts_are() -> None:
    cache = EncoderCache(30)
    parts = {name: rows(1) for name in "abc"}
    for name, one in parts.items():
        cache.put(name, one)
    assert cache.get_item("item") is None
    cache.put_item("item", ("a", "b", "a"))
    found = cache.get_item("item")
    assert found is not None
    assert [id(one) for one in found] == [id(parts[name]) for name in "aba"]
    cache.put("d", rows(1))
    assert cache.get("c") is None, "the item's parts were used last"
    cache.put("e", rows(2))
    assert cache.get_item("item") is None
