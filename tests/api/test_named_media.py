from triptych.api.named_media import PER_ITEM, NamedMedia

ITEM = PER_ITEM + 1 + 100
"""What an item with a name of one letter and 100 bytes counts for."""


def known(media: NamedMedia, scope: str, names: str) -> str:
    """Those of the names that mean something; looked at in order."""
    return "".join(name for name in names if media.get(scope, name) is not None)


def put(media: NamedMedia, scope: str, names: str) -> None:
    for name in names:
        media.put(scope, name, name.encode() * 100)


def test_names_are_of_one_scope_and_the_longest_unused_is_forgotten() -> None:
    media = NamedMedia(3 * ITEM)
    put(media, "mine", "abc")
    assert media.get("mine", "a") == b"a" * 100
    assert media.get("other's", "a") is None
    put(media, "mine", "d")
    assert known(media, "mine", "abcd") == "acd"
    media.put("mine", "a", b"A")
    assert media.get("mine", "a") == b"A"
    media.put("mine", "a", bytes(3 * ITEM))
    assert known(media, "mine", "acd") == "cd", "too large, and no longer what it was"


def test_whoever_has_named_less_than_its_share_keeps_it() -> None:
    media = NamedMedia(10 * ITEM)
    put(media, "mine", "ab")
    put(media, "other's", "abcdefghijklmnop")
    assert known(media, "mine", "ab") == "ab"
    assert known(media, "other's", "abcdefghijklmnop") == "ijklmnop"
    put(media, "mine", "cdef")
    assert known(media, "mine", "abcdef") == "abcdef"[1:], "six are more than half"
    assert media.num_bytes <= 10 * ITEM


def test_what_was_just_named_is_known_and_scopes_that_are_no_longer_used_make_room() -> None:
    media = NamedMedia(10 * ITEM)
    for number in range(10):
        put(media, f"old {number}", "a")
    for number in range(30):
        put(media, f"new {number}", "a")
        assert known(media, f"new {number}", "a") == "a"
    assert not any(known(media, f"old {number}", "a") for number in range(10))
    assert sum(known(media, f"new {number}", "a") == "a" for number in range(30)) == 10


def test_small_items_count_and_empty_ones_are_not_kept() -> None:
    media = NamedMedia(10 * ITEM)
    for number in range(1000):
        media.put("mine", f"{number:04}", b"x")
    assert sum(media.get("mine", f"{number:04}") is not None for number in range(1000)) == 10 * ITEM // (PER_ITEM + 5)
    for number in range(1000):
        media.put(str(number), "a", b"")
    assert len(media._bytes) == 1
    none = NamedMedia(0)
    none.put("mine", "a", b"")
    none.put("mine", "b", b"x")
    assert known(none, "mine", "ab") == ""
    assert not none._bytes
    assert not none._items
