"""Log probabilities of prompt tokens: which rows of a step's logits they need, and their computation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.engine.scheduler import Chunk
from triptych.errors import NonFiniteLogits, TriptychError
from triptych.layers.pinned import to_cpu, to_device
from triptych.messages.work import PromptLogprobs


@dataclass(frozen=True)
class PromptLogprobsQuery:
    """Prompt log probabilities to compute for one chunk."""

    first_row: int
    """First of the chunk's rows in the step's logits; there is one row for each of ``tokens``."""
    tokens: list[int]
    """The prompt tokens to score."""
    num_top: int
    """Number of likeliest tokens to return for each position."""


def prompt_logprobs_queries(chunks: Sequence[Chunk]) -> list[PromptLogprobsQuery]:
    """Return the queries of a step whose logits are those of its chunks' ``wanted`` tokens, in order."""
    if not any(chunk.num_scored for chunk in chunks):
        return []
    queries, row = [], 0
    for chunk in chunks:
        if chunk.num_scored:
            following = chunk.request.tokens[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
            queries.append(PromptLogprobsQuery(row, following, chunk.request.sampling.prompt_logprobs or 0))
        row += len(chunk.wanted)
    return queries


def score(logits: Tensor, queries: Sequence[PromptLogprobsQuery]) -> list[PromptLogprobs | TriptychError]:
    """Return the log probabilities of each query in order, or NonFiniteLogits. ``logits`` is float32 of shape (rows,
    vocabulary) on any device: the step's, before penalties and temperature."""
    rows = torch.tensor([row for one in queries for row in range(one.first_row, one.first_row + len(one.tokens))])
    rows, tokens = to_device([rows, torch.tensor([token for one in queries for token in one.tokens])], logits.device)
    logprobs = logits[rows].log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs >= own).sum(dim=-1)
    values, likeliest = torch.topk(logprobs, max(one.num_top for one in queries))
    ranked = to_cpu(
        [torch.cat([own, values], dim=1), torch.cat([tokens[:, None], likeliest], dim=1).int(), ranks.int()]
    )
    parts = zip(*(torch.split(part, [len(one.tokens) for one in queries]) for part in ranked), strict=True)
    return [_answer(one.num_top, *parts_of_one) for one, parts_of_one in zip(queries, parts, strict=True)]


def _answer(num_top: int, logprobs: Tensor, tokens: Tensor, ranks: Tensor) -> PromptLogprobs | TriptychError:
    """Encode the results of N tokens in host memory: log probabilities and tokens [N, 1 + num_top or more], ranks
    [N]."""
    if not bool(logprobs[:, 0].isfinite().all()):
        return NonFiniteLogits("the model's logits for this request's prompt are not finite numbers")
    within = slice(1 + num_top)
    return PromptLogprobs(num_top, _bytes(tokens[:, within]), _bytes(logprobs[:, within]), _bytes(ranks))


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """Concatenate the results of one prompt's chunks; None for none."""
    if not parts:
        return None
    return PromptLogprobs(
        most=parts[0].most,
        tokens=b"".join(part.tokens for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        ranks=b"".join(part.ranks for part in parts),
    )


def _bytes(part: Tensor) -> bytes:
    array = part.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
