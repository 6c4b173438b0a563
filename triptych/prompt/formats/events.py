"""What the parser of an answer finds in it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    """Next piece of the reasoning."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """Text outside of reasoning and tool calls."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of a tool call."""

    index: int
    """The call's index in the answer, from 0."""
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Next piece of a call's arguments: JSON."""

    index: int
    text: str


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments
