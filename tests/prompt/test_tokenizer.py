import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.demo import MODEL_DIR
from triptych.errors import CheckpointError
from triptych.prompt.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(shared_folder: Path) -> Tokenizer:
    return Tokenizer(shared_folder)


def test_special_tokens_are_parsed_and_none_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>")
    assert [tokenizer.token_of(token_id) for token_id in ids] == ["a", "<|im_end|>"]
    assert tokenizer.encode("") == []


@given(text=st.text().filter(lambda text: "<|" not in text))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text().filter(lambda text: "<|" not in text))
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))) == text.encode()


def test_tokens_around_a_text(folder: Path) -> None:
    assert Tokenizer(folder).num_added == (0, 0)
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("x", "y")],
        "pair": [],
        "special_tokens": {name: {"id": name, "ids": [256], "tokens": ["<|im_start|>"]} for name in ("x", "y")},
    }
    processor["single"].insert(1, {"Sequence": {"id": "A", "type_id": 0}})  # type: ignore[attr-defined]
    assert rewritten(folder, post_processor=processor).num_added == (1, 1)


def test_tokens_shorter_than_what_is_stripped_of_them_are_decoded(folder: Path) -> None:
    """The tokenizers package panics then."""
    stripping = rewritten(folder, decoder={"type": "Strip", "content": "a", "start": 0, "stop": 3})
    assert stripping.decode(stripping.encode("abca")) == "bc"
    assert stripping.decode(stripping.encode("a<|im_end|>b"), skip_special_tokens=False) == "<|im_end|>b"
    assert stripping.decode(stripping.encode("a<|im_end|>b")) == "b"


def test_the_bytes_of_special_tokens_are_their_spelling(tokenizer: Tokenizer) -> None:
    assert tokenizer.bytes_of(tokenizer.encode("<|im_end|>")[0]) == b"<|im_end|>"
    assert tokenizer.bytes_of(10**6) == b""


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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": "<|endoftext|>"}, {258, 256}),
        ({"tokenizer_config": {"content": "<|endoftext|>", "lstrip": False}}, {258, 256}),
        ({"special_tokens_map": "<|endoftext|>"}, {258, 256}),
        ({"tokenizer_config": "<|im_end|>", "special_tokens_map": "<|endoftext|>"}, {258}),
        ({"tokenizer_config": None, "special_tokens_map": "<|endoftext|>"}, {258, 256}),
        ({"tokenizer_config": "not in the vocabulary"}, {258}),
        ({"tokenizer_config": 3}, {258}),
    ],
)
def test_the_tokenizers_own_end_token(folder: Path, files: dict[str, Any], expected: set[int]) -> None:
    (folder / "tokenizer_config.json").unlink()
    for name, token in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"eos_token": token}))
    tokenizer = Tokenizer(folder)
    assert [tokenizer.token_of(256), tokenizer.token_of(258)] == ["<|endoftext|>", "<|im_end|>"]
    assert tokenizer.eos_token_ids == expected


def test_no_end_token(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").unlink()
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


def rewritten(folder: Path, **changes: Any) -> Tokenizer:
    """The folder's tokenizer with other settings at the top of its file."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Tokenizer(folder)


@given(text=st.text() | st.text("AÅ\u212b\u0301\u0344ιΐ한\u1112\u1161\u11ab <|im_end|>"))
def test_no_fewer_tokens_than_the_bound(tokenizer: Tokenizer, demo: Tokenizer, text: str) -> None:
    for one in (tokenizer, demo):
        assert one.min_num_tokens(text) <= len(one.encode(text))


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    """One with merges, and with a normalizer that shortens some texts."""
    return Tokenizer(MODEL_DIR)


def test_the_bound_is_reached_by_the_longest_token(tokenizer: Tokenizer) -> None:
    text = "<|vision_start|>" * 1000
    assert tokenizer.min_num_tokens(text) == len(tokenizer.encode(text)) == 1000


def test_the_bound_allows_for_composition(folder: Path) -> None:
    """Three characters of seven bytes that become one of two: then two tokens here, which have a byte each."""
    composing = rewritten(folder, normalizer={"type": "NFC"})
    text = "\u0399\u0308\u0301" * 1000
    assert 0 < composing.min_num_tokens(text) <= len(composing.encode(text)) < len(text.encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": " +"}, "behavior": "Removed", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            }
        },
        {"pre_tokenizer": None},
        {"decoder": None},
        {"model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}, "added_tokens": []},
    ],
    ids=["normalizer strips", "spaces split", "split removes", "no bytes", "no byte decoder", "words"],
)
def test_no_bound_where_text_may_be_dropped(folder: Path, changes: dict[str, Any]) -> None:
    assert Tokenizer(folder).min_num_tokens("a " * 1000) > 0
    assert rewritten(folder, **changes).min_num_tokens("a " * 1000) == 0


def test_other_threads_run_while_a_long_text_is_tokenized(demo: Tokenizer) -> None:
    encoding = threading.Thread(target=demo.encode, args=["what is in the picture? " * 40_000])
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10
