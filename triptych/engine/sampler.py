"""Samples tokens from logits, all rows of a step at once. A seeded request's token depends on its own logits, seed and
index alone, never on the rest of the batch. A row without a token to sample fails alone, with a typed error."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.engine.grammar.bitmask import constrain
from triptych.engine.sampling_batch import (
    LogitEdits,
    RandomRows,
    SamplingBatch,
    SamplingInput,
    make_random_rows,
    uniform,
)
from triptych.errors import NonFiniteLogits, NoTokenAllowed, TriptychError
from triptych.layers.pinned import to_cpu
from triptych.layers.pointwise import argmax_rows

__all__ = ["SampleResult", "SampledToken", "SamplingInput", "sample", "uniform"]

NUCLEUS = 1024
"""How many of the likeliest tokens are sorted at first. Rows whose top-p reaches further are sampled again over the
whole vocabulary."""


@dataclass(frozen=True)
class SampledToken:
    """A sampled token. Log probabilities are natural logarithms of the model's own distribution, before penalties and
    temperature, as in vLLM."""

    token: int
    logprob: float | None = None
    """None unless requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, in descending order, with their log probabilities."""


SampleResult = SampledToken | TriptychError | None
"""Result of a row: a token, or the error that ends its request. None means that the grammar mask was late and the last
token must be computed again."""


def sample(logits: Tensor, inputs: Sequence[SamplingInput]) -> list[SampleResult]:
    """Sample one token per row. ``logits`` is float32 of shape (rows, vocabulary) on any device, and isn't changed.

    A row's result is NonFiniteLogits if its logits have a NaN, or an infinity that isn't a ban. It is NoTokenAllowed if
    every token is excluded, and None if its mask was late.

    On a GPU this synchronizes once, for the result. It synchronizes twice if a row's top-p, or ties with the last token
    that its limits keep, reach beyond ``NUCLEUS`` tokens.
    """
    vocabulary = logits.shape[1]
    batch = SamplingBatch(inputs, vocabulary, logits.device)
    adjusted = adjusted_logits(logits, batch)
    tokens = argmax_rows(adjusted)
    # a NaN is the highest of its row, so a finite highest logit means that the row can be sampled from
    highest = adjusted.gather(1, tokens[:, None])[:, 0]
    if batch.free is not None:
        tokens[batch.free.rows] = _inverse_cdf(_weights(adjusted, batch.free), batch.free.thresholds)
    if batch.limited is None:
        found, tops, *logprobs = to_cpu([tokens, highest, *_logprobs(logits, tokens, batch)])
        return _checked(logits, tops, batch, _sampled_tokens(inputs, batch, found.tolist(), logprobs))
    count = min(1 + max([NUCLEUS, *(inputs[row].sampling.top_k for row in batch.limited_rows)]), vocabulary)
    tokens[batch.limited.rows], reached = _sample_limited(adjusted, batch.limited, count)
    enough, found, tops, *logprobs = to_cpu([reached, tokens, highest, *_logprobs(logits, tokens, batch)])
    if again := [row for row, done in zip(batch.limited_rows, enough.tolist(), strict=True) if not done]:
        random_rows = make_random_rows(inputs, again, logits.device)
        tokens[random_rows.rows], _ = _sample_limited(adjusted, random_rows, vocabulary)
        found, *logprobs = to_cpu([tokens, *_logprobs(logits, tokens, batch)])
    return _checked(logits, tops, batch, _sampled_tokens(inputs, batch, found.tolist(), logprobs))


def _checked(
    logits: Tensor, highest: Tensor, batch: SamplingBatch, sampled: Sequence[SampledToken]
) -> list[SampleResult]:
    """Replace tokens of invalid rows. ``highest``, in host memory, is each row's highest adjusted logit."""
    checked: list[SampleResult] = [
        one if math.isfinite(top) and _has_finite_logprob(one) else _sampling_error(logits[row], top)
        for row, (one, top) in enumerate(zip(sampled, highest.tolist(), strict=True))
    ]
    for row in batch.late_rows:
        checked[row] = None
    return checked


def _has_finite_logprob(sampled: SampledToken) -> bool:
    """Whether the token's log probability is finite. Penalties and masks may hide a NaN that the log probabilities
    still have."""
    return sampled.logprob is None or math.isfinite(sampled.logprob)


def _sampling_error(logits: Tensor, highest: float) -> TriptychError:
    """Return why a row can't be sampled. ``logits`` [vocabulary] are the model's own; ``highest`` is the highest one
    after penalties, biases and masks."""
    if highest == -math.inf and bool(logits.amax().isfinite()):
        return NoTokenAllowed(
            "no token may come next: the request's grammar, logit_bias and min_tokens exclude all of them"
        )
    return NonFiniteLogits("the model's logits for this request are not finite numbers")


# ── penalties, biases and bans ───────────────────────────────────────────────────────────────────────────────────


def adjusted_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply repetition, frequency and presence penalties (as defined by the OpenAI API and, for repetition, by
    arXiv:1909.05858), biases, bans on early ends, and grammar masks. Returns ``logits`` itself if there are none."""
    adjusted = logits
    for edits, change in (
        (batch.seen, lambda values, penalty: torch.where(values > 0, values / penalty, values * penalty)),
        (batch.generated, torch.sub),
        (batch.biases, torch.add),
    ):
        if edits is not None:
            adjusted = _edited(adjusted if adjusted is not logits else logits.clone(), edits, change)
    for row, mask in batch.masks.items():
        adjusted = adjusted if adjusted is not logits else logits.clone()
        constrain(adjusted[row], mask)
    return adjusted


def _edited(logits: Tensor, edits: LogitEdits, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    place = (edits.rows, edits.tokens)
    return logits.index_put_(place, change(logits[place], edits.values))


# ── random choice ────────────────────────────────────────────────────────────────────────────────────────────────


def _weights(logits: Tensor, random_rows: RandomRows) -> Tensor:
    """Return the tokens' probabilities relative to the likeliest, float64 of shape (rows, vocabulary)."""
    wide = logits[random_rows.rows].double()
    return torch.exp((wide - wide.amax(dim=-1, keepdim=True)) / random_rows.temperatures)


def _sample_limited(logits: Tensor, random_rows: RandomRows, count: int) -> tuple[Tensor, Tensor]:
    """Sample a token for each row, and return whether ``count`` candidates were enough for it."""
    weights = _weights(logits, random_rows)
    weights = weights.where(weights >= random_rows.min_p * weights.amax(dim=-1, keepdim=True), 0.0)
    # sort ties by token id: top-k returns them in no particular order, and the result must not depend on the batch
    order = torch.topk(weights, count).indices.sort().values
    candidates, places = weights.gather(1, order).sort(descending=True, stable=True)
    order, last = order.gather(1, places), candidates[:, -1:]
    candidates = candidates.where(torch.arange(count, device=logits.device) < random_rows.top_k, 0.0)
    # top-p is a share of what top-k keeps
    within = random_rows.top_k <= count
    total = torch.where(within, candidates.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    before = candidates.cumsum(dim=-1) - candidates
    # the smallest set whose probability reaches top_p: keep a token if those before it don't reach it
    kept = candidates.where(before < random_rows.top_p * total, 0.0)
    kept[:, 0] = candidates[:, 0]
    # tokens as likely as the last candidate may be missing
    reached = (kept.where(kept > 0, torch.inf).amin(dim=-1, keepdim=True) > last) | (count == weights.shape[1])
    return order.gather(1, _inverse_cdf(kept, random_rows.thresholds)[:, None])[:, 0], reached[:, 0]


def _inverse_cdf(weights: Tensor, thresholds: Tensor) -> Tensor:
    """Return, as int64 (rows,), the first index of each row at which the cumulative weight exceeds that share of the
    total. Rows with non-finite weights get an arbitrary valid index."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, thresholds * total, right=True)
    # rounding may put a threshold at the very sum, which means the last token with a weight
    return places.minimum(torch.searchsorted(cumulative, total)).clamp(max=weights.shape[1] - 1)[:, 0]


# ── log probabilities ────────────────────────────────────────────────────────────────────────────────────────────


def _logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> list[Tensor]:
    """Return, for the A rows that request them, the tokens' log probabilities [A], and those and the ids of the
    likeliest tokens [A, max_logprobs]."""
    if batch.logprob_index is None:
        return []
    logprobs = logits[batch.logprob_index].log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[batch.logprob_index][:, None])[:, 0]
    return [chosen, *torch.topk(logprobs, batch.max_logprobs)]


def _sampled_tokens(
    inputs: Sequence[SamplingInput], batch: SamplingBatch, tokens: Sequence[int], logprobs: Sequence[Tensor]
) -> list[SampledToken]:
    sampled = [SampledToken(token) for token in tokens]
    if not logprobs:
        return sampled
    for row, chosen, values, order in zip(batch.logprob_rows, *(part.tolist() for part in logprobs), strict=True):
        wanted = inputs[row].sampling.logprobs or 0
        sampled[row] = SampledToken(tokens[row], chosen, tuple(zip(order[:wanted], values[:wanted], strict=True)))
    return sampled
