"""The grammar that an answer must match, and the fields of the request that it comes from."""

from dataclasses import dataclass, field

import msgspec

from triptych.prompt import lark


class GrammarPart(msgspec.Struct, frozen=True):
    """What one field of a request contributes to a grammar."""

    param: str
    text: str
    """In Lark."""
    is_expression: bool = True
    """Whether the text is an expression rather than a whole grammar."""

    def alone(self) -> "AnswerGrammar":
        """Return the grammar of this part and nothing else."""
        whole = f"{lark.HEADER}\nstart: {self.text}" if self.is_expression else f"{lark.HEADER}\n{self.text}"
        return AnswerGrammar(whole, [self])


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar of a whole answer."""

    text: str
    """In Lark, or several grammars in llguidance's JSON."""
    parts: list[GrammarPart] = field(default_factory=list)
    """By which an error names the field at fault."""
