import pytest

from triptych.engine.kv_cache import PagePool
from triptych.errors import BlockError


def test_pages_are_allocated_lowest_first() -> None:
    pool = PagePool(5, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1])
    assert pool.allocate(2) == [1, 3]


def test_pages_cover_tokens() -> None:
    pool = PagePool(5, 16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_allocating_too_many_allocates_none() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(BlockError):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("pages", [[0, 0], [1], [-1], [7]])
def test_releasing_an_unallocated_page_is_an_error(pages: list[int]) -> None:
    pool = PagePool(2, 16)
    pool.allocate(1)
    with pytest.raises(BlockError):
        pool.release(pages)


def test_a_leak_is_an_error() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(2)
    with pytest.raises(BlockError, match=r"^2 of 2"):
        pool.check_all_free()
    pool.release(pages)
    pool.check_all_free()


def test_a_cached_page_is_shared_and_kept_until_evicted() -> None:
    pool = PagePool(3, 16)
    first, second = pool.allocate(2)
    pool.cache(first, b"one")
    pool.cache(second, b"two")
    assert pool.lookup([b"one", b"three", b"two"]) == [first]
    pool.release([first, second])
    pool.release([first])
    assert pool.num_free == 3
    pool.check_all_free()
    assert pool.lookup([b"one", b"two"]) == [first, second]
    pool.release([first, second])
    assert pool.allocate(2) == [second, 2]  # the end of the released prefix is evicted first
    assert pool.lookup([b"one", b"two"]) == [first]


def test_only_allocated_pages_are_cached_and_the_first_of_a_hash_stays() -> None:
    pool = PagePool(3, 16)
    with pytest.raises(BlockError):
        pool.cache(0, b"key")
    pages = pool.allocate(2)
    for page in pages:
        pool.cache(page, b"key")
    assert pool.lookup([b"key"]) == [pages[0]]
