"""Checks of clients' grammars in sandboxed workers, shared fairly among clients."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from triptych.api.fair_executor import FairExecutor
from triptych.errors import GrammarTooCostly, InternalError, RequestError
from triptych.prompt.answer_grammar import AnswerGrammar
from triptych.prompt.grammar_check import GrammarChecked, GrammarToCheck
from triptych.sandbox.protocol import Limits, WorkerSpec
from triptych.sandbox.workers import WorkerPool

WORKERS = 2
"""One client never occupies all of them."""
LIMITS = Limits(memory_bytes=2**28, output_bytes=2**20, seconds=5.0)
"""Limits of one grammar. An instance compiles it once more."""
MAX_CHECKED = 4096
"""Grammars whose result is kept, least recently used dropped first."""


class GrammarChecker:
    """Compiles each new grammar in a worker before an instance does. Workers start with the first one."""

    def __init__(self, folder: Path) -> None:
        self._spec = WorkerSpec("triptych.prompt.grammar_check:serve", str(folder.absolute()), LIMITS)
        self._executor = FairExecutor(WORKERS)
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._closed = False
        self._checked: OrderedDict[bytes, RequestError | None] = OrderedDict()

    async def checked(self, client: str, make: Callable[[], AnswerGrammar | None]) -> str | None:
        """Return the text of the grammar that ``make`` returns, which runs on a thread. Raises InvalidRequest,
        GrammarTooCostly and InternalError if answers can't be matched against it."""
        return await self._executor.run(client, lambda: self._check(make()))

    def close(self) -> None:
        """End the workers. Pending checks raise InternalError."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close()
        self._executor.close()

    def _check(self, grammar: AnswerGrammar | None) -> str | None:
        if grammar is None:
            return None
        request = msgspec.msgpack.encode(GrammarToCheck(grammar.text, grammar.parts))
        digest = hashlib.blake2b(request, digest_size=32).digest()
        with self._lock:
            known = digest in self._checked
            if known:
                self._checked.move_to_end(digest)
                error = self._checked[digest]
        if not known:
            error = self._result(request, grammar)
            with self._lock:
                self._checked[digest] = error
                if len(self._checked) > MAX_CHECKED:
                    self._checked.popitem(last=False)
        if error is not None:
            raise type(error)(str(error), error.param)
        return grammar.text

    def _result(self, request: bytes, grammar: AnswerGrammar) -> RequestError | None:
        with self._lock:
            if self._closed:
                raise InternalError("the service is shutting down")
            if self._pool is None:
                self._pool = WorkerPool(self._spec, WORKERS, GrammarTooCostly)
        try:
            [(payload, _)] = self._pool.results(b"", request)
        except GrammarTooCostly as error:
            param = grammar.parts[0].param if len(grammar.parts) == 1 else None
            return GrammarTooCostly(f"the grammar is too costly to compile: {error}", param)
        result = msgspec.msgpack.decode(payload, type=GrammarChecked)
        if result.error is None:
            return None
        found = result.error.error(result.message, result.param)
        assert isinstance(found, RequestError)
        return found
