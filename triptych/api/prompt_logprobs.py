"""Log probabilities of a prompt's own tokens, as clients are told of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.errors import InternalError, InvalidRequest
from triptych.messages.work import PromptLogprobs
from triptych.prompt.prompt import PlannedPrompt
from triptych.prompt.tokenizer import Tokenizer

MAX_TOLD = 2**17
"""Log probabilities of prompts' tokens in one answer: as JSON they take about 8 MB."""


def check_size(prompts: Sequence[PlannedPrompt], choices: int, most: int | None, param: str) -> None:
    """Raises InvalidRequest for a request that asks for more than ``MAX_TOLD``; ``most`` None: for none."""
    wanted = 0 if most is None else sum(len(prompt.tokens) for prompt in prompts) * choices * (1 + most)
    if wanted > MAX_TOLD:
        raise InvalidRequest(
            f"{param}: {wanted} log probabilities of the prompt's tokens, at most {MAX_TOLD} are told in one answer",
            param,
        )


@dataclass(frozen=True)
class ScoredToken:
    """One token of a prompt: its log probability, its rank (1: none is likelier), and the likeliest tokens in its
    place with theirs."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def scored_tokens(prompt: Sequence[int], told: PromptLogprobs | None) -> list[ScoredToken]:
    """Of the prompt's tokens from the second one on. Raises InternalError for what doesn't fit the prompt."""
    if told is None:
        told = PromptLogprobs(0, b"", b"", b"")
    count, width = len(prompt) - 1, 1 + told.most
    if (len(told.tokens), len(told.logprobs), len(told.ranks)) != (4 * count * width, 4 * count * width, 4 * count):
        raise InternalError("the prompt's log probabilities don't fit the prompt")
    tokens = np.frombuffer(told.tokens, "<i4").reshape(count, width).tolist()
    logprobs = np.frombuffer(told.logprobs, "<f4").reshape(count, width).tolist()
    ranks = np.frombuffer(told.ranks, "<i4").tolist()
    return [
        ScoredToken(which[0], numbers[0], rank, list(zip(which[1:], numbers[1:], strict=True)))
        for which, numbers, rank in zip(tokens, logprobs, ranks, strict=True)
    ]


def entries(tokenizer: Tokenizer, scored: Sequence[ScoredToken], most: int) -> list[dict[str, Any] | None]:
    """``objects.PromptLogprobs``: by token id, the prompt's own first. There is nothing to say of the first token."""
    spelled: dict[int, str] = {}

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        if token not in spelled:
            spelled[token] = tokenizer.decode([token], skip_special_tokens=False)
        return {"logprob": logprob, "rank": rank, "decoded_token": spelled[token]}

    told: list[dict[str, Any] | None] = [None]
    for one in scored:
        likeliest = {str(token): entry(token, logprob, n) for n, (token, logprob) in enumerate(one.top[:most], start=1)}
        told.append({str(one.token): entry(one.token, one.logprob, one.rank)} | likeliest)
    return told
