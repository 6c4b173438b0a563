"""Routing of a mixture of experts: from a router's logits to each token's experts and their weights.

The references are ``Qwen2MoeTopKRouter``, ``DeepseekV2TopkRouter``, ``DeepseekV3TopkRouter``, ``GptOssTopKRouter`` and
``Llama4Router`` in transformers.
"""

import torch
from torch import Tensor

from triptych.layers.specs import ExpertGroups, RoutingSpec, Score


def route(spec: RoutingSpec, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [T, experts_per_token], and their weights, float32 of the same shape, for
    float32 ``logits`` [T, experts].

    ``correction``, float32 [experts], is added to the scores for the choice but not for the weights: a bias that
    balances the experts' load (arXiv:2408.15664).
    """
    scores = logits.softmax(dim=-1) if spec.score is Score.SOFTMAX else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if spec.groups is not None:
        choice = _of_best_groups(spec.groups, choice)
    elif correction is None:
        choice = logits  # which order experts as scores do, but don't saturate
    chosen = choice.topk(spec.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
    return chosen, weights * spec.scale


def _of_best_groups(groups: ExpertGroups, scores: Tensor) -> Tensor:
    """Return ``scores`` [T, experts] with minus infinity in all but each token's best groups."""
    grouped = scores.unflatten(-1, (groups.count, -1))  # [T, groups, experts of a group]
    rank = grouped.topk(groups.ranked_by, dim=-1).values.sum(dim=-1)
    best = rank.topk(groups.kept, dim=-1).indices
    is_kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
