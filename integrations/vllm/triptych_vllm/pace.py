"""How long an engine rests between steps while all its requests wait for rows.

vLLM's engine steps without a pause then, which takes a core. The rest begins short and doubles: an engine with batches
in flight may have an empty step between two full ones. Rows that arrive end it, and the next ones are short again. So
does a frontend that is about to send a request; another request waits for the end of a rest.
"""

import threading

SHORTEST = 0.0005
"""Seconds of the first rest."""


class Pace:
    """The rests between an engine's empty steps. Used by one thread."""

    def __init__(self, news: threading.Event, longest: float) -> None:
        """``news`` ends a rest, which takes up to ``longest`` seconds."""
        self._news = news
        self._longest = longest
        self._next = SHORTEST

    def step(self, *, is_empty: bool) -> None:
        """Rest after a step that had nothing to do."""
        if not is_empty:
            self._next = SHORTEST
            return
        if self._news.wait(min(self._next, self._longest)):
            self._news.clear()
            self._next = SHORTEST
        else:
            self._next = min(2 * self._next, self._longest)
