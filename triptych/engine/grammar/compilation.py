"""xgrammar (arXiv:2411.15100) for one tokenizer: which tokens a grammar allows next. xgrammar can't be interrupted, so
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
"""White space characters in a row within JSON: enough to indent, but a model can't loop on them."""

_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


class Matcher:
    """Position of one answer in its grammar."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", end_tokens: Sequence[int], vocabulary: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_tokens) or None)
        self._bitmask = np.zeros((1, mask_words(vocabulary)), np.int32)

    def bitmask(self) -> bytes:
        """Return the tokens that can come next as little-endian 32-bit words, lowest bit first."""
        # xgrammar leaves the mask untouched when everything is allowed
        self._bitmask.fill(-1)
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return self._bitmask.tobytes()

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False if the grammar doesn't allow it."""
        return bool(self._matcher.accept_token(token))


def mask_words(vocabulary: int) -> int:
    """Return the number of 32-bit words in a bitmask."""
    return -(-vocabulary // 32)


class Compilation:
    """Compiles grammars for one tokenizer. xgrammar is loaded on first use."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self._vocabulary = vocabulary

    def matcher(self, compiled: "xgrammar.CompiledGrammar", end_tokens: Sequence[int]) -> Matcher:
        """Return a matcher at the grammar's beginning. After the grammar's end any of ``end_tokens`` may come."""
        return Matcher(compiled, end_tokens, self._vocabulary)

    def compile(self, spec: GrammarSpec) -> "xgrammar.CompiledGrammar":
        """Compile a grammar. Raises InvalidRequest for an invalid one."""
        try:
            return self._compile(spec)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # xgrammar raises no narrower ones
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
        # each request names its own end tokens; here they only must not count as text
        end_tokens = load_generation_config(self.folder).get("eos_token_id")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a checkpoint may name no end token
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self._vocabulary, stop_token_ids=end_tokens
            )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 * 2**20)


def _first_line(error: Exception) -> str:
    """Return an error's message without xgrammar's time stamp, source file and line number."""
    return _SOURCE.sub("", (str(error).strip() or type(error).__name__).splitlines()[0])[:300]
