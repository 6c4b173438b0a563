"""Matches answers against grammars on threads of its own, so that no step waits for one.

What clients send has been compiled in a sandbox before (``check``): compiling it again takes bounded time, memory and
stack, and llguidance bounds the work for each token."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from triptych.engine.grammar.compiler import STACK_BYTES, Compiler
from triptych.engine.grammar.matching import Matching
from triptych.errors import HelperFailed, InternalError, RequestError
from triptych.executor import StartExecutor

log = logging.getLogger(__name__)

MAX_COMPILED = 32
"""Compiled grammars that are kept, least recently used dropped first."""
SLOW_THREADS = 2
"""Threads that compile, and match what is slow."""
NICENESS = 5
"""Matching yields to compute threads, but only a little: the next step may wait for the mask."""


class GrammarService:
    """Grammars of one tokenizer. One thread serves answers whose masks come quickly. Others serve those that are slow
    or have yet to be compiled, so that those delay no others."""

    def __init__(
        self, folder: Path, vocabulary: int, on_done: Callable[[], None], start_executor: StartExecutor
    ) -> None:
        """``vocabulary`` is the model's number of logits. ``on_done`` is called on a thread of the service when a
        request becomes ready or fails. No thread is started before the first grammar; the vocabulary is loaded at
        once, because that would block all others later. Raises CheckpointError."""
        self._compiler = Compiler(folder, vocabulary)
        self._on_done = on_done
        self._start_executor = start_executor
        self._changed = threading.Condition()
        self._work = threading.RLock()
        self._quick: list[Matching] = []
        self._slow: list[Matching] = []
        self._executors: tuple[Executor, Executor] | None = None
        """Threads of the quick answers, and of the slow ones."""
        self._ending = False
        self._compiling = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_compiled = 0

    def start(self, text: str, end_tokens: frozenset[int], generated: Sequence[int] = ()) -> Matching:
        """Start matching a request whose answer begins with the tokens ``generated`` against a grammar in Lark. After
        the grammar's end any of ``end_tokens`` may come. Raises HelperFailed if the threads can't be started."""
        if self._executors is None:
            self._executors = self._start_threads()
        matching = Matching(text, end_tokens, generated, changed=self._changed, on_accept=self._put)
        self._put(matching)
        return matching

    def close(self) -> None:
        """End the threads. Open matchings never become ready."""
        with self._work:
            self._ending = True
        for executor in self._executors or ():
            executor.shutdown(wait=True, cancel_futures=True)

    def debug_state(self) -> dict[str, Any]:
        """Return internals for tests: whether the threads were started, and the number of compilations."""
        return {"started": self._executors is not None, "num_compiled": self._num_compiled}

    def _start_threads(self) -> tuple[Executor, Executor]:
        quick = None
        try:
            quick = self._start_executor(1, "grammars", stack_bytes=STACK_BYTES, niceness=NICENESS)
            return quick, self._start_executor(SLOW_THREADS, "grammars", stack_bytes=STACK_BYTES, niceness=NICENESS)
        except RuntimeError as error:
            if quick is not None:
                quick.shutdown()
            raise HelperFailed(f"grammars: {error}") from None

    def _put(self, matching: Matching) -> None:
        with self._work:
            if matching.queued or self._ending:
                return
            assert self._executors is not None
            matching.queued = True
            queue = self._slow if matching.is_slow else self._quick
            queue.append(matching)
            self._executors[matching.is_slow].submit(self._serve, queue)

    # ── the threads ──────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, queue: list[Matching]) -> None:
        """Advance the answer of a queue that has taken the least time so far."""
        with self._work:
            if self._ending:
                return
            matching = min(queue, key=lambda one: one.charged)
            queue.remove(matching)
        notify = not matching.closed and self._advance(matching)
        with self._work:
            matching.queued = False
            if matching.is_behind:
                self._put(matching)
        if notify:
            self._on_done()

    def _advance(self, matching: Matching) -> bool:
        """Advance a request, or record why it can't continue. Returns whether ``on_done`` must be called."""
        try:
            if matching.matcher is None:
                matching.matcher = self._matcher(matching)
            return matching.advance(self._compiler)
        except RequestError as error:
            if matching.matcher is None or matching.is_alone:
                matching.fail(error)
            else:
                # others may have used up what copies of a matcher share
                matching.restart_alone()
                return False
        except InternalError as error:
            matching.fail(error)
        except Exception:
            log.exception("matching a grammar failed")
            matching.fail(InternalError("matching the grammar failed"))
        return True

    def _matcher(self, matching: Matching) -> LLMatcher:
        """Return a matcher at the beginning of a request's grammar. Unless it is to be alone, it shares what it learns
        with others of that text."""
        text = matching.text
        with self._compiling:
            shared = self._compiled.pop(text, None)
            if shared is not None and not matching.is_alone:
                self._compiled[text] = shared
                return shared.deep_copy()
        self._num_compiled += 1
        compiled = self._compiler.compile(text)
        if matching.is_alone:
            return compiled
        with self._compiling:
            self._compiled[text] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()
