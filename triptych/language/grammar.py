"""Structured output: which tokens may come next, by a grammar. xgrammar (arXiv:2411.15100) does the work."""

import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from triptych.errors import InvalidRequest
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.models.config_files import load_generation_config

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

MAX_WHITESPACE = 20
"""Characters of white space in a row within JSON: enough to indent, and models can't get lost in it."""


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher", bitmask: Tensor) -> None:
        self._matcher = matcher
        self._bitmask = bitmask

    def bitmask(self) -> Tensor:
        """Which tokens can come next: int32 of shape (1, words), for ``constrain``; good until the next call."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return self._bitmask

    def accept(self, token: int) -> bool:
        """Takes note of the token that was chosen. Whether the answer is complete with it."""
        accepted = self._matcher.accept_token(token)
        return bool(self._matcher.is_terminated()) or not accepted


def constrain(logits: Tensor, bitmask: Tensor) -> None:
    """Puts the logits [vocabulary] of all tokens that a matcher's bitmask, on the same device, rules out at minus
    infinity, in place."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits[None], bitmask)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one at a time on a thread of its own; equal ones only once."""

    def __init__(self, folder: Path, vocabulary: int, on_done: Callable[[], None]) -> None:
        """``vocabulary`` is how many logits the model has. ``on_done`` is called, on that thread, whenever a grammar
        is ready. Nothing is loaded before the first grammar."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def start(self, spec: GrammarSpec, end_tokens: frozenset[int], generated: Sequence[int] = ()) -> "Future[Matcher]":
        """A matcher that stands after the tokens ``generated``; after the grammar's end any of ``end_tokens`` may come.
        The future raises InvalidRequest for a grammar that makes no sense."""
        future = self._executor.submit(self._matcher, spec, end_tokens, generated)
        future.add_done_callback(lambda _: self._on_done())
        return future

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, spec: GrammarSpec, end_tokens: frozenset[int], generated: Sequence[int]) -> Matcher:
        import xgrammar

        began = time.monotonic()
        try:
            compiled = self._compile(spec)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # the library has no narrower one
            raise InvalidRequest(f"the {spec.kind.value} can't be used: {_first_line(error)}") from None
        if (took := time.monotonic() - began) > 1:
            log.warning("compiling a %s of %d characters took %.1f s", spec.kind.value, len(spec.text), took)
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_tokens) or None)
        for token in generated:
            matcher.accept_token(token)
        return Matcher(matcher, xgrammar.allocate_token_bitmask(1, self._vocabulary))

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

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self._folder / "tokenizer.json"))  # type: ignore[no-untyped-call]
        # which ones really end an answer is each request's own affair; here they only aren't text
        end_tokens = load_generation_config(self._folder).get("eos_token_id")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a checkpoint may name none
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self._vocabulary, stop_token_ids=end_tokens
            )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 * 2**20)


def _first_line(error: Exception) -> str:
    """Without what the library adds for its own developers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
