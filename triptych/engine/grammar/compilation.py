"""xgrammar (arXiv:2411.15100) for one tokenizer: which tokens may come next, by a grammar. It can't be interrupted, so
it is imported and run in sandboxed processes only."""

import json
import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from triptych.checkpoint.config_files import load_generation_config
from triptych.errors import InvalidRequest
from triptych.messages.work import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 20
"""Characters of white space in a row within JSON: enough to indent, and models can't get lost in it."""

_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", end_tokens: Sequence[int], vocabulary: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_tokens) or None)
        self._bitmask = np.zeros((1, mask_words(vocabulary)), np.int32)

    def bitmask(self) -> bytes:
        """Which tokens can come next: little-endian words of 32 bits, the first token's the lowest."""
        # without a change, it leaves the mask as it is
        self._bitmask.fill(-1)
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return self._bitmask.tobytes()

    def accept(self, token: int) -> bool:
        """Takes note of the token that was chosen. False for one that can't come next."""
        return bool(self._matcher.accept_token(token))


def mask_words(vocabulary: int) -> int:
    """How many words of 32 bits a bitmask has."""
    return -(-vocabulary // 32)


class Compilation:
    """Compiles grammars for one tokenizer; xgrammar is loaded when it is first used."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self._vocabulary = vocabulary

    def matcher(self, compiled: "xgrammar.CompiledGrammar", end_tokens: Sequence[int]) -> Matcher:
        """At the grammar's beginning; after its end any of ``end_tokens`` may come."""
        return Matcher(compiled, end_tokens, self._vocabulary)

    def compile(self, spec: GrammarSpec) -> "xgrammar.CompiledGrammar":
        """Raises InvalidRequest for a grammar that makes no sense."""
        try:
            return self._compile(spec)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # the library has no narrower one
            if "bad_alloc" in str(error):
                raise MemoryError from None
            raise InvalidRequest(_first_line(error)) from None

    def _compile(self, spec: GrammarSpec) -> "xgrammar.CompiledGrammar":
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._compiler.compile_json_schema(spec.text, max_whitespace_cnt=MAX_WHITESPACE)
            case GrammarKind.JSON_OBJECT:
                return self._compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(spec.text)
            case GrammarKind.CHOICE:
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
                return self._compiler.compile_grammar(f"root ::= {choices}")
            case GrammarKind.GRAMMAR:
                return self._compiler.compile_grammar(spec.text)
            case GrammarKind.STRUCTURAL_TAG:
                tag = {"type": "structural_tag", "format": json.loads(spec.text)}
                return self._compiler.compile_structural_tag(json.dumps(tag))

    @cached_property
    def _compiler(self) -> "xgrammar.GrammarCompiler":
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"))  # type: ignore[no-untyped-call]
        # which ones really end an answer is each request's own affair; here they only aren't text
        end_tokens = load_generation_config(self.folder).get("eos_token_id")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a checkpoint may name none
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self._vocabulary, stop_token_ids=end_tokens
            )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 * 2**20)


def _first_line(error: Exception) -> str:
    """Without what the library adds for its own developers: the time, and its source's file and line."""
    return _SOURCE.sub("", (str(error).strip() or type(error).__name__).splitlines()[0])[:300]
