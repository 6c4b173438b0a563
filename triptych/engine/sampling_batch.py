"""What a step's tokens are chosen by, put into tensors: the half of sampling that needs no logits, and so can be done
while the model computes them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.engine.grammar.bitmask import bitmask_tensor
from triptych.engine.grammar.matching import Matching
from triptych.engine.history import History
from triptych.layers.pinned import to_device
from triptych.messages.work import SamplingParams

MASK_PATIENCE = 0.005
"""Seconds that a step waits, in all, for grammars' masks that are still being made once its logits are there."""


@dataclass(frozen=True)
class SamplingInput:
    """What to choose one token by. ``history`` is the request's, ``end_tokens`` are those that end it; ``grammar``
    says which may come next."""

    sampling: SamplingParams
    history: History
    end_tokens: frozenset[int]
    grammar: Matching | None = None

    @property
    def index(self) -> int:
        """How many tokens have been generated before."""
        return self.history.num_generated


class LogitEdits(NamedTuple):
    """N logits to change: int64 rows and tokens, float32 numbers to change them by, each [N]."""

    rows: Tensor
    tokens: Tensor
    numbers: Tensor


class RandomRows(NamedTuple):
    """R rows to draw at random: int64 [R], and what each is drawn by, all [R, 1], ``top_k`` int64, the rest float64."""

    rows: Tensor
    temperatures: Tensor
    thresholds: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Plan:
    """What the rows of a step are drawn by, on the logits' device after one copy that the host doesn't wait for.

    ``free`` are drawn from the whole vocabulary, ``limited`` from what min-p, top-k and top-p keep of it, the others
    aren't drawn at random. ``asking``, int64 [A], want log probabilities. ``masks`` are grammars' bitmasks, by row;
    ``postponed_rows`` are those whose mask isn't there in time. What there is none of is None.
    """

    def __init__(self, draws: Sequence[SamplingInput], vocabulary: int, device: torch.device) -> None:
        random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
        self.limited_rows = [row for row in random if _is_limited(draws[row].sampling, vocabulary)]
        free_rows = sorted(set(random) - set(self.limited_rows))
        self.asking_rows = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
        self.most_logprobs = max((draws[row].sampling.logprobs or 0 for row in self.asking_rows), default=0)
        masks, self.postponed_rows = _masks(draws)
        changes = [_changes(entries(draws)) for entries in (_seen, _generated, _biases)]
        chances = [_chances(draws, rows) if rows else None for rows in (free_rows, self.limited_rows)]
        asking = [torch.tensor(self.asking_rows)] if self.asking_rows else []
        tensors = [tensor for group in (*changes, *chances) if group is not None for tensor in group]
        moved = iter(to_device([*tensors, *asking, *masks.values()], device))
        self.seen, self.generated, self.biases = (None if c is None else LogitEdits(*islice(moved, 3)) for c in changes)
        self.free, self.limited = (None if c is None else RandomRows(*islice(moved, 6)) for c in chances)
        self.asking = next(moved) if asking else None
        self.masks = dict(zip(masks, moved, strict=True))


def _masks(draws: Sequence[SamplingInput]) -> tuple[dict[int, Tensor], list[int]]:
    """The masks that are there within MASK_PATIENCE, by row, and the rows of the others."""
    masks: dict[int, Tensor] = {}
    late = []
    end = time.monotonic() + MASK_PATIENCE
    for row, draw in enumerate(draws):
        if draw.grammar is None:
            continue
        if (mask := draw.grammar.mask(max(0.0, end - time.monotonic()))) is not None:
            masks[row] = bitmask_tensor(mask)
        else:
            late.append(row)
    return masks, late


def chances_of(draws: Sequence[SamplingInput], rows: Sequence[int], device: torch.device) -> RandomRows:
    """By what some of the rows are drawn, on a device."""
    return RandomRows(*to_device(_chances(draws, rows), device))


def num_candidates(sampling: SamplingParams) -> int:
    """From how many of the largest logits a token is chosen; 0 if it may be from any, or if others matter, too."""
    changed = sampling.logit_bias or sampling.min_tokens or sampling.grammar is not None
    penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    if changed or penalties or sampling.logprobs is not None:
        return 0
    return sampling.top_k if sampling.temperature > 0 else 1


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of a seed's own stream: counter-based (Philox; Salmon et al., SC'11), so it
    can be drawn out of order and after a preemption without keeping any state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def _chances(draws: Sequence[SamplingInput], rows: Sequence[int]) -> RandomRows:
    chosen = [draws[row] for row in rows]
    numbers = [
        (d.sampling.temperature, uniform(d.sampling.seed, d.index), d.sampling.top_p, d.sampling.min_p) for d in chosen
    ]
    columns = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 4)
    temperatures, thresholds, top_p, min_p = (columns[:, index : index + 1] for index in range(4))
    # 0 keeps everything
    top_k = torch.tensor([d.sampling.top_k or torch.iinfo(torch.int64).max for d in chosen], dtype=torch.int64)
    return RandomRows(torch.tensor(rows, dtype=torch.int64), temperatures, thresholds, top_k[:, None], top_p, min_p)


def _is_limited(sampling: SamplingParams, vocabulary: int) -> bool:
    return sampling.top_p < 1 or sampling.min_p > 0 or 0 < sampling.top_k < vocabulary


Entry = tuple[int, NDArray[np.int64], NDArray[np.float32]]
"""A row, tokens [N], and the numbers that their logits are changed by [N]."""


def _changes(entries: Sequence[Entry]) -> LogitEdits | None:
    if not entries:
        return None
    rows = np.repeat([row for row, _, _ in entries], [len(tokens) for _, tokens, _ in entries])
    tokens, numbers = (np.concatenate([entry[part] for entry in entries]) for part in (1, 2))
    return LogitEdits(torch.from_numpy(rows), torch.from_numpy(tokens), torch.from_numpy(numbers))


def _seen(draws: Sequence[SamplingInput]) -> list[Entry]:
    return [
        (row, tokens, np.full(len(tokens), draw.sampling.repetition_penalty, np.float32))
        for row, draw in enumerate(draws)
        if draw.sampling.repetition_penalty != 1
        for tokens, _ in [draw.history.seen.now()]
    ]


def _generated(draws: Sequence[SamplingInput]) -> list[Entry]:
    return [
        (row, tokens, counts * np.float32(draw.sampling.frequency_penalty) + np.float32(draw.sampling.presence_penalty))
        for row, draw in enumerate(draws)
        if draw.sampling.frequency_penalty or draw.sampling.presence_penalty
        for tokens, counts in [draw.history.generated.now()]
    ]


def _biases(draws: Sequence[SamplingInput]) -> list[Entry]:
    """Each token once a row: a ban is a bias of minus infinity, and outweighs any other."""
    entries: list[Entry] = []
    for row, draw in enumerate(draws):
        biases = dict(draw.sampling.logit_bias)
        if draw.index < draw.sampling.min_tokens:
            biases |= dict.fromkeys(draw.end_tokens, float("-inf"))
        if biases:
            entries.append((row, np.array([*biases], np.int64), np.array([*biases.values()], np.float32)))
    return entries
