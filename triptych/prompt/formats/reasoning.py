"""Reasoning before an answer: the tags around it, and whether a prompt leaves them open."""

import enum
from dataclasses import dataclass


class Reasoning(enum.Enum):
    """Whether an answer begins with reasoning."""

    NONE = enum.auto()
    POSSIBLE = enum.auto()
    """If it begins with an opening tag."""
    OPEN = enum.auto()
    """Yes: the prompt ends with an opening tag."""
    CONTINUED = enum.auto()
    """Yes: the prompt ends within reasoning, so that white space at the answer's beginning is a part of it."""

    @property
    def is_open(self) -> bool:
        return self in (Reasoning.OPEN, Reasoning.CONTINUED)


@dataclass(frozen=True)
class ReasoningTags:
    """Tags that families write reasoning between, before their answers."""

    open: str
    close: str
    parsers: tuple[str, ...]
    """Names of vLLM's parsers for them."""


THINK = ReasoningTags("<think>", "</think>", ("qwen3", "deepseek_r1"))
"""Of Qwen, DeepSeek, GLM, Kimi, MiniMax and others."""


def reasoning_at_end(prompt: str, continued: str | None = None) -> Reasoning:
    """Return what a reasoning model's prompt implies: templates may end with the opening tag, or with empty reasoning
    to prevent any. ``continued`` is the text of a message that the prompt ends with: its last tag counts."""
    end = prompt.rstrip()
    if continued and not end.endswith((THINK.open, THINK.close)):
        return Reasoning.CONTINUED if continued.rfind(THINK.open) > continued.rfind(THINK.close) else Reasoning.NONE
    if end.endswith(THINK.open):
        return Reasoning.OPEN
    return Reasoning.NONE if end.endswith(THINK.close) else Reasoning.POSSIBLE
