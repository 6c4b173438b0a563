"""How grammars write calls in a format."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallForm:
    """How a grammar writes calls: ``opener begin call (between call)* end``."""

    opener: str
    call: str
    """With ``{name}``, ``{arguments}`` and, where calls are numbered, ``{number}``."""
    between: str | None = None
    """None: there is only one call."""
    begin: str = ""
    end: str = ""
    parameter: str = ""
    """How one argument is written, with ``{key}`` and ``{value}``; empty: all of them are one JSON object."""
    only_opener: bool = True
    """Whether text can't have the opener but for a call, so that calls are enforced within text, too."""
