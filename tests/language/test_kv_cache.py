import pytest

from triptych.errors import BlockError
from triptych.language.kv_cache import PagePool


def test_pages_are_handed_out_lowest_first() -> None:
    pool = PagePool(5, 16)
    assert pool.take(3) == [0, 1, 2]
    pool.free([1])
    assert pool.take(2) == [1, 3]


def test_pages_cover_tokens() -> None:
    pool = PagePool(5, 16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_taking_too_many_takes_none() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(BlockError):
        pool.take(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("pages", [[0, 0], [1], [-1], [7]])
def test_giving_back_what_is_not_taken_is_an_error(pages: list[int]) -> None:
    pool = PagePool(2, 16)
    pool.take(1)
    with pytest.raises(BlockError):
        pool.free(pages)


def test_a_leak_is_an_error() -> None:
    pool = PagePool(2, 16)
    pages = pool.take(2)
    with pytest.raises(BlockError, match=r"^2 of 2"):
        pool.check_all_free()
    pool.free(pages)
    pool.check_all_free()
