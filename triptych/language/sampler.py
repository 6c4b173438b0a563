"""From logits to tokens. A seeded request's choice depends on its own seed and place alone, never on the batch."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.messages.work import Sampling


@dataclass(frozen=True)
class Draw:
    """What to choose one token by: the request's sampling and how many tokens it has generated before."""

    sampling: Sampling
    index: int


def sample(logits: Tensor, draws: Rows[Draw]) -> list[int]:
    """One token per row. ``logits`` is float32 of shape (rows, vocabulary)."""
    tokens = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            tokens[row] = _sample_row(logits[row], draw)
    return tokens


def _sample_row(logits: Tensor, draw: Draw) -> int:
    """Inverse transform sampling over the tokens that top-k and top-p keep, most likely first."""
    sampling = draw.sampling
    kept = sampling.top_k if 0 < sampling.top_k < logits.numel() else logits.numel()
    ordered, order = torch.topk(logits, kept)
    probabilities = torch.softmax(ordered.double() / sampling.temperature, dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    if sampling.top_p < 1:
        # the smallest set whose probability reaches top_p: a token stays when those before it don't reach it
        nucleus = int((cumulative - probabilities < sampling.top_p).sum())
        cumulative = cumulative[: max(1, nucleus)]
    threshold = uniform(sampling.seed, draw.index) * cumulative[-1]
    return int(order[int((cumulative <= threshold).sum().clamp(max=cumulative.numel() - 1))])


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of a seed's own stream: counter-based (Philox; Salmon et al., SC'11), so it
    can be drawn out of order and after a preemption without keeping any state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
