"""llguidance for one tokenizer: which tokens a grammar allows next."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triptych.engine.grammar.tokens import load_tokens
from triptych.errors import GrammarTooCostly, InvalidRequest, RequestError

STACK_BYTES = 2**26
"""Stack of a thread that compiles or matches: both recurse as deep as a grammar nests."""
LIMITS = LLParserLimits(max_items_in_row=1000, max_lexer_states=50_000, verbose_errors=False)
"""Bounds what one token costs: at most a tenth of a second and, over an answer, 100 MB."""
_OPTIONS = '\n%llguidance {"no_forcing": true, "allow_invalid_utf8": false}\n'
"""The last options of a text count. Without forcing, all tokens that match are allowed, not one tokenizer's choice."""
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |^failed to compile JSON schema: ")
_COSTLY = re.compile(r"limit|fuel|too (many|big|large|deep)|max is|recursion", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_NO_TEXT = "NoExtension"
_MAX_REASON = 300


class Compiler:
    """Compiles grammars. Its methods may take long, and crash where the caller's stack is too small: grammars that come
    from clients are compiled in a sandbox first (``check``)."""

    def __init__(self, folder: Path, vocabulary: int | None = None) -> None:
        """``vocabulary`` is the number of tokens that masks are for; by default those that have text. A large
        one takes a second or two, without releasing Python's lock. Raises CheckpointError."""
        tokens, special = load_tokens(folder, vocabulary)
        self._vocabulary = vocabulary = len(tokens)
        self._tokenizer = LLTokenizer(_Tokens([*tokens, b"<end>"], [*special, vocabulary]), eos_token=[vocabulary])  # type: ignore[arg-type]

    def compile(self, text: str) -> LLMatcher:
        """Return a matcher at the beginning of a grammar in Lark. Copies of it share what they learn of the grammar.
        Raises InvalidRequest and GrammarTooCostly."""
        is_list = text.startswith("{")
        matcher = LLMatcher(self._tokenizer, text if is_list else text + _OPTIONS, log_level=0, limits=LIMITS)
        raise_error(matcher)
        return matcher

    def bitmask(self, matcher: LLMatcher, end_tokens: Sequence[int]) -> bytes:
        """Return the tokens that can come next as little-endian 32-bit words, lowest bit first. ``end_tokens`` can come
        where the grammar ends, and nowhere else. Raises as ``compile``."""
        words = np.frombuffer(matcher.compute_bitmask(), "<u4").copy()
        if matcher.get_error().startswith(_NO_TEXT):
            words[:] = 0
            return words[: mask_words(self._vocabulary)].tobytes()
        raise_error(matcher)
        may_end = bool(words[self._vocabulary // 32] >> self._vocabulary % 32 & 1)
        words[self._vocabulary // 32] &= np.uint32((1 << self._vocabulary % 32) - 1)
        for token in end_tokens:
            bit = np.uint32(1 << token % 32)
            words[token // 32] = words[token // 32] | bit if may_end else words[token // 32] & ~bit
        return words[: mask_words(self._vocabulary)].tobytes()


def mask_words(vocabulary: int) -> int:
    """Return the number of 32-bit words in a bitmask."""
    return -(-vocabulary // 32)


def raise_error(matcher: LLMatcher) -> None:
    """Raise the error that a matcher ended in, if any."""
    if matcher.is_error():
        raise error_of(matcher.get_error())


def error_of(message: str) -> RequestError:
    """Return the error for a message of llguidance."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("<")] or ["no reason given"]
    # a regular expression's error has the expression and a pointer into it first
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    while (shorter := _PLACE.sub("", reason)) != reason:
        reason = shorter
    if reason.startswith("oneOf constraints"):
        reason = "the schemas of 'oneOf' may overlap; 'anyOf' can be enforced"
    elif reason.startswith("panic"):
        return GrammarTooCostly("the grammar is too large or too deeply nested")
    elif keywords := _UNSUPPORTED.fullmatch(reason):
        names = keywords[1].replace('"', "'")
        reason = f"{names} can't be enforced"
    reason = reason[:_MAX_REASON]
    return (
        GrammarTooCostly(f"the grammar is too costly: {reason}") if _COSTLY.search(reason) else InvalidRequest(reason)
    )


class _Tokens:
    """A vocabulary in the form that llguidance takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = special[-1]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("nothing is forced, so nothing is tokenized")
