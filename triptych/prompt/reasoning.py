"""Splits what a model thinks from what it says: thoughts come first, between tags."""

import enum

from triptych.prompt.partial_match import partial_match_length

THINK, END_THINK = "<think>", "</think>"
"""What models that think put around their thoughts (Qwen, DeepSeek and others)."""


class Reasoning(enum.Enum):
    """What a prompt leaves to the answer: no thoughts, thoughts if it begins with their tag, or thoughts whose tag is
    the prompt's end."""

    NONE = enum.auto()
    POSSIBLE = enum.auto()
    OPEN = enum.auto()


def reasoning_at_end(prompt: str) -> Reasoning:
    """For the prompts of a model that thinks: templates open a thought, or close an empty one to prevent any."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return Reasoning.OPEN
    return Reasoning.NONE if end.endswith(END_THINK) else Reasoning.POSSIBLE


class ReasoningParser:
    """One answer's text, in pieces. What ``push`` and ``finish`` return, joined, is the same however the text was split
    into pieces: (thoughts, the rest), without the tags and the white space around them."""

    def __init__(self, reasoning: Reasoning) -> None:
        self.in_reasoning = reasoning is Reasoning.OPEN
        self._may_begin = reasoning is Reasoning.POSSIBLE
        self._after_tag = self.in_reasoning
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What is now certain. ``thinking`` says whether the thought goes on."""
        text = self._held + text
        self._held = ""
        if self._may_begin:
            start = text.lstrip()
            if THINK.startswith(start):  # too little to tell, or all of the tag
                self._held = text
                if start != THINK:
                    return "", ""
            self._may_begin = False
            self.in_reasoning = self._after_tag = start.startswith(THINK)
            if self.in_reasoning:
                text, self._held = start.removeprefix(THINK), ""
        return self._split(text) if self.in_reasoning else self._rest(text)

    def finish(self) -> tuple[str, str]:
        """What was held back."""
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
