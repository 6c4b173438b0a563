"""Queue of grammars to compile, and the ones known to be rejected. Holds no device and no socket."""

import hashlib
from collections import Counter, OrderedDict

from triptych.engine.grammar.budget import MAX_COMPILING, MAX_COMPILING_EACH, MAX_REJECTED
from triptych.errors import TriptychError
from triptych.fair_queue import FairQueue
from triptych.messages.work import GrammarSpec

_EXPECTED_SECONDS = 0.1


class CompileQueue:
    """Fair queue of grammars to compile: clients with less compile time go first, and each has a limit of concurrent
    ones."""

    def __init__(self) -> None:
        self._waiting: FairQueue[tuple[GrammarSpec, str]] = FairQueue()
        self._running: Counter[str] = Counter()

    def add(self, spec: GrammarSpec, client: str) -> None:
        """Queue a grammar for a client. It may be queued for several clients; the first dequeue counts."""
        self._waiting.add((spec, client), client, _EXPECTED_SECONDS)

    def discard(self, spec: GrammarSpec) -> None:
        """Take a grammar off the queue."""
        for ticket in self._waiting:
            if ticket.work[0] == spec:
                self._waiting.remove(ticket)

    def next(self) -> tuple[GrammarSpec, str] | None:
        """Return the next grammar to compile and the client to charge; None if the queue is empty or all slots are
        used."""
        if self._running.total() >= MAX_COMPILING:
            return None
        ticket = self._waiting.pop(lambda work: self._running[work[1]] < MAX_COMPILING_EACH)
        if ticket is None:
            return None
        spec, client = ticket.work
        self.discard(spec)
        self._running[client] += 1
        return spec, client

    def done(self, client: str, seconds: float) -> None:
        """Release the slot of a grammar that ``next`` returned, and charge the client for the time."""
        self._running[client] -= 1
        self._running += Counter()  # drops clients with none
        self._waiting.charge(client, seconds - _EXPECTED_SECONDS)


class RejectedGrammars:
    """The last ``MAX_REJECTED`` rejected grammars, least recently used dropped first, with their errors."""

    def __init__(self) -> None:
        self._errors: OrderedDict[bytes, TriptychError] = OrderedDict()

    def add(self, spec: GrammarSpec, error: TriptychError) -> None:
        self._errors[_digest(spec)] = error
        if len(self._errors) > MAX_REJECTED:
            self._errors.popitem(last=False)

    def get(self, spec: GrammarSpec) -> TriptychError | None:
        digest = _digest(spec)
        if (error := self._errors.get(digest)) is not None:
            self._errors.move_to_end(digest)
        return error


def _digest(spec: GrammarSpec) -> bytes:
    """Hash of the text, keyed by the kind. Texts are long; a cryptographic hash keeps clients from making texts that
    collide with others'."""
    return hashlib.blake2b(spec.text.encode(), digest_size=32, key=spec.kind.value.encode()).digest()
