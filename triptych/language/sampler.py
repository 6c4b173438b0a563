"""From logits to tokens, all rows of a step at once. A seeded request's choice depends on its own logits, seed and
place alone, never on what else is in the batch."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.language.grammar import Matcher
from triptych.messages.work import Sampling

NUCLEUS = 1024
"""How many of the likeliest tokens are put in order at first; a row whose top-p reaches further is done again whole."""


@dataclass(frozen=True)
class Draw:
    """What to choose one token by. ``tokens`` are the sequence's, ``num_prompt`` of them the prompt's, ``end_tokens``
    those that end it; ``grammar`` says which may come next."""

    sampling: Sampling
    tokens: Rows[int]
    num_prompt: int
    end_tokens: frozenset[int]
    grammar: Matcher | None = None

    @property
    def index(self) -> int:
        """How many tokens have been generated before."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Drawn:
    """A chosen token. ``logprob`` and ``top`` (likeliest first) are natural logarithms of the model's own
    probabilities, before penalties and temperature, as in vLLM; None and empty unless asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, draws: Rows[Draw]) -> list[Drawn]:
    """One token per row. ``logits`` is float32 of shape (rows, vocabulary)."""
    adjusted = _adjusted(logits, draws)
    tokens = adjusted.argmax(dim=-1).tolist()
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        for row, token in zip(random, _draw(adjusted[random], [draws[row] for row in random]), strict=True):
            tokens[row] = token
    return _with_logprobs(logits, draws, tokens)


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of a seed's own stream: counter-based (Philox; Salmon et al., SC'11), so it
    can be drawn out of order and after a preemption without keeping any state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


# ── penalties, biases and bans ───────────────────────────────────────────────────────────────────────────────────


def _adjusted(logits: Tensor, draws: Rows[Draw]) -> Tensor:
    """The logits after repetition, frequency and presence penalties (as the OpenAI API and, for repetition,
    arXiv:1909.05858 define them), biases, and the ban on ending too early."""
    adjusted = logits
    for entries, change in (
        (_seen(draws), lambda values, penalty: torch.where(values > 0, values / penalty, values * penalty)),
        (_generated(draws), torch.sub),
        (_biases(draws), torch.add),
    ):
        if entries:
            adjusted = _changed(adjusted if adjusted is not logits else logits.clone(), entries, change)
    for row, draw in enumerate(draws):
        if draw.grammar is not None:
            adjusted = adjusted if adjusted is not logits else logits.clone()
            draw.grammar.constrain(adjusted[row])
    return adjusted


Entry = tuple[int, int, float]
"""Row, token, and the number its logit is changed by."""


def _changed(logits: Tensor, entries: Rows[Entry], change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows, tokens, numbers = zip(*entries, strict=True)
    place = (torch.tensor(rows), torch.tensor(tokens))
    return logits.index_put_(place, change(logits[place], torch.tensor(numbers)))


def _seen(draws: Rows[Draw]) -> list[Entry]:
    return [
        (row, token, draw.sampling.repetition_penalty)
        for row, draw in enumerate(draws)
        if draw.sampling.repetition_penalty != 1
        for token in set(draw.tokens)
    ]


def _generated(draws: Rows[Draw]) -> list[Entry]:
    return [
        (row, token, count * draw.sampling.frequency_penalty + draw.sampling.presence_penalty)
        for row, draw in enumerate(draws)
        if draw.sampling.frequency_penalty or draw.sampling.presence_penalty
        for token, count in Counter(draw.tokens[draw.num_prompt :]).items()
    ]


def _biases(draws: Rows[Draw]) -> list[Entry]:
    """Each token once a row: a ban is a bias of minus infinity, and outweighs any other."""
    entries: list[Entry] = []
    for row, draw in enumerate(draws):
        biases = dict(draw.sampling.logit_bias)
        # where a grammar allows nothing but the end, the end it is
        if draw.index < draw.sampling.min_tokens and draw.grammar is None:
            biases |= dict.fromkeys(draw.end_tokens, float("-inf"))
        entries += [(row, token, bias) for token, bias in biases.items()]
    return entries


# ── chance ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw(logits: Tensor, draws: Rows[Draw]) -> list[int]:
    """Inverse transform sampling, over the whole vocabulary or over what min-p, top-k and top-p keep of it."""
    temperatures = _column(draw.sampling.temperature for draw in draws)
    wide = logits.double()
    weights = torch.exp((wide - wide.amax(dim=-1, keepdim=True)) / temperatures)
    thresholds = _column(uniform(draw.sampling.seed, draw.index) for draw in draws)
    tokens = [0] * len(draws)
    limited = [row for row, draw in enumerate(draws) if _is_limited(draw.sampling, logits.shape[1])]
    free = [row for row in range(len(draws)) if row not in limited]
    if free:
        for row, token in zip(free, _inverse(weights[free], thresholds[free]).tolist(), strict=True):
            tokens[row] = token
    count = min(max([NUCLEUS, *(draws[row].sampling.top_k for row in limited)]), logits.shape[1])
    while limited:
        chosen, enough = _limited(weights[limited], thresholds[limited], [draws[r].sampling for r in limited], count)
        for row, token in zip(limited, chosen.tolist(), strict=True):
            tokens[row] = token
        limited = [row for row, done in zip(limited, enough.tolist(), strict=True) if not done]
        count = logits.shape[1]
    return tokens


def _is_limited(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.top_p < 1 or sampling.min_p > 0 or 0 < sampling.top_k < vocabulary


def _limited(weights: Tensor, thresholds: Tensor, settings: Rows[Sampling], count: int) -> tuple[Tensor, Tensor]:
    """A token of each row, and whether ``count`` candidates were enough to choose it from."""
    weights = weights.where(weights >= _column(s.min_p for s in settings) * weights.amax(dim=-1, keepdim=True), 0.0)
    candidates, order = torch.topk(weights, count)
    top_k = torch.tensor([[s.top_k or weights.shape[1]] for s in settings])
    candidates = candidates.where(torch.arange(count) < top_k, 0.0)
    # what top-p is a share of: all that top-k keeps
    total = torch.where(top_k <= count, candidates.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    before = candidates.cumsum(dim=-1) - candidates
    top_p = _column(s.top_p for s in settings)
    # the smallest set whose probability reaches top_p: a token stays when those before it don't reach it
    kept = candidates.where(before < top_p * total, 0.0)
    kept[:, 0] = candidates[:, 0]
    reached = (kept[:, -1:] == 0) | (top_k <= count) | (count == weights.shape[1])
    return order.gather(1, _inverse(kept, thresholds)[:, None])[:, 0], reached[:, 0]


def _inverse(weights: Tensor, thresholds: Tensor) -> Tensor:
    """The first place of each row by which the weights exceed that share of their sum: int64 of shape (rows,)."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, thresholds * total, right=True)
    # rounding may put a threshold at the very sum; the last place that has a weight is meant
    return places.minimum(torch.searchsorted(cumulative, total))[:, 0]


def _column(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)[:, None]


# ── log probabilities ────────────────────────────────────────────────────────────────────────────────────────────


def _with_logprobs(logits: Tensor, draws: Rows[Draw], tokens: Rows[int]) -> list[Drawn]:
    drawn = [Drawn(token) for token in tokens]
    asking = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not asking:
        return drawn
    logprobs = logits[asking].log_softmax(dim=-1)
    most = max(draws[row].sampling.logprobs or 0 for row in asking)
    values, order = torch.topk(logprobs, most)
    for place, row in enumerate(asking):
        wanted = draws[row].sampling.logprobs or 0
        top = tuple(zip(order[place, :wanted].tolist(), values[place, :wanted].tolist(), strict=True))
        drawn[row] = Drawn(tokens[row], float(logprobs[place, tokens[row]]), top)
    return drawn
