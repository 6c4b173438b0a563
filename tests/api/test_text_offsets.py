import json
import random
from pathlib import Path

import pytest

from tests.support.tokenizer_kinds import save_kind
from triptych.api.text_offsets import TextOffsets
from triptych.prompt.tokenizer import Tokenizer

KINDS = ["Llama 2", "Gemma", "Llama 3", "DeepSeek", "WordPiece", "Metaspace", "no decoder"]
TEXT = "the a é你好 🎉. a\n<s>the . 好 🎉🎉 b"


def load(kind: str, folder: Path) -> Tokenizer:
    save_kind(kind, folder)
    (folder / "config.json").write_text(json.dumps({}))
    return Tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 5, 9])
def test_tokens_begin_where_their_text_is(kind: str, cut: int, tmp_path: Path) -> None:
    """In a text, and in one that continues other tokens."""
    tokenizer = load(kind, tmp_path)
    tokens = tokenizer.encode(TEXT)
    preceding, tokens = tokens[:cut], tokens[cut:]
    offsets = TextOffsets(tokenizer, preceding)
    places = [offsets.add(token) for token in tokens]
    offsets.pause()
    text = offsets.text
    assert [place.is_first for place in places] == [not preceding] + [False] * (len(tokens) - 1)
    assert [place.offset for place in places] == sorted(place.offset for place in places)
    for token, place in zip(tokens, places, strict=True):
        own = tokenizer.text_of(token, first=place.is_first)
        if "\ufffd" not in own:
            assert text.startswith(own, place.offset)
    offsets.add(tokens[0])
    assert offsets.end.offset >= len(text)


def test_tokens_of_a_character_have_its_offset(tmp_path: Path) -> None:
    tokenizer = load("Llama 2", tmp_path)
    tokens = tokenizer.encode("a🎉é.")
    assert [tokenizer.token_of(token) for token in tokens[:2]] == ["▁", "a"]
    offsets = TextOffsets(tokenizer)
    assert [offsets.add(token).offset for token in tokens] == [0, 0, 1, 1, 1, 1, 2, 3]


def test_offsets_agree_with_the_text_behind_bytes_that_are_none(tmp_path: Path) -> None:
    tokenizer = load("Llama 3", tmp_path)
    rng = random.Random(1)
    for _ in range(200):
        offsets = TextOffsets(tokenizer)
        for _ in range(rng.randint(1, 8)):
            offsets.add(rng.randrange(256))
        offsets.add(last := tokenizer.encode("b")[0])
        assert offsets.add(last).offset == len(offsets.text) - 1
