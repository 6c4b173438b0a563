"""Log probabilities of a prompt's tokens, decoded and formatted for answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.errors import InternalError, InvalidRequest
from triptych.messages.work import PromptLogprobs
from triptych.prompt.prompt import PlannedPrompt
from triptych.prompt.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 2**17
"""Maximum log probabilities of prompt tokens in one answer, which bounds its size as JSON."""


def check_num_logprobs(prompts: Sequence[PlannedPrompt], choices: int, num_top: int | None, param: str) -> None:
    """Raise InvalidRequest, naming ``param``, if an answer would have more than ``MAX_PROMPT_LOGPROBS``.

    ``num_top`` is the number of alternatives per token; None if no log probabilities are requested."""
    requested = 0 if num_top is None else sum(len(prompt.tokens) for prompt in prompts) * choices * (1 + num_top)
    if requested > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{param}: {requested} log probabilities of prompt tokens exceed the limit of {MAX_PROMPT_LOGPROBS}",
            param,
        )


@dataclass(frozen=True)
class ScoredToken:
    """One token of a prompt with its log probability."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: list[tuple[int, float]]
    """The likeliest tokens at this position and their log probabilities, likeliest first."""


def scored_tokens(prompt: Sequence[int], logprobs: PromptLogprobs | None) -> list[ScoredToken]:
    """Decode the log probabilities of a prompt's tokens, from the second token on.

    Raises InternalError if their number doesn't match the prompt."""
    raw = logprobs or PromptLogprobs(0, b"", b"", b"")
    count, width = len(prompt) - 1, 1 + raw.most
    if (len(raw.tokens), len(raw.logprobs), len(raw.ranks)) != (4 * count * width, 4 * count * width, 4 * count):
        raise InternalError("the number of log probabilities doesn't match the prompt")
    token_rows = np.frombuffer(raw.tokens, "<i4").reshape(count, width).tolist()
    value_rows = np.frombuffer(raw.logprobs, "<f4").reshape(count, width).tolist()
    ranks = np.frombuffer(raw.ranks, "<i4").tolist()
    return [
        ScoredToken(tokens[0], values[0], rank, list(zip(tokens[1:], values[1:], strict=True)))
        for tokens, values, rank in zip(token_rows, value_rows, ranks, strict=True)
    ]


def prompt_logprob_entries(
    tokenizer: Tokenizer, scored: Sequence[ScoredToken], num_top: int
) -> list[dict[str, Any] | None]:
    """Return ``objects.PromptLogprobs``: None for the first token, then a dict by token id, the prompt's own first."""
    texts: dict[int, str] = {}

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        if token not in texts:
            texts[token] = tokenizer.text_of(token)
        return {"logprob": logprob, "rank": rank, "decoded_token": texts[token]}

    entries: list[dict[str, Any] | None] = [None]
    for one in scored:
        top = {str(token): entry(token, logprob, n) for n, (token, logprob) in enumerate(one.top[:num_top], start=1)}
        entries.append({str(one.token): entry(one.token, one.logprob, one.rank)} | top)
    return entries
