import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import CheckpointError
from triptych.prompt.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(shared_folder: Path) -> Tokenizer:
    return Tokenizer(shared_folder)


def test_special_tokens_are_parsed_and_none_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>")
    assert [tokenizer.token_of(token_id) for token_id in ids] == ["a", "<|im_end|>"]
    assert tokenizer.encode("") == []


@given(text=st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 263
    assert tokenizer.token_of(263) is None


def test_end_tokens(folder: Path) -> None:
    assert Tokenizer(folder).eos_token_ids == {258}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    assert Tokenizer(folder).eos_token_ids == {258, 256}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id"):
        Tokenizer(folder)


def test_no_end_token(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert Tokenizer(folder).eos_token_ids == frozenset()


def test_missing_and_damaged_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a tokenizer"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: no such file"):
        Tokenizer(folder)


def test_padding_and_truncation_of_the_file_are_ignored(folder: Path) -> None:
    path = folder / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(saved))
    assert len(Tokenizer(folder).encode("abcd")) == 4
