from triptych.api.uuid_cache import ITEM_OVERHEAD, UuidMediaCache
from triptych.clock import SystemClock
from triptych.virtual_time import VirtualClock

ITEM = ITEM_OVERHEAD + 1 + 100
"""Charge of an item with a name of one letter and 100 bytes."""


def cached(cache: UuidMediaCache, scope: str, names: str) -> str:
    """Return the names that are cached, after looking them up in order."""
    return "".join(name for name in names if cache.get(scope, name) is not None)


def put(cache: UuidMediaCache, scope: str, names: str) -> None:
    for name in names:
        cache.put(scope, name, name.encode() * 100)


def test_names_belong_to_a_scope_and_the_least_recently_used_is_evicted() -> None:
    cache = UuidMediaCache(3 * ITEM, SystemClock())
    put(cache, "mine", "abc")
    assert cache.get("mine", "a") == b"a" * 100
    assert cache.get("other's", "a") is None
    put(cache, "mine", "d")
    assert cached(cache, "mine", "abcd") == "acd"
    cache.put("mine", "a", b"A")
    assert cache.get("mine", "a") == b"A"
    cache.put("mine", "a", bytes(3 * ITEM))
    assert cached(cache, "mine", "acd") == "cd", "too large to be stored, and the old data are gone"


def test_a_scope_below_its_share_keeps_its_items() -> None:
    cache = UuidMediaCache(10 * ITEM, SystemClock())
    put(cache, "mine", "ab")
    put(cache, "other's", "abcdefghijklmnop")
    assert cached(cache, "mine", "ab") == "ab"
    assert cached(cache, "other's", "abcdefghijklmnop") == "ijklmnop"
    put(cache, "mine", "cdef")
    assert cached(cache, "mine", "abcdef") == "abcdef"[1:], "six items exceed half of the cache"
    assert cache.num_bytes <= 10 * ITEM


def test_new_items_are_cached_and_unused_scopes_are_evicted() -> None:
    cache = UuidMediaCache(10 * ITEM, SystemClock())
    for number in range(10):
        put(cache, f"old {number}", "a")
    for number in range(30):
        put(cache, f"new {number}", "a")
        assert cached(cache, f"new {number}", "a") == "a"
    assert not any(cached(cache, f"old {number}", "a") for number in range(10))
    assert sum(cached(cache, f"new {number}", "a") == "a" for number in range(30)) == 10


def test_small_items_are_charged_and_empty_ones_are_not_stored() -> None:
    cache = UuidMediaCache(10 * ITEM, SystemClock())
    for number in range(1000):
        cache.put("mine", f"{number:04}", b"x")
    assert sum(cache.get("mine", f"{number:04}") is not None for number in range(1000)) == 10 * ITEM // (
        ITEM_OVERHEAD + 5
    )
    for number in range(1000):
        cache.put(str(number), "a", b"")
    assert cache.num_scopes == 1
    none = UuidMediaCache(0, SystemClock())
    none.put("mine", "a", b"")
    none.put("mine", "b", b"x")
    assert cached(none, "mine", "ab") == ""
    assert none.num_scopes == 0
    assert len(none) == 0


def test_items_expire() -> None:
    clock = VirtualClock()
    cache = UuidMediaCache(10 * ITEM, clock)
    cache.put("mine", "a", b"a" * 100, clock.wall() + 10)
    cache.put("mine", "b", b"b" * 100, clock.wall() + 20)
    cache.put("mine", "c", b"c" * 100)
    clock.advance(9)
    assert cached(cache, "mine", "abc") == "abc"
    cache.put("mine", "a", b"a" * 100, clock.wall() + 30)
    clock.advance(2)
    assert cached(cache, "mine", "abc") == "abc"
    clock.advance(10)
    assert cached(cache, "mine", "abc") == "ac"
    assert (len(cache), cache.num_bytes) == (2, 2 * ITEM)
    cache.put("mine", "a", b"A")
    clock.advance(10**6)
    assert cached(cache, "mine", "ac") == "ac", "what was sent again in a chat doesn't expire"
