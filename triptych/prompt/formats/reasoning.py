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
    after: str = ""
    """What follows them, before the answer."""


THINK = ReasoningTags(
    "<think>",
    "</think>",
    (
        "qwen3",
        "deepseek_r1",
        "deepseek_v3",
        "glm45",
        "glm47",
        "holo2",
        "kimi_k2",
        "mimo",
        "minimax_m2",
        "minimax_m2_append_think",
        "nemotron_v3",
        "olmo3",
        "poolside_v1",
        "step3",
        "step3p5",
        "ernie45",
        "deepseek_v4",
        "deepseek_v41",
        "granite_thinking_parser",
        "minicpmv",
        "step5",
    ),
)
"""Parsers of Qwen, DeepSeek, GLM, Kimi, MiniMax and others."""

TAGS = (
    ReasoningTags("<|channel|>analysis<|message|>", "<|end|>", ("openai_gptoss",), "<|start|>assistant"),
    ReasoningTags("<|channel>thought\n", "<channel|>", ("gemma4",)),
    ReasoningTags("[THINK]", "[/THINK]", ("mistral",)),
    ReasoningTags("<seed:think>", "</seed:think>", ("seed_oss",)),
    ReasoningTags("◁think▷", "◁/think▷", ("kimi_vl",)),
    ReasoningTags("Here is my thought process:", "Here is my response:", ("granite",)),
    ReasoningTags("Here's my thought process:", "Here's my response:", ("granite",)),
    THINK,
)

ASSUMED = ("deepseek_r1", "step3", "step5")
"""vLLM's parsers that take the beginning of an answer for reasoning if the prompt doesn't say."""
