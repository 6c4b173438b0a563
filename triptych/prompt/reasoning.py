"""Separates a model's reasoning from its answer. Reasoning comes first, between tags."""

import enum

from triptych.prompt.partial_match import partial_match_length

THINK, END_THINK = "<think>", "</think>"
"""Tags around reasoning, as Qwen, DeepSeek and others write them."""


class Reasoning(enum.Enum):
    """Whether an answer begins with reasoning."""

    NONE = enum.auto()
    POSSIBLE = enum.auto()
    """If it begins with the opening tag."""
    OPEN = enum.auto()
    """Yes: the prompt ends with the opening tag."""


def reasoning_at_end(prompt: str) -> Reasoning:
    """Return what a reasoning model's prompt implies: templates may end with the opening tag, or with empty reasoning
    to prevent any."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return Reasoning.OPEN
    return Reasoning.NONE if end.endswith(END_THINK) else Reasoning.POSSIBLE


class ReasoningParser:
    """Splits one streamed answer into (reasoning, content), without the tags and the white space around them. Joined,
    the results of ``push`` and ``finish`` are the same however the text was split into pieces."""

    def __init__(self, reasoning: Reasoning) -> None:
        self.in_reasoning = reasoning is Reasoning.OPEN
        self._may_begin = reasoning is Reasoning.POSSIBLE
        self._after_tag = self.in_reasoning
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add text and return what is now certain. ``in_reasoning`` is True while the reasoning continues."""
        text = self._held + text
        self._held = ""
        if self._may_begin:
            start = text.lstrip()
            if THINK.startswith(start):  # undecided yet, or the whole tag
                self._held = text
                if start != THINK:
                    return "", ""
            self._may_begin = False
            self.in_reasoning = self._after_tag = start.startswith(THINK)
            if self.in_reasoning:
                text, self._held = start.removeprefix(THINK), ""
        return self._split(text) if self.in_reasoning else self._rest(text)

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        if self.in_reasoning:
            return held.rstrip(), ""
        return "", held if self._may_begin else ""

    def _split(self, text: str) -> tuple[str, str]:
        if self._after_tag:
            text = text.lstrip()
            if not text:
                return "", ""
            self._after_tag = False
        reasoning, tag, rest = text.partition(END_THINK)
        if tag:
            self.in_reasoning, self._after_tag = False, True
            return reasoning.rstrip(), self._rest(rest)[1]
        certain = text[: len(text) - partial_match_length(text, (END_THINK,))].rstrip()
        self._held = text[len(certain) :]
        return certain, ""

    def _rest(self, text: str) -> tuple[str, str]:
        if self._after_tag:
            text = text.lstrip()
            self._after_tag = not text
        return "", text
