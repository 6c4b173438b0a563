"""Jinja's immutable sandbox, with bounds on a template's time and output.

Templates come with checkpoints, but their input comes from clients. Nested loops over messages are harmless in ordinary
conversations, but can take minutes for a crafted one.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0
"""Limit on rendering, in the thread's CPU time, so that a busy machine doesn't count."""
MAX_TEXT = 64 * 2**20
"""Limit in characters on a rendered prompt, and on any text that is multiplied."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the time whenever a template calls something, reads an attribute or an item, or outputs text."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._now = threading.local()
        self.concat = self._joined  # type: ignore[method-assign]

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Bound the rendering inside: it raises TemplateRuntimeError when a limit is exceeded."""
        self._now.end = time.thread_time() + SECONDS
        try:
            yield
        finally:
            self._now.end = float("inf")

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._look()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._look()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._look()
        if operator == "**" and not (abs(right) <= 64 and abs(left) <= 2**16):
            raise jinja2.TemplateRuntimeError("too large a power")
        for sized, times in ((left, right), (right, left)):
            if isinstance(sized, str | list | tuple) and isinstance(times, int) and len(sized) * times > MAX_TEXT:
                raise jinja2.TemplateRuntimeError("too long a text")
        return super().call_binop(context, operator, left, right)

    def _look(self) -> None:
        if time.thread_time() > getattr(self._now, "end", float("inf")):
            raise jinja2.TemplateRuntimeError(f"it takes more than {SECONDS:g} s")

    def _joined(self, pieces: Iterable[str]) -> str:
        kept = []
        length = 0
        for piece in pieces:
            self._look()
            kept.append(piece)
            length += len(piece)
            if length > MAX_TEXT:
                raise jinja2.TemplateRuntimeError(f"it makes more than {MAX_TEXT} characters")
        return "".join(kept)
