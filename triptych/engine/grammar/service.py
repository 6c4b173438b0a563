"""Matches answers to grammars in processes that can be ended, since xgrammar can't be interrupted: a few characters can
ask it for minutes and gigabytes, to compile and for each token.

A fork server loads it once. Each grammar that is in use has a process of its own, which compiles it and matches all
requests that have it. One that takes longer than it may ends its process by the kernel's timer; the other requests' are
matched again, from their first tokens on, in a new one.
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
from typing import NamedTuple

from triptych.engine.grammar.budget import (
    COMPILE_PATIENCE,
    COMPILE_SECONDS,
    KILL_SECONDS,
    LIMITS,
    MAX_IDLE,
    MAX_REBUILDS,
    NICENESS,
)
from triptych.engine.grammar.compilation import mask_words
from triptych.engine.grammar.compiling import CompileQueue, Refused
from triptych.engine.grammar.line import Line
from triptych.engine.grammar.matching import Matching, too_costly
from triptych.engine.grammar.messages import Compile
from triptych.errors import InternalError, InvalidRequest, RequestError, TriptychError, from_wire
from triptych.messages.work import GrammarSpec
from triptych.observe.machine import ending
from triptych.sandbox.fork_client import ForkServer
from triptych.sandbox.protocol import ForkSpec, ProtocolError, Result, TaskFailed

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""For the fork server to load what it needs."""
SERVER_PATIENCE = 5.0
"""Seconds to wait for the fork server to end a process, before it is ended itself."""
LOOK_EVERY = 1.0
"""Seconds between looks at whether a process takes longer than anybody should wait."""


class _Turn(NamedTuple):
    """In the queue of what is to be compiled: whose it is, and when it began, by ``time.monotonic``."""

    client: str
    began: float


@dataclass
class _Grammar:
    """One that requests have, or had lately. Without a ``line`` it waits for its turn to be compiled; ``turn`` is there
    while it is."""

    spec: GrammarSpec
    matchings: dict[int, Matching] = field(default_factory=dict)
    line: Line | None = None
    compiled: bool = False
    turn: _Turn | None = None


class Grammars:
    """The grammars of one tokenizer. All of its work is done on a thread of its own and in other processes."""

    def __init__(self, folder: Path, vocabulary: int, on_done: Callable[[], None]) -> None:
        """``vocabulary`` is how many logits the model has. ``on_done`` is called, on that thread, when a request that
        wasn't ready is, or has failed. Nothing is started before the first grammar."""
        argument = json.dumps([str(folder.absolute()), vocabulary])
        self._spec = ForkSpec("triptych.engine.grammar.process:serve", argument, LIMITS, NICENESS)
        self._mask_bytes = 4 * mask_words(vocabulary)
        self._on_done = on_done
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._began: deque[Matching] = deque()
        self._closed: deque[Matching] = deque()
        self._wake_receive, self._wake_send = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ending = False
        self._thread: threading.Thread | None = None
        # the thread's alone
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receive, selectors.EVENT_READ)
        self._server: ForkServer | None = None
        self._server_began = 0.0
        self._grammars: dict[GrammarSpec, _Grammar] = {}
        self._idle: OrderedDict[GrammarSpec, None] = OrderedDict()
        self._by_number: dict[int, _Grammar] = {}
        self._queue = CompileQueue()
        self._refused = Refused()

    def start(
        self, spec: GrammarSpec, end_tokens: frozenset[int], generated: Sequence[int] = (), client: str = ""
    ) -> Matching:
        """A request whose answer begins with the tokens ``generated``; after the grammar's end any of ``end_tokens``
        may come. Compiling takes turns among ``client``s."""
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
        self._began.append(matching)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._wake()
        return matching

    def close(self) -> None:
        """Ends all processes. Matchings that are left come to nothing."""
        with self._changed:
            self._wake()
            self._ending = True
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake_receive)
        os.close(self._wake_send)

    def _on_close(self, matching: Matching) -> None:
        self._closed.append(matching)
        self._wake()

    def _wake(self) -> None:
        with self._changed, contextlib.suppress(BlockingIOError):  # it is awake already
            if not self._ending:
                os.write(self._wake_send, b"\0")

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._ending:
            try:
                self._turn()
            except Exception:
                log.exception("matching grammars failed; all that are in use begin again")
                self._server_ended()
                self._on_done()
        if self._server is not None:
            self._server.close()
        with self._changed:
            for grammar in self._grammars.values():
                self._forget_process(grammar)

    def _turn(self) -> None:
        told = False
        for key, _ in self._selector.select(LOOK_EVERY):
            if key.fd == self._wake_receive:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_receive, 4096)
            elif isinstance(key.data, _Grammar):
                with self._changed:
                    told |= self._on_answers(key.data)
            else:
                told |= self._on_control()
        with self._changed:
            while self._closed:
                self._end(self._closed.popleft())
            while self._began:
                told |= self._begin(self._began.popleft())
            while (turn := self._queue.next()) is not None:
                spec, client = turn
                self._grammars[spec].turn = _Turn(client, time.monotonic())
                told |= not self._build(self._grammars[spec])
            self._end_late()
        if told:
            self._on_done()

    def _begin(self, matching: Matching) -> bool:
        """Whether the request has failed already."""
        if matching.closed:
            return False
        if (error := self._refused.get(matching.spec)) is not None:
            matching.fail(error)
            return True
        grammar = self._grammars.setdefault(matching.spec, _Grammar(matching.spec))
        grammar.matchings[matching.number] = matching
        self._idle.pop(matching.spec, None)
        if grammar.line is None:
            self._queue.add(grammar.spec, matching.client)
        elif grammar.compiled:
            matching.begin(grammar.line)
        return False

    def _end(self, matching: Matching) -> None:
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

    def _build(self, grammar: _Grammar) -> bool:
        """Starts a grammar's process. False when that isn't possible: its requests have failed, and nobody else's."""
        try:
            self._start_process(grammar)
        except OSError as error:
            log.error("can't start a process to match a grammar: %s", error)
            self._refuse(grammar, InternalError("what is to match grammars can't start"))
            return False
        return True

    def _start_process(self, grammar: _Grammar) -> None:
        if self._server is None:
            self._server = ForkServer(self._spec)
            self._server_began = time.monotonic()
            self._selector.register(self._server.control, selectors.EVENT_READ)
        number, connection = self._server.fork()
        grammar.line = line = Line(number, connection)
        self._by_number[number] = grammar
        self._selector.register(connection, selectors.EVENT_READ, grammar)
        text = grammar.spec.text.encode()
        line.post(Compile(grammar.spec.kind), None, seconds=COMPILE_SECONDS, patience=COMPILE_PATIENCE, bulk=text)

    def _on_answers(self, grammar: _Grammar) -> bool:
        """Whether somebody waits for what has come."""
        told = False
        if (line := grammar.line) is None:
            return told
        try:
            for asked, answer in line.answers():
                if not grammar.compiled:
                    told |= self._on_compiled(grammar, line, answer)
                elif asked.matching is None:
                    continue
                elif isinstance(answer, TaskFailed):
                    asked.matching.fail(_failure(answer))
                    told = True
                else:
                    told |= asked.matching.answered(answer.payload)
        except ProtocolError as error:
            log.error("a grammar's process said what none does: %s", error)
            self._kill(line)
        if grammar.line is line:
            line.flush()
            if line.over:  # its server will tell how it ended
                self._selector.unregister(line.connection)
        return told

    def _on_compiled(self, grammar: _Grammar, line: Line, answer: Result | TaskFailed) -> bool:
        self._end_turn(grammar)
        if isinstance(answer, Result):
            grammar.compiled = True
            for matching in grammar.matchings.values():
                matching.begin(line)
            return False
        error = _failure(answer)
        if isinstance(error, InvalidRequest):
            error = InvalidRequest(f"the {grammar.spec.kind.value} can't be used: {error}")
        self._refuse(grammar, error)
        return True

    def _on_control(self) -> bool:
        """Whether somebody waits for what has come."""
        assert self._server is not None
        try:
            for ended in self._server.exited():
                grammar = self._by_number.pop(ended.number, None)
                if grammar is not None:
                    with self._changed:
                        if grammar.line is not None and not grammar.line.over:
                            self._on_answers(grammar)  # what it said before
                        self._process_ended(grammar, ended.code)
        except (EOFError, ProtocolError):
            self._server_ended()
        return True

    def _process_ended(self, grammar: _Grammar, code: int) -> None:
        line, compiled = grammar.line, grammar.compiled
        if line is None:
            return
        culprit = line.asked[0].matching if line.asked else None
        late = bool(line.killed) or code == -signal.SIGPROF
        # somebody else killed it
        excused = code == -signal.SIGKILL and not late
        self._forget_process(grammar)
        if not compiled:
            if excused:
                self._rebuild(grammar)
            elif late:
                # what gets no processor time for COMPILE_PATIENCE may be compiled another time
                error = too_costly(f"compiling it takes longer than {COMPILE_SECONDS:g} s")
                self._refuse(grammar, error, remember=code == -signal.SIGPROF)
            else:
                what = f"the {grammar.spec.kind.value} can't be used: it crashed what was to compile it"
                self._refuse(grammar, InvalidRequest(what))
            return
        log.log(logging.INFO if late else logging.WARNING, "a grammar's process %s", ending(code))
        if culprit is not None and not culprit.closed:
            if late:
                culprit.fail(too_costly(f"matching one token takes longer than {KILL_SECONDS:g} s"))
            elif not excused:
                culprit.fail(InvalidRequest("the grammar crashed what was to match it"))
        self._rebuild(grammar)

    def _rebuild(self, grammar: _Grammar) -> None:
        """Has the tokens of its requests matched again, from the first on, in a new process when it is its turn."""
        for matching in grammar.matchings.values():
            matching.num_rebuilds += 1
            if matching.num_rebuilds > MAX_REBUILDS:
                matching.fail(InternalError("what was to match the grammar ended too often"))
        wanted = [matching.client for matching in grammar.matchings.values() if matching.error is None]
        for client in wanted:
            self._queue.add(grammar.spec, client)
        if not wanted:
            self._drop(grammar)

    def _refuse(self, grammar: _Grammar, error: TriptychError, *, remember: bool = True) -> None:
        if remember and isinstance(error, RequestError):
            self._refused.add(grammar.spec, error)
        for matching in grammar.matchings.values():
            matching.fail(error)
        self._drop(grammar)

    def _drop(self, grammar: _Grammar) -> None:
        """Ends a grammar's process, or its wait for one."""
        if grammar.line is not None:
            self._kill(grammar.line)
        self._forget_process(grammar)
        self._queue.discard(grammar.spec)
        self._idle.pop(grammar.spec, None)
        del self._grammars[grammar.spec]

    def _forget_process(self, grammar: _Grammar) -> None:
        self._end_turn(grammar)
        for matching in grammar.matchings.values():
            matching.leave()
        if (line := grammar.line) is not None:
            grammar.line = None
            grammar.compiled = False
            self._by_number.pop(line.number, None)
            if not line.over:
                self._selector.unregister(line.connection)
            line.connection.close()

    def _end_turn(self, grammar: _Grammar) -> None:
        """Others may be compiled."""
        if grammar.turn is not None:
            self._queue.done(grammar.turn.client, time.monotonic() - grammar.turn.began)
            grammar.turn = None

    def _kill(self, line: Line) -> None:
        if self._server is not None:
            self._server.kill(line.number)

    def _end_late(self) -> None:
        """Of processes that get no processor time, or don't say that they need more than they may."""
        if (server := self._server) is None:
            return
        now = time.monotonic()
        if not server.ready and now - self._server_began > START_SECONDS:
            server.process.kill()
        for line in [grammar.line for grammar in self._grammars.values() if grammar.line is not None]:
            if not server.ready:
                line.restart_clock()
            elif line.late and not line.killed:
                line.killed = now
                self._kill(line)
            elif line.killed and now - line.killed > SERVER_PATIENCE:
                server.process.kill()  # it does nothing that takes long

    def _server_ended(self) -> None:
        """Its processes have ended with it."""
        server, self._server = self._server, None
        if server is None:
            return
        self._selector.unregister(server.control)
        server.close()
        with self._changed:
            log.error("the processes that match grammars ended")
            for grammar in list(self._grammars.values()):
                if grammar.line is None:
                    continue
                self._forget_process(grammar)
                if server.ready:
                    self._rebuild(grammar)
                else:
                    self._refuse(grammar, InternalError("what is to match grammars can't start"))


def _failure(answer: TaskFailed) -> TriptychError:
    return from_wire(answer.error, answer.message) if answer.error else too_costly(answer.message)
