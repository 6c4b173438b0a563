"""The documentation stays short; ``scripts/docs`` also measures the height of each page in a browser."""

from scripts.docs_sizes import MOST_WORDS, words


def test_docs_have_few_words() -> None:
    assert 10_000 < words() <= MOST_WORDS
