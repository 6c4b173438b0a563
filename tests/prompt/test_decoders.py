"""Text of each kind of tokenizer, token by token, is the tokenizers package's own decoding of all tokens."""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers

from tests.support.tokenizer_kinds import KINDS, save_kind
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.tokenizer import Tokenizer


@dataclass
class Kind:
    ours: Tokenizer
    library: tokenizers.Tokenizer

    def id_of(self, token: str) -> int:
        found = self.ours.id_of(token)
        assert found is not None
        return found

    def decode(self, tokens: list[int], keep: set[int] | None = None) -> str:
        """The library's decoding of all tokens, without the special ones that aren't kept."""
        shown = [token for token in tokens if keep is None or token in keep or token not in self.ours.special_ids]
        return str(self.library.decode(shown, skip_special_tokens=False))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return load(request.param, tmp_path_factory.mktemp("kind"))


def load(name: str, folder: Path) -> Kind:
    library = save_kind(name, folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return Kind(Tokenizer(folder), library)


def random_tokens(kind: Kind, rng: random.Random) -> list[int]:
    """Tokens of one to three alphabets: all of them, bytes of a text, few; so runs of bytes are valid or nearly so."""
    size = kind.ours.vocab_size
    few = [rng.randrange(size + 2) for _ in range(rng.randint(1, 4))]
    tokens: list[int] = []
    for _ in range(rng.randint(1, 3)):
        way, count = rng.randrange(4), rng.randint(0, 8)
        if way == 0:
            tokens += [rng.randrange(size + 2) for _ in range(count)]
        elif way == 1:
            tokens += [rng.choice(few) for _ in range(count)]
        else:
            text = "".join(rng.choices("é你好🎉 a.", k=3)).encode()
            spelled = [kind.ours.id_of(f"<0x{byte:02X}>") for byte in text]
            if None in spelled:
                spelled = [*kind.ours.encode(text.decode())]
            tokens += [token for token in spelled if token is not None and (way == 2 or rng.random() < 0.8)]
    return tokens


def cut(rng: random.Random, tokens: list[int]) -> list[list[int]]:
    places = sorted(rng.randint(0, len(tokens)) for _ in range(rng.randint(0, len(tokens))))
    return [tokens[start:end] for start, end in zip([0, *places], [*places, len(tokens)], strict=True)]


def until_stop(text: str, stop: list[str]) -> str:
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    return text[: min(ends)[1]] if ends else text


def check(kind: Kind, rng: random.Random) -> None:
    tokens = random_tokens(kind, rng)
    skip = rng.random() < 0.7
    keep = {token for token in kind.ours.special_ids if rng.random() < 0.3} if skip else set[int]()
    whole = kind.decode(tokens, keep if skip else None)
    detokenizer = Detokenizer(kind.ours, (), skip, keep_special=keep)
    pieces = [detokenizer.push(part) for part in cut(rng, tokens)]
    assert "".join(pieces) + detokenizer.finish() == whole, tokens
    places = [rng.randint(0, len(whole)) for _ in range(2)]
    stop = [whole[place : place + rng.randint(1, 3)] or "x" for place in places]
    detokenizer = Detokenizer(kind.ours, stop, skip, keep_special=keep)
    found = "".join(map(detokenizer.push, cut(rng, tokens))) + detokenizer.finish()
    assert found == until_stop(whole, stop), (tokens, stop)
    assert detokenizer.stopped == any(one in whole for one in stop)


def test_pieces_are_the_whole_decoding(kind: Kind) -> None:
    rng = random.Random(1)
    for _ in range(150):
        check(kind, rng)


@pytest.mark.slow
def test_pieces_of_many_answers(kind: Kind) -> None:
    rng = random.Random(2)
    for _ in range(10_000):
        check(kind, rng)


def test_what_follows_a_prompt_continues_its_text(kind: Kind) -> None:
    rng = random.Random(3)
    for _ in range(100):
        prompt, answer = random_tokens(kind, rng), random_tokens(kind, rng)
        before, whole = (kind.decode(tokens, set()) for tokens in (prompt, prompt + answer))
        if not prompt or "\ufffd" in whole or not whole.startswith(before):
            continue  # the answer changes the prompt's text
        if all(str(kind.ours.token_of(token)).startswith("<0x") for token in [prompt[-1], *answer[:1]]):
            continue  # of one run of bytes, only a character that the prompt begins is decoded with it
        context = kind.ours.context_of(prompt, skip_special_tokens=True)
        detokenizer = Detokenizer(kind.ours, preceding=context)
        assert before + detokenizer.push(answer) + detokenizer.finish() == whole, (prompt, answer)


def byte_tokens(kind: Kind, text: str) -> list[int]:
    """One token per byte of a text."""
    by_bytes = {kind.ours.bytes_of(token): token for token in range(kind.ours.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


@pytest.fixture(params=["Llama 2", "Gemma", "Llama 3", "whole text"])
def bytewise(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    """A kind with a token for each byte."""
    return load(request.param, tmp_path)


def test_a_character_that_a_prompt_begins_belongs_to_the_answer(bytewise: Kind) -> None:
    tokens = byte_tokens(bytewise, "aé🎉好b")
    for place, expected in [(5, "🎉好b"), (7, "好b"), (8, "好b"), (10, "b")]:
        detokenizer = Detokenizer(bytewise.ours, preceding=tokens[:place])
        assert detokenizer.push(tokens[place:]) + detokenizer.finish() == expected


def test_a_stop_string_counts_from_the_character_that_ends_behind_min_tokens(bytewise: Kind) -> None:
    """Also where characters that are complete are still held back."""
    tokens = byte_tokens(bytewise, "éé好")
    for min_tokens, expected in [(0, ""), (1, ""), (2, "é"), (3, "é"), (4, "éé好")]:
        detokenizer = Detokenizer(bytewise.ours, ["é"], min_tokens=min_tokens)
        assert detokenizer.push(tokens) + detokenizer.finish() == expected


def test_pieces_come_as_soon_as_they_are_final(tmp_path: Path) -> None:
    kind = load("Llama 2", tmp_path)
    detokenizer = Detokenizer(kind.ours)
    tokens = [kind.id_of("▁a"), *byte_tokens(kind, "é"), kind.id_of("▁the"), *byte_tokens(kind, "é")[:1] * 3]
    assert [detokenizer.push([token]) for token in tokens] == ["a", "", "", "é the", "", "\ufffd\ufffd", "\ufffd"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("alone", [False, True], ids=["never UTF-8", "special"])
def test_time_per_token_is_constant(kind: Kind, alone: bool) -> None:
    """Also for bytes that never are UTF-8, and for tokens without text."""
    lead = [token for token in range(256) if kind.ours.bytes_of(token) == "🎉".encode()[:1]] or [1]
    tokens = [kind.id_of("<s>") if alone else lead[0]] * 10_000
    detokenizer = Detokenizer(kind.ours, ["zzz"])
    start = time.process_time()
    for token in tokens:
        detokenizer.push([token])
    detokenizer.finish()
    assert time.process_time() - start < 2


_BY_TOKEN = ["Llama 2", "Gemma", "Llama 3", "DeepSeek", "WordPiece", "Metaspace", "T5", "no decoder"]
"""Kinds in which a token's text doesn't depend on the tokens around it, but for the first."""


@pytest.mark.parametrize("name", _BY_TOKEN)
def test_bytes_of_an_answers_tokens_are_its_bytes(name: str, tmp_path: Path) -> None:
    kind = load(name, tmp_path)
    rng = random.Random(4)
    for _ in range(100):
        tokens = [token for token in random_tokens(kind, rng) if kind.ours.token_of(token)]
        text = kind.decode(tokens)
        if "\ufffd" in text:
            continue
        first, *others = tokens or [kind.ours.vocab_size]
        data = kind.ours.bytes_of(first, first=True) + b"".join(map(kind.ours.bytes_of, others))
        assert data.decode() == text, tokens
