"""How grammars write calls in a format."""

from dataclasses import dataclass

from triptych.prompt import lark


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
    plain: str = ""
    """How an answer without calls is written where text can have the opener, with ``{text}``; empty: strict tools are
    enforced only where calls are demanded."""
    preamble: str = ""
    """How text before calls is written there, with ``{text}``."""
    plain_text: str = lark.TEXT
    """Terminal for the text of an answer without calls, which must differ from calls in its first character."""
