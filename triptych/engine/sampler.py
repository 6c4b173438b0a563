"""From logits to tokens, all rows of a step at once. A seeded request's choice depends on its own logits, seed and
place alone, never on what else is in the batch. A row that no token can be drawn from fails alone, with a typed error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.engine.grammar.bitmask import constrain
from triptych.engine.sampling_batch import LogitEdits, Plan, RandomRows, SamplingInput, chances_of, uniform
from triptych.errors import NonFiniteLogits, NoTokenAllowed, TriptychError
from triptych.layers.pinned import to_cpu
from triptych.layers.pointwise import argmax_rows

__all__ = ["Choice", "SampledToken", "SamplingInput", "sample", "uniform"]

NUCLEUS = 1024
"""How many of the likeliest tokens are put in order at first; a row whose top-p reaches further is done again whole."""


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. ``logprob`` and ``top`` (likeliest first) are natural logarithms of the model's own
    probabilities, before penalties and temperature, as in vLLM; None and empty unless asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Choice = SampledToken | TriptychError | None
"""What a row comes to: a token, the error that ends its request, or None when its grammar's mask wasn't there in time:
its last token is to be computed again."""


def sample(logits: Tensor, draws: Sequence[SamplingInput]) -> list[Choice]:
    """One token per row, or the error that ends the row's request: NonFiniteLogits where the logits have a NaN or an
    infinity that is not a ban, NoTokenAllowed where every token is ruled out. None where nothing could be drawn yet, as
    ``Choice`` has it. ``logits`` is float32 of shape (rows, vocabulary), on any device, and isn't changed.

    On a GPU the host waits once, for the result; twice if a row's top-p, or tokens as likely as the last that its
    limits keep, reach beyond ``NUCLEUS`` tokens.
    """
    vocabulary = logits.shape[1]
    plan = Plan(draws, vocabulary, logits.device)
    adjusted = _adjusted(logits, plan)
    tokens = argmax_rows(adjusted)
    # a NaN is the highest of its row, so the highest says of the whole row whether anything can be drawn from it
    highest = adjusted.gather(1, tokens[:, None])[:, 0]
    if plan.free is not None:
        tokens[plan.free.rows] = _inverse(_weights(adjusted, plan.free), plan.free.thresholds)
    if plan.limited is None:
        found, tops, *logprobs = to_cpu([tokens, highest, *_logprobs(logits, tokens, plan)])
        return _checked(logits, tops, plan, _drawn(draws, plan, found.tolist(), logprobs))
    count = min(1 + max([NUCLEUS, *(draws[row].sampling.top_k for row in plan.limited_rows)]), vocabulary)
    tokens[plan.limited.rows], reached = _limited(adjusted, plan.limited, count)
    enough, found, tops, *logprobs = to_cpu([reached, tokens, highest, *_logprobs(logits, tokens, plan)])
    if again := [row for row, done in zip(plan.limited_rows, enough.tolist(), strict=True) if not done]:
        chances = chances_of(draws, again, logits.device)
        tokens[chances.rows], _ = _limited(adjusted, chances, vocabulary)
        found, *logprobs = to_cpu([tokens, *_logprobs(logits, tokens, plan)])
    return _checked(logits, tops, plan, _drawn(draws, plan, found.tolist(), logprobs))


def _checked(logits: Tensor, highest: Tensor, plan: Plan, drawn: Sequence[SampledToken]) -> list[Choice]:
    """What was drawn, where that means something. ``highest``, on the host, is each row's highest adjusted logit."""
    checked: list[Choice] = [
        one if math.isfinite(top) and _tells_finite_logprobs(one) else _why_undrawn(logits[row], top)
        for row, (one, top) in enumerate(zip(drawn, highest.tolist(), strict=True))
    ]
    for row in plan.postponed_rows:
        checked[row] = None
    return checked


def _tells_finite_logprobs(drawn: SampledToken) -> bool:
    """Penalties and masks may hide a NaN, which then is in the log probabilities all the same."""
    return drawn.logprob is None or math.isfinite(drawn.logprob)


def _why_undrawn(logits: Tensor, highest: float) -> TriptychError:
    """``logits`` [vocabulary] are the model's own; ``highest`` is the highest after penalties, biases and masks."""
    if highest == -math.inf and bool(logits.amax().isfinite()):
        return NoTokenAllowed("no token may come next: the request's grammar, logit_bias and min_tokens rule all out")
    return NonFiniteLogits("the model's logits for this request are not finite numbers")


# ── penalties, biases and bans ───────────────────────────────────────────────────────────────────────────────────


def _adjusted(logits: Tensor, plan: Plan) -> Tensor:
    """The logits after repetition, frequency and presence penalties (as the OpenAI API and, for repetition,
    arXiv:1909.05858 define them), biases, and the ban on ending too early."""
    adjusted = logits
    for changes, change in (
        (plan.seen, lambda values, penalty: torch.where(values > 0, values / penalty, values * penalty)),
        (plan.generated, torch.sub),
        (plan.biases, torch.add),
    ):
        if changes is not None:
            adjusted = _changed(adjusted if adjusted is not logits else logits.clone(), changes, change)
    for row, mask in plan.masks.items():
        adjusted = adjusted if adjusted is not logits else logits.clone()
        constrain(adjusted[row], mask)
    return adjusted


def _changed(logits: Tensor, changes: LogitEdits, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    place = (changes.rows, changes.tokens)
    return logits.index_put_(place, change(logits[place], changes.numbers))


# ── chance ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _weights(logits: Tensor, chances: RandomRows) -> Tensor:
    """What the tokens of these rows weigh against the likeliest, float64 of shape (rows, vocabulary)."""
    wide = logits[chances.rows].double()
    return torch.exp((wide - wide.amax(dim=-1, keepdim=True)) / chances.temperatures)


def _limited(logits: Tensor, chances: RandomRows, count: int) -> tuple[Tensor, Tensor]:
    """A token of each row, and whether ``count`` candidates were enough to choose it from."""
    weights = _weights(logits, chances)
    weights = weights.where(weights >= chances.min_p * weights.amax(dim=-1, keepdim=True), 0.0)
    # of equal ones the first in the vocabulary's order, which top-k doesn't promise: it is another's choice otherwise
    order = torch.topk(weights, count).indices.sort().values
    candidates, places = weights.gather(1, order).sort(descending=True, stable=True)
    order, last = order.gather(1, places), candidates[:, -1:]
    candidates = candidates.where(torch.arange(count, device=logits.device) < chances.top_k, 0.0)
    # what top-p is a share of: all that top-k keeps
    within = chances.top_k <= count
    total = torch.where(within, candidates.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    before = candidates.cumsum(dim=-1) - candidates
    # the smallest set whose probability reaches top_p: a token stays when those before it don't reach it
    kept = candidates.where(before < chances.top_p * total, 0.0)
    kept[:, 0] = candidates[:, 0]
    # what equals the last candidate may be left out itself
    reached = (kept.where(kept > 0, torch.inf).amin(dim=-1, keepdim=True) > last) | (count == weights.shape[1])
    return order.gather(1, _inverse(kept, chances.thresholds)[:, None])[:, 0], reached[:, 0]


def _inverse(weights: Tensor, thresholds: Tensor) -> Tensor:
    """The first place of each row by which the weights exceed that share of their sum: int64 of shape (rows,). Some
    place for a row whose weights aren't numbers."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, thresholds * total, right=True)
    # rounding may put a threshold at the very sum; the last place that has a weight is meant
    return places.minimum(torch.searchsorted(cumulative, total)).clamp(max=weights.shape[1] - 1)[:, 0]


# ── log probabilities ────────────────────────────────────────────────────────────────────────────────────────────


def _logprobs(logits: Tensor, tokens: Tensor, plan: Plan) -> list[Tensor]:
    """Of the A rows that ask: their tokens' [A], and the likeliest tokens' and those tokens [A, most]."""
    if plan.asking is None:
        return []
    logprobs = logits[plan.asking].log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[plan.asking][:, None])[:, 0]
    return [chosen, *torch.topk(logprobs, plan.most_logprobs)]


def _drawn(
    draws: Sequence[SamplingInput], plan: Plan, tokens: Sequence[int], logprobs: Sequence[Tensor]
) -> list[SampledToken]:
    drawn = [SampledToken(token) for token in tokens]
    if not logprobs:
        return drawn
    for row, chosen, values, order in zip(plan.asking_rows, *(part.tolist() for part in logprobs), strict=True):
        wanted = draws[row].sampling.logprobs or 0
        drawn[row] = SampledToken(tokens[row], chosen, tuple(zip(order[:wanted], values[:wanted], strict=True)))
    return drawn
