"""Which grammars are compiled next, and which needn't be tried again. Holds no device and no socket."""

import hashlib
from collections import Counter, OrderedDict

from triptych.engine.grammar.budget import MAX_COMPILING, MAX_COMPILING_EACH, MAX_REFUSED
from triptych.errors import TriptychError
from triptych.fair_queue import FairQueue
from triptych.messages.work import GrammarSpec

_EXPECTED_SECONDS = 0.1


class CompileQueue:
    """Grammars that wait to be compiled: those of clients who had less time go first, and no client has more than its
    share at a time."""

    def __init__(self) -> None:
        self._waiting: FairQueue[tuple[GrammarSpec, str]] = FairQueue()
        self._running: Counter[str] = Counter()

    def add(self, spec: GrammarSpec, client: str) -> None:
        """May be added for several clients: it is compiled when it is the first one's turn."""
        self._waiting.add((spec, client), client, _EXPECTED_SECONDS)

    def discard(self, spec: GrammarSpec) -> None:
        """It is being compiled, or nobody wants it any more."""
        for ticket in self._waiting:
            if ticket.work[0] == spec:
                self._waiting.remove(ticket)

    def next(self) -> tuple[GrammarSpec, str] | None:
        """The grammar to compile now, and who is charged for it; None when there is none or too many are."""
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
        """What ``next`` gave has been compiled, or won't be."""
        self._running[client] -= 1
        self._running += Counter()  # forgets those who have none
        self._waiting.charge(client, seconds - _EXPECTED_SECONDS)


class Refused:
    """Grammars that can't be compiled, or not within the budget, and why; the last ones that were asked for."""

    def __init__(self) -> None:
        self._errors: OrderedDict[bytes, TriptychError] = OrderedDict()

    def add(self, spec: GrammarSpec, error: TriptychError) -> None:
        self._errors[_digest(spec)] = error
        if len(self._errors) > MAX_REFUSED:
            self._errors.popitem(last=False)

    def get(self, spec: GrammarSpec) -> TriptychError | None:
        digest = _digest(spec)
        if (error := self._errors.get(digest)) is not None:
            self._errors.move_to_end(digest)
        return error


def _digest(spec: GrammarSpec) -> bytes:
    """Texts are long; and what one client makes can't be taken for another's."""
    return hashlib.blake2b(spec.text.encode(), digest_size=32, key=spec.kind.value.encode()).digest()
