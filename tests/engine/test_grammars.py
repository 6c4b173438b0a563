"""Masks of grammars: what they allow, what an answer may cost, and whom that concerns."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.support.serving import wait_for
from tests.support.tokenizer_kinds import KINDS
from triptych.checkpoint.config_files import load_config
from triptych.demo import MODEL_DIR
from triptych.engine.grammar import matching as matching_module
from triptych.engine.grammar.compiler import Compiler
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.service import SLOW_THREADS, GrammarService
from triptych.errors import GrammarTooCostly, HelperFailed, InternalError, InvalidRequest, TriptychError
from triptych.executor import started_executor
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.tokenizer import Tokenizer as PromptTokenizer

FOLDER = Path(MODEL_DIR)
VOCABULARY = load_config(FOLDER)["text_config"]["vocab_size"]
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
END = frozenset({0})
SLOW = f'start: {"x " * 10} "b"\nx: {"y " * 10}\ny: {"z " * 10}\nz: "a" z | ""'
"""Each "a" takes longer to match than the one before."""
MANY_STATES = r"start: /(\w+\s?){1,300}/"


class Service:
    """A grammar service, and how to wait for its results."""

    def __init__(self, folder: Path = FOLDER, vocabulary: int = VOCABULARY) -> None:
        self.vocabulary = vocabulary
        self._done = threading.Event()
        self.grammars = GrammarService(folder, vocabulary, self._done.set, started_executor)

    def start(self, text: str, tokens: list[int] | None = None, end: frozenset[int] = END) -> Matching:
        return self.grammars.start(text, end, tokens or [])

    def wait(self, matching: Matching, seconds: float = 20) -> TriptychError | None:
        """Until it is ready, or has failed, as a loop that ``on_done`` wakes does."""
        end = time.monotonic() + seconds
        while not matching.ready and matching.error is None:
            assert time.monotonic() < end
            self._done.wait(end - time.monotonic())
            self._done.clear()
        return matching.error

    def allowed(self, matching: Matching) -> set[int]:
        mask = matching.mask(20)
        assert mask is not None
        words = memoryview(mask).cast("I")
        return {token for token in range(self.vocabulary) if words[token // 32] >> token % 32 & 1}

    def masks(self, matching: Matching, tokens: list[int]) -> list[set[int]]:
        found = [self.allowed(matching)]
        for token in tokens:
            matching.accept(token)
            found.append(self.allowed(matching))
        return found


@pytest.fixture
def made() -> Iterator[Service]:
    made = Service()
    yield made
    made.grammars.close()


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


[A] = tokens_of("a")


def drive(service: Service, matching: Matching, token: int, most: int = 5000) -> TriptychError | None:
    """Accept the same token until the matching fails."""
    for _ in range(most):
        if service.wait(matching) is not None:
            break
        matching.accept(token)
    return matching.error


def test_masks_allow_what_continues_a_match(made: Service) -> None:
    text = "a red circle"
    tokens = tokens_of(text)
    masks = made.masks(made.start("start: /([a-z]+ ?)+/"), tokens)
    spelled = {number: TOKENIZER.decode([number]) for number in range(VOCABULARY)}
    want = {number for number, piece in spelled.items() if re.fullmatch("([a-z]+ ?)+", piece)}
    assert masks[0] == want
    assert all(token in mask for token, mask in zip(tokens, masks, strict=False))
    resumed = made.start("start: /([a-z]+ ?)+/", tokens[:1])
    assert made.masks(resumed, tokens[1:]) == masks[1:]


def test_after_the_end_comes_an_end_token_of_the_request(made: Service) -> None:
    ends = frozenset({0, 5})
    assert made.masks(made.start('start: "a"', end=ends), [A]) == [{A}, set(ends)]
    # as a stop token, a letter ends an answer, so it can't come before the grammar's end
    assert made.masks(made.start('start: "ab"? "c"', end=frozenset({A})), tokens_of("c")) == [
        set(tokens_of("c")),
        {A},
    ]


def test_a_token_that_is_not_allowed_is_an_internal_error(made: Service) -> None:
    matching = made.start('start: "a"')
    assert made.wait(matching) is None
    matching.accept(A + 1)
    assert isinstance(made.wait(matching), InternalError)


def test_an_invalid_grammar_is_its_requests_error(made: Service) -> None:
    other = made.start("start: /a+/")
    assert isinstance(made.wait(made.start("start: /(/")), InvalidRequest)
    assert made.masks(other, [A])


def test_a_grammar_is_compiled_once(made: Service) -> None:
    for _ in range(3):
        matching = made.start("start: /a+/")
        assert made.wait(matching) is None
        matching.close()
    assert made.grammars.debug_state()["num_compiled"] == 1


def test_a_costly_answer_fails_alone(made: Service) -> None:
    same, other = made.start(SLOW), made.start("start: /a+/")
    assert made.wait(same) is made.wait(other) is None
    assert isinstance(drive(made, made.start(SLOW), A), GrammarTooCostly)
    assert made.masks(other, [A, A])
    assert made.masks(same, [A])


def test_an_answer_has_a_time_limit(made: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching_module, "TOTAL_SECONDS", 0.0)
    monkeypatch.setattr(matching_module, "FREE_SECONDS", 0.0)
    error = made.wait(made.start("start: /a+/"))
    assert isinstance(error, GrammarTooCostly)
    assert "matching the answer took longer" in str(error)


@pytest.mark.slow
def test_what_others_have_used_up_is_no_limit_for_a_request(made: Service) -> None:
    """Answers of one grammar share its lexer, whose states are limited."""
    letters = tokens_of("abcdefghijklmnopqrstuvwxyz ")
    rng = random.Random(1)
    for _ in range(40):
        matching = made.start(MANY_STATES)
        for _ in range(60):
            if made.wait(matching) is not None:
                break
            matching.accept(rng.choice([one for one in letters if one in made.allowed(matching)]))
        assert matching.error is None
        matching.close()


@pytest.fixture
def slow_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, list[str]]]:
    """What work on slow grammars acquires, and the grammars that were worked on, in their order."""
    turns, order, advance = threading.Semaphore(0), list[str](), Matching.advance

    def held(matching: Matching, compiler: Compiler) -> bool:
        order.append(matching.text)
        if matching.text == SLOW:
            assert turns.acquire(timeout=60)
        return advance(matching, compiler)

    monkeypatch.setattr(Matching, "advance", held)
    yield turns, order
    turns.release(1000)


def test_slow_grammars_do_not_delay_a_quick_one(
    made: Service, slow_held: tuple[threading.Semaphore, list[str]]
) -> None:
    _, order = slow_held
    quick = made.start("start: /a+/")
    assert made.masks(quick, [A])
    slow = [made.start(SLOW, [A] * 40) for _ in range(8)]
    wait_for(lambda: SLOW in order)
    assert made.masks(quick, [A] * 20)
    assert not any(one.ready or one.error for one in slow)


def test_a_new_grammar_goes_before_those_that_have_taken_long(
    made: Service, slow_held: tuple[threading.Semaphore, list[str]]
) -> None:
    turns, order = slow_held
    turns.release(8)
    slow = [made.start(SLOW) for _ in range(8)]
    assert {made.wait(one) for one in slow} == {None}
    order.clear()
    for one in slow:
        one.charged += 1.0
        one.is_slow = True
        one.accept(A)
    wait_for(lambda: len(order) == SLOW_THREADS)
    new = made.start("start: /b+/")
    turns.release()  # one thread is free, and others would hold it for good
    assert made.masks(new, [])


def test_a_thread_that_cannot_be_started_fails_its_own_request(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    with monkeypatch.context() as broken:

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        broken.setattr(threading.Thread, "start", fail)
        with pytest.raises(HelperFailed, match="can't start new thread"):
            made.start("start: /a+/")
    assert made.wait(made.start("start: /a+/")) is None


def test_nothing_is_started_before_the_first_grammar(made: Service) -> None:
    assert not made.grammars.debug_state()["started"]


# ── a grammar's text is the client's text ────────────────────────────────────────────────────────────────────────────

SPECIAL = ["<|a|>", "<|end|>", "ab"]
ADDED = ["<tool>", "bc"]
ACROSS_TOKENS = ("whole text", "mixed", "suffix", "CTC")
"""Kinds in which what a token adds to a text depends on others, which masks don't know."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ACROSS_TOKENS])
def test_texts_match_whatever_tokens_a_model_prefers(kind: str, tmp_path: Path) -> None:
    """Special tokens that look like text have none; added ones that aren't special do."""
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in ADDED])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    vocabulary, end = tokenizer.get_vocab_size() + 7, tokenizer.token_to_id("<|end|>")
    assert end is not None
    service, ours, rng = Service(tmp_path, vocabulary), PromptTokenizer(tmp_path), random.Random(1)
    texts = set()
    try:
        for pattern in (
            "[ a-z<>|]{0,24}",
            "( ?<tool>| ?ab|bc?| a){0,9}",
            "[^x]{0,5}",
            "( ?(a|the|é|你好|。)\\.?){0,9}",
        ):
            for _ in range(3):
                matching, tokens = service.start(f"start: /{pattern}/", end=frozenset({end})), list[int]()
                while (token := rng.choice(sorted(service.allowed(matching)))) != end:
                    tokens.append(token)
                    matching.accept(token)
                detokenizer = Detokenizer(ours, preceding=[tokenizer.token_to_id("a") or 0])
                text = detokenizer.push(tokens) + detokenizer.finish()
                assert re.fullmatch(pattern, text), tokens
                texts.add(text)
    finally:
        service.grammars.close()
    assert len(texts) > 4


def test_tokens_of_any_length_are_loaded(tmp_path: Path) -> None:
    """Masks lack those that are too long; no vocabulary needs certain tokens."""
    names = ["b", "c" * 999, "c" * 5000, "<0x64>"]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    service = Service(tmp_path, len(names))
    try:
        assert service.masks(service.start("start: /[bcd]*/", end=frozenset({2})), [1]) == [{0, 1, 2, 3}] * 2
        assert service.masks(service.start("start: /[bcd]+/", end=frozenset({2})), []) == [{0, 1, 3}]
    finally:
        service.grammars.close()


def test_special_tokens_can_be_demanded(made: Service) -> None:
    assert made.masks(made.start("start: <[0]> /a/", end=frozenset({5})), [0, A]) == [{0}, {A}, {5}]


def test_json_is_matched_to_its_end(made: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["red", 1]}}, "required": ["a"]}
    matching = made.start(f"start: %json {json.dumps(schema | {'additionalProperties': False})}")
    masks = made.masks(matching, tokens_of('{"a": "red"}'))
    assert masks[-1] == set(END)
