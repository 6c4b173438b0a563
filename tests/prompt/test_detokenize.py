from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import InvalidRequest
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.tokenizer import Tokenizer

SPECIAL = 258


@pytest.fixture(scope="module")
def tokenizer(shared_folder: Path) -> Tokenizer:
    return Tokenizer(shared_folder)


# one token per byte: any UTF-8 split happens
texts = st.text(alphabet="ab é漢😀\ufffd", max_size=40)
stops = st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), max_size=3)


def streamed(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> str:
    """The text of pushes of the given sizes, again and again, and of the end."""
    pieces: list[str] = []
    place = 0
    while place < len(tokens):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(detokenizer.push(tokens[place : place + size]))
        place += size
    return "".join(pieces) + detokenizer.finish()


def until_stop(text: str, stop: list[str], unsearched: int = 0) -> str:
    """The definition: the stop string that is complete first, after that number of characters; of two, the longer."""
    for end in range(unsearched + 1, len(text) + 1):
        found = [len(one) for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - max(found)]
    return text


cuts = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@settings(max_examples=300)
@given(text=texts, stop=stops, cuts=cuts, min_tokens=st.integers(0, 12))
def test_stop_strings_end_behind_min_tokens(
    tokenizer: Tokenizer, text: str, stop: list[str], cuts: list[int], min_tokens: int
) -> None:
    tokens = tokenizer.encode(text)
    unsearched = len(Detokenizer(tokenizer).push(tokens[:min_tokens]))
    detokenizer = Detokenizer(tokenizer, stop, min_tokens=min_tokens)
    assert streamed(detokenizer, tokens, cuts) == until_stop(text, stop, unsearched)


def test_a_stop_string_across_min_tokens_counts(tokenizer: Tokenizer) -> None:
    """As in vLLM: its end decides. One that was complete before doesn't count later."""
    tokens = [token for letter in "abcab" for token in tokenizer.encode(letter)]
    assert streamed(Detokenizer(tokenizer, ["abc"], min_tokens=2), tokens, [1]) == ""
    assert streamed(Detokenizer(tokenizer, ["b", "abd"], min_tokens=2), tokens, [1]) == "abca"
    assert streamed(Detokenizer(tokenizer, ["ab"], min_tokens=5), tokens, [1]) == "abcab"


def test_whole_characters_only(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in tokenizer.encode("é😀a")]
    assert pieces == ["", "é", "", "", "", "😀", "a"]
    assert detokenizer.finish() == ""


def test_incomplete_character_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    first, second = tokenizer.encode("é")
    assert detokenizer.push([SPECIAL, first, SPECIAL, second, SPECIAL]) == "é"


def test_kept_special_tokens_are_text(tokenizer: Tokenizer) -> None:
    tokens = [SPECIAL, *tokenizer.encode("é"), SPECIAL + 1]
    assert streamed(Detokenizer(tokenizer, keep_special=[SPECIAL]), tokens, [1]) == f"{tokenizer.token_of(SPECIAL)}é"


def test_longest_possible_stop_is_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["abc", "bd"])
    assert detokenizer.push(tokenizer.encode("xab")) == "x"
    assert detokenizer.push(tokenizer.encode("e")) == "abe"
    assert detokenizer.push(tokenizer.encode("yb")) == "y"
    assert not detokenizer.stopped
    assert detokenizer.push(tokenizer.encode("dz")) == ""
    assert detokenizer.stopped
    assert detokenizer.push(tokenizer.encode("more")) == ""
    assert detokenizer.finish() == ""


def test_held_text_is_flushed(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["END"])
    assert detokenizer.push(tokenizer.encode("the EN")) == "the "
    assert detokenizer.finish() == "EN"


def test_empty_stop_string() -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        Detokenizer(None, ["a", ""])  # type: ignore[arg-type]
    assert caught.value.param == "stop"
