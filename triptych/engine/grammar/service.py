"""Matches answers against grammars in child processes, because xgrammar can't be interrupted. Even a short grammar can
take minutes and gigabytes, to compile or to match one token.

A fork server loads xgrammar once. Each grammar in use has its own process, which compiles it and matches all requests
that use it. A kernel timer ends a process that exceeds its processor time. A new process then matches the answers of
its other requests again from the start.
"""

import contextlib
import itertools
import json
import logging
import os
import selectors
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from triptych.engine.grammar.budget import (
    COMPILE_SECONDS,
    COMPILE_TIMEOUT,
    KILL_SECONDS,
    LIMITS,
    MAX_IDLE,
    MAX_REBUILDS,
    NICENESS,
)
from triptych.engine.grammar.compilation import mask_words
from triptych.engine.grammar.compile_queue import CompileQueue, RejectedGrammars
from triptych.engine.grammar.matching import Matching, too_costly
from triptych.engine.grammar.messages import Compile
from triptych.engine.grammar.process_queue import ProcessQueue
from triptych.errors import InternalError, InvalidRequest, RequestError, TriptychError
from triptych.messages.work import GrammarSpec
from triptych.observe.machine import describe_exit
from triptych.sandbox.fork_client import ForkServer
from triptych.sandbox.protocol import ForkSpec, ProtocolError, Result, TaskFailed

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Time for the fork server to load xgrammar and the tokenizer."""
SERVER_TIMEOUT = 5.0
"""Seconds to wait for the fork server to kill a process, before the server itself is killed."""
CHECK_INTERVAL = 1.0
"""Seconds between checks for overdue processes."""


class _CompileSlot(NamedTuple):
    """One of the ``MAX_COMPILING`` slots."""

    client: str
    """The client that is charged for the time."""
    began: float
    """By ``time.monotonic``."""


@dataclass
class _Grammar:
    """A grammar that requests use or have used lately."""

    spec: GrammarSpec
    matchings: dict[int, Matching] = field(default_factory=dict)
    process_queue: ProcessQueue | None = None
    """Queue of its process; None while the grammar waits to be compiled."""
    compiled: bool = False
    slot: _CompileSlot | None = None
    """Set while the grammar is being compiled."""


class GrammarService:
    """Grammars of one tokenizer. All work is done on its own thread and in child processes."""

    def __init__(self, folder: Path, vocabulary: int, on_done: Callable[[], None]) -> None:
        """``vocabulary`` is the model's number of logits. ``on_done`` is called on the service's thread when a request
        becomes ready or fails. Nothing is started before the first grammar."""
        argument = json.dumps([str(folder.absolute()), vocabulary])
        self._spec = ForkSpec("triptych.engine.grammar.process:serve", argument, LIMITS, NICENESS)
        self._mask_bytes = 4 * mask_words(vocabulary)
        self._on_done = on_done
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._started: deque[Matching] = deque()
        self._closed: deque[Matching] = deque()
        self._wake_receive, self._wake_send = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ending = False
        self._thread: threading.Thread | None = None
        # used by the thread only
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receive, selectors.EVENT_READ)
        self._server: ForkServer | None = None
        self._server_began = 0.0
        self._grammars: dict[GrammarSpec, _Grammar] = {}
        self._idle: OrderedDict[GrammarSpec, None] = OrderedDict()
        self._by_number: dict[int, _Grammar] = {}
        self._compile_queue = CompileQueue()
        self._rejected = RejectedGrammars()
        self._num_processes = 0

    def start(
        self, spec: GrammarSpec, end_tokens: frozenset[int], generated: Sequence[int] = (), client: str = ""
    ) -> Matching:
        """Start matching a request whose answer begins with the tokens ``generated``. After the grammar's end any of
        ``end_tokens`` may come. Compilation is shared fairly among ``client``s. Raises InternalError if the
        service's thread can't be started."""
        if self._thread is None:
            self._thread = self._started_thread()
        matching = Matching(
            next(self._numbers),
            spec,
            end_tokens,
            generated,
            client,
            changed=self._changed,
            on_close=self._on_close,
            mask_bytes=self._mask_bytes,
        )
        self._started.append(matching)
        self._wake()
        return matching

    def _started_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise InternalError(f"grammars: {error}") from None
        return thread

    def close(self) -> None:
        """End the thread and all processes. Open matchings never become ready."""
        with self._changed:
            self._wake()
            self._ending = True
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake_receive)
        os.close(self._wake_send)

    def debug_state(self) -> dict[str, Any]:
        """Return internals for tests: whether the thread was started, the fork server's process id, the number of
        forked processes, and each compiled grammar's process number."""
        return {
            "started": self._thread is not None,
            "server_pid": self._server.process.pid if self._server is not None else None,
            "num_processes": self._num_processes,
            "process_numbers": {
                spec: grammar.process_queue.number
                for spec, grammar in list(self._grammars.items())
                if grammar.process_queue is not None
            },
        }

    def _on_close(self, matching: Matching) -> None:
        self._closed.append(matching)
        self._wake()

    def _wake(self) -> None:
        with self._changed, contextlib.suppress(BlockingIOError):  # a wake-up is pending
            if not self._ending:
                os.write(self._wake_send, b"\0")

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._ending:
            try:
                self._run_once()
            except Exception:
                log.exception("the grammar thread failed; restarting the processes of all grammars in use")
                self._server_ended()
                self._on_done()
        if self._server is not None:
            self._server.close()
        with self._changed:
            for grammar in self._grammars.values():
                self._release_process(grammar)

    def _run_once(self) -> None:
        notify = False
        for key, _ in self._selector.select(CHECK_INTERVAL):
            if key.fd == self._wake_receive:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_receive, 4096)
            elif isinstance(key.data, _Grammar):
                with self._changed:
                    notify |= self._on_answers(key.data)
            else:
                notify |= self._on_control()
        with self._changed:
            while self._closed:
                self._remove(self._closed.popleft())
            while self._started:
                notify |= self._add(self._started.popleft())
            while (turn := self._compile_queue.next()) is not None:
                spec, client = turn
                self._grammars[spec].slot = _CompileSlot(client, time.monotonic())
                notify |= not self._try_start_process(self._grammars[spec])
            self._kill_overdue()
        if notify:
            self._on_done()

    def _add(self, matching: Matching) -> bool:
        """Attach a new request to its grammar. Returns whether the request has failed."""
        if matching.closed:
            return False
        if (error := self._rejected.get(matching.spec)) is not None:
            matching.fail(error)
            return True
        grammar = self._grammars.setdefault(matching.spec, _Grammar(matching.spec))
        grammar.matchings[matching.number] = matching
        self._idle.pop(matching.spec, None)
        if grammar.process_queue is None:
            self._compile_queue.add(grammar.spec, matching.client)
        elif grammar.compiled:
            matching.attach(grammar.process_queue)
        return False

    def _remove(self, matching: Matching) -> None:
        matching.fail(InternalError("the request has ended"))
        grammar = self._grammars.get(matching.spec)
        if grammar is None or grammar.matchings.pop(matching.number, None) is None or grammar.matchings:
            return
        if not grammar.compiled:
            self._drop(grammar)
            return
        self._idle[grammar.spec] = None
        if len(self._idle) > MAX_IDLE:
            self._drop(self._grammars[next(iter(self._idle))])

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────

    def _try_start_process(self, grammar: _Grammar) -> bool:
        """Start a grammar's process. Returns False, having failed the grammar's requests, if that isn't possible."""
        try:
            self._start_process(grammar)
        except OSError as error:
            log.error("can't start a grammar's process: %s", error)
            self._reject(grammar, InternalError("the processes that match grammars can't be started"))
            return False
        return True

    def _start_process(self, grammar: _Grammar) -> None:
        if self._server is None:
            self._server = ForkServer(self._spec)
            self._server_began = time.monotonic()
            self._selector.register(self._server.control, selectors.EVENT_READ)
        number, connection = self._server.fork()
        self._num_processes += 1
        grammar.process_queue = queue = ProcessQueue(number, connection)
        self._by_number[number] = grammar
        self._selector.register(connection, selectors.EVENT_READ, grammar)
        text = grammar.spec.text.encode()
        queue.send(Compile(grammar.spec.kind), None, seconds=COMPILE_SECONDS, timeout=COMPILE_TIMEOUT, bulk=text)

    def _on_answers(self, grammar: _Grammar) -> bool:
        """Handle answers of a grammar's process. Returns whether ``on_done`` must be called."""
        notify = False
        if (queue := grammar.process_queue) is None:
            return notify
        try:
            for request, answer in queue.answers():
                if not grammar.compiled:
                    notify |= self._on_compiled(grammar, queue, answer)
                elif request.matching is None:
                    continue
                elif isinstance(answer, TaskFailed):
                    request.matching.fail(_failure(answer))
                    notify = True
                else:
                    notify |= request.matching.on_progress(answer.payload)
        except ProtocolError as error:
            log.error("malformed answer from a grammar's process: %s", error)
            self._kill(queue)
        if grammar.process_queue is queue:
            queue.flush()
            if queue.closed:  # the server will report how it ended
                self._selector.unregister(queue.connection)
        return notify

    def _on_compiled(self, grammar: _Grammar, queue: ProcessQueue, answer: Result | TaskFailed) -> bool:
        self._release_slot(grammar)
        if isinstance(answer, Result):
            grammar.compiled = True
            for matching in grammar.matchings.values():
                matching.attach(queue)
            return False
        error = _failure(answer)
        if isinstance(error, InvalidRequest):
            error = InvalidRequest(f"the {grammar.spec.kind.value} can't be used: {error}")
        self._reject(grammar, error)
        return True

    def _on_control(self) -> bool:
        """Handle messages of the fork server. Returns whether ``on_done`` must be called."""
        assert self._server is not None
        try:
            for ended in self._server.exited():
                grammar = self._by_number.pop(ended.number, None)
                if grammar is not None:
                    with self._changed:
                        if grammar.process_queue is not None and not grammar.process_queue.closed:
                            self._on_answers(grammar)  # sent before it ended
                        self._process_ended(grammar, ended.code)
        except (EOFError, ProtocolError):
            self._server_ended()
        return True

    def _process_ended(self, grammar: _Grammar, code: int) -> None:
        queue, compiled = grammar.process_queue, grammar.compiled
        if queue is None:
            return
        culprit = queue.pending[0].matching if queue.pending else None
        overdue = bool(queue.killed_at) or code == -signal.SIGPROF
        # killed by others, such as the kernel when memory runs out
        excused = code == -signal.SIGKILL and not overdue
        self._release_process(grammar)
        if not compiled:
            if excused:
                self._rebuild(grammar)
            elif overdue:
                # it may have lacked processor time; only SIGPROF shows that it used its own up
                error = too_costly(f"compiling it takes longer than {COMPILE_SECONDS:g} s")
                self._reject(grammar, error, remember=code == -signal.SIGPROF)
            else:
                self._reject(
                    grammar, InvalidRequest(f"the {grammar.spec.kind.value} can't be used: its compiler crashed")
                )
            return
        log.log(logging.INFO if overdue else logging.WARNING, "a grammar's process %s", describe_exit(code))
        if culprit is not None and not culprit.closed:
            if overdue:
                culprit.fail(too_costly(f"matching one token takes longer than {KILL_SECONDS:g} s"))
            elif not excused:
                culprit.fail(InvalidRequest("the grammar crashed the process that matched it"))
        self._rebuild(grammar)

    def _rebuild(self, grammar: _Grammar) -> None:
        """Queue the grammar for compilation again, and match its requests' tokens from the start."""
        for matching in grammar.matchings.values():
            matching.num_rebuilds += 1
            if matching.num_rebuilds > MAX_REBUILDS:
                matching.fail(InternalError("the grammar's process ended too often"))
        wanted = [matching.client for matching in grammar.matchings.values() if matching.error is None]
        for client in wanted:
            self._compile_queue.add(grammar.spec, client)
        if not wanted:
            self._drop(grammar)

    def _reject(self, grammar: _Grammar, error: TriptychError, *, remember: bool = True) -> None:
        if remember and isinstance(error, RequestError):
            self._rejected.add(grammar.spec, error)
        for matching in grammar.matchings.values():
            matching.fail(error)
        self._drop(grammar)

    def _drop(self, grammar: _Grammar) -> None:
        """Remove a grammar: kill its process or take it off the queue."""
        if grammar.process_queue is not None:
            self._kill(grammar.process_queue)
        self._release_process(grammar)
        self._compile_queue.discard(grammar.spec)
        self._idle.pop(grammar.spec, None)
        del self._grammars[grammar.spec]

    def _release_process(self, grammar: _Grammar) -> None:
        self._release_slot(grammar)
        for matching in grammar.matchings.values():
            matching.detach()
        if (queue := grammar.process_queue) is not None:
            grammar.process_queue = None
            grammar.compiled = False
            self._by_number.pop(queue.number, None)
            if not queue.closed:
                self._selector.unregister(queue.connection)
            queue.connection.close()

    def _release_slot(self, grammar: _Grammar) -> None:
        """Let another grammar be compiled."""
        if grammar.slot is not None:
            self._compile_queue.done(grammar.slot.client, time.monotonic() - grammar.slot.began)
            grammar.slot = None

    def _kill(self, queue: ProcessQueue) -> None:
        if self._server is not None:
            self._server.kill(queue.number)

    def _kill_overdue(self) -> None:
        """Kill processes that got too little processor time to hit their own limits, and a fork server that doesn't
        respond."""
        if (server := self._server) is None:
            return
        now = time.monotonic()
        if not server.ready and now - self._server_began > START_SECONDS:
            server.process.kill()
        for queue in [
            grammar.process_queue for grammar in self._grammars.values() if grammar.process_queue is not None
        ]:
            if not server.ready:
                queue.restart_timer()
            elif queue.overdue and not queue.killed_at:
                queue.killed_at = now
                self._kill(queue)
            elif queue.killed_at and now - queue.killed_at > SERVER_TIMEOUT:
                server.process.kill()  # a working server responds far sooner

    def _server_ended(self) -> None:
        """Handle the end of the fork server, with which all its processes have ended."""
        server, self._server = self._server, None
        if server is None:
            return
        self._selector.unregister(server.control)
        server.close()
        with self._changed:
            log.error("the fork server for grammars ended, and all grammars' processes with it")
            for grammar in list(self._grammars.values()):
                if grammar.process_queue is None:
                    continue
                self._release_process(grammar)
                if server.ready:
                    self._rebuild(grammar)
                else:
                    self._reject(grammar, InternalError("the processes that match grammars can't be started"))


def _failure(answer: TaskFailed) -> TriptychError:
    return answer.error.error(answer.message) if answer.error else too_costly(answer.message)
