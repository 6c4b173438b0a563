"""The check of words finds what it should, and nothing else."""

import pytest

from scripts.words import GONE, defined_twice, found_in, vague


@pytest.mark.parametrize(
    "text",
    [
        "the front door",
        "Front-Door",
        "FRONT_DOOR = 1",
        "self.front_doors",
        "requests in hand",
        "the head of the line",
        "on_lapse",
        "class EncodeHost:",
        "from collections.abc import Sequence as Rows",
        "a request that shall wait",
        "--max-queue-per-caller 3",
        "max_held_mb",
        "test_what_is_told_so",
        "as many as there are",
    ],
)
def test_a_word_of_the_list_is_found(text: str) -> None:
    [(line, _, instead)] = found_in(f"\n{text}\n")
    assert line == 2
    assert instead in GONE.values()


@pytest.mark.parametrize(
    "text",
    ["the frontend", "a collapse", "marshalled", "shallow", "in handlers", "elapsed", "a new one", "not one line"],
)
def test_other_words_are_not(text: str) -> None:
    assert list(found_in(text)) == []


def test_a_class_name_is_defined_once() -> None:
    sources = {"a.py": "class A: ...\nclass B: ...", "b.py": "def f():\n    class A: ..."}
    assert list(defined_twice(sources)) == ["class A is defined in a.py:1 and in b.py:2"]


def test_a_docstring_says_what_it_is_about() -> None:
    source = 'size: int\n"""Of the file."""\ndef f():\n    """As in g."""\n"""Often used. As in g."""'
    assert [line.partition(": ")[0] for line in vague({"a.py": source})] == ["a.py:2", "a.py:4"]
