"""Structured output: which tokens may come next, by a grammar. xgrammar (arXiv:2411.15100) does the work."""

import json
import logging
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from triptych.errors import InvalidRequest
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.models.config_files import load_generation_config
from triptych.sandbox.child import Handler
from triptych.sandbox.protocol import Limits, WorkerSpec
from triptych.sandbox.workers import Workers

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

MAX_WHITESPACE = 20
"""Characters of white space in a row within JSON: enough to indent, and models can't get lost in it."""
LIMITS = Limits(memory_bytes=2**30, seconds=5.0)
"""For compiling one grammar."""
MAX_KNOWN = 1024
"""Grammars that are known to compile within the limits."""

_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


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
    """Compiles grammars for one tokenizer, one at a time on a thread of its own; equal ones only once.

    Nothing can stop xgrammar, and a few characters can ask it for minutes and gigabytes. So each grammar is compiled in
    a sandboxed worker first, and here only when that went well. Handing over what the worker made would take longer: as
    text, which is all there is, a schema of 50 properties has 12 MB.
    """

    def __init__(self, folder: Path, vocabulary: int, on_done: Callable[[], None]) -> None:
        """``vocabulary`` is how many logits the model has. ``on_done`` is called, on that thread, whenever a grammar
        is ready. Nothing is loaded before the first grammar."""
        self._compilation = _Compilation(folder, vocabulary)
        self._vocabulary = vocabulary
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._closed = False
        self._known: OrderedDict[GrammarSpec, None] = OrderedDict()

    def start(self, spec: GrammarSpec, end_tokens: frozenset[int], generated: Sequence[int] = ()) -> "Future[Matcher]":
        """A matcher that stands after the tokens ``generated``; after the grammar's end any of ``end_tokens`` may come.
        The future raises InvalidRequest for a grammar that makes no sense, or too much of it."""
        future = self._executor.submit(self._matcher, spec, end_tokens, generated)
        future.add_done_callback(lambda _: self._on_done())
        return future

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        if "_workers" in vars(self):
            self._workers.close()

    def _matcher(self, spec: GrammarSpec, end_tokens: frozenset[int], generated: Sequence[int]) -> Matcher:
        import xgrammar

        self._try_out(spec)
        began = time.monotonic()
        compiled = self._compilation.compile(spec)
        if (took := time.monotonic() - began) > 1:
            log.warning("compiling a %s of %d characters took %.1f s", spec.kind.value, len(spec.text), took)
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_tokens) or None)
        for token in generated:
            matcher.accept_token(token)
        return Matcher(matcher, xgrammar.allocate_token_bitmask(1, self._vocabulary))

    def _try_out(self, spec: GrammarSpec) -> None:
        """Raises InvalidRequest for what can't be compiled within the limits."""
        if spec.kind is GrammarKind.JSON_OBJECT or spec in self._known:
            return
        try:
            for _ in self._workers.results(b"", msgspec.msgpack.encode(spec)):
                pass
        except InvalidRequest as error:
            raise InvalidRequest(f"the {spec.kind.value} can't be used: {error}") from None
        self._known[spec] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    @cached_property
    def _workers(self) -> Workers:
        argument = json.dumps([str(self._compilation.folder), self._vocabulary])
        workers = Workers(WorkerSpec("triptych.language.grammar:serve", argument, LIMITS), 1, InvalidRequest)
        if self._closed:
            workers.close()
        return workers


def serve(argument: str) -> Handler:
    """What the worker runs."""
    folder, vocabulary = json.loads(argument)
    compilation = _Compilation(Path(folder), vocabulary)
    compilation.compile(GrammarSpec(GrammarKind.JSON_OBJECT, ""))  # before there are limits: what all of them need

    def handle(_: bytes, spec: bytes) -> Iterator[tuple[bytes, Sequence[bytes]]]:
        compilation.compile(msgspec.msgpack.decode(spec, type=GrammarSpec))
        yield b"", []

    return handle


class _Compilation:
    """xgrammar for one tokenizer; loaded when it is first used."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self._vocabulary = vocabulary

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
