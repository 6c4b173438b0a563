"""Sampling parameters as tensors: the part of sampling that needs no logits, and so can run while the model computes
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.engine.grammar.bitmask import allows, bitmask_tensor, single_token_mask
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.matching import masks as grammar_masks
from triptych.engine.history import History
from triptych.layers.pinned import to_device
from triptych.messages.work import SamplingParams

MAX_DELAY = 16
"""Tokens by which a grammar may put off the end of reasoning: none ends within a character."""
MASK_TIMEOUT = 0.005
"""Seconds that a step waits in total for grammar masks once its logits are computed."""


@dataclass(frozen=True)
class SamplingInput:
    """What determines one token besides the logits."""

    sampling: SamplingParams
    history: History
    end_tokens: frozenset[int]
    """Tokens that end the request."""
    grammar: Matching | None = None
    """Source of the mask of tokens that may come next."""

    @property
    def index(self) -> int:
        """Number of tokens generated before."""
        return self.history.num_generated


class LogitEdits(NamedTuple):
    """Changes to N logits, all tensors of shape [N]."""

    rows: Tensor
    """int64."""
    tokens: Tensor
    """int64."""
    values: Tensor
    """float32: the operands that the logits are changed by."""


class RandomRows(NamedTuple):
    """R rows to sample at random, with their parameters: float64 of shape [R, 1], unless another is given."""

    rows: Tensor
    """int64 [R]."""
    temperatures: Tensor
    thresholds: Tensor
    """Random numbers in [0, 1), which select from the cumulative distribution."""
    top_k: Tensor
    """int64."""
    top_p: Tensor
    min_p: Tensor


class SamplingBatch:
    """Sampling parameters of a step's rows, moved to the logits' device in one asynchronous copy.

    Attributes for which there are no rows are None or empty.
    """

    def __init__(self, inputs: Sequence[SamplingInput], vocabulary: int, device: torch.device) -> None:
        random = [row for row, one in enumerate(inputs) if one.sampling.temperature > 0]
        self.limited_rows = [row for row in random if _is_limited(inputs[row].sampling, vocabulary)]
        """Rows sampled from the tokens that min-p, top-k and top-p keep; ``limited`` has their parameters."""
        free_rows = sorted(set(random) - set(self.limited_rows))
        self.logprob_rows = [row for row, one in enumerate(inputs) if one.sampling.logprobs is not None]
        """Rows whose log probabilities are requested; on the device: ``logprob_index``, int64 [A]."""
        self.max_logprobs = max((inputs[row].sampling.logprobs or 0 for row in self.logprob_rows), default=0)
        """Largest number of likeliest tokens that a row requests."""
        masks, self.late_rows = _masks(inputs, vocabulary)
        edits = [_logit_edits(entries(inputs)) for entries in (_seen, _generated, _biases)]
        parameters = [_make_random_rows(inputs, rows) if rows else None for rows in (free_rows, self.limited_rows)]
        logprob_index = [torch.tensor(self.logprob_rows)] if self.logprob_rows else []
        tensors = [tensor for group in (*edits, *parameters) if group is not None for tensor in group]
        moved = iter(to_device([*tensors, *logprob_index, *masks.values()], device))
        self.seen, self.generated, self.biases = (None if e is None else LogitEdits(*islice(moved, 3)) for e in edits)
        self.free, self.limited = (None if p is None else RandomRows(*islice(moved, 6)) for p in parameters)
        self.logprob_index = next(moved) if logprob_index else None
        self.masks = dict(zip(masks, moved, strict=True))
        """Bitmasks of grammars and forced tokens by row. Rows whose mask came too late are in ``late_rows``."""


def forced_token(sampling: SamplingParams, history: History) -> int | None:
    """Return the token that must come next, if the grammar allows it, because the reasoning has used up its budget;
    None if any may."""
    if (budget := sampling.reasoning_budget) is None:
        return None
    begin = history.num_prompt + len(budget.opening)
    last = begin + budget.tokens
    if not 0 <= len(history.tokens) - last < len(budget.end) + MAX_DELAY:
        return None
    if history.tokens[history.num_prompt : begin] != budget.opening or budget.end[0] in history.tokens[begin:last]:
        return None
    beyond = history.tokens[last:]
    place = len(beyond) - beyond.index(budget.end[0]) if budget.end[0] in beyond else 0
    return budget.end[place] if place < len(budget.end) else None


def _masks(inputs: Sequence[SamplingInput], vocabulary: int) -> tuple[dict[int, Tensor], list[int]]:
    """Return the masks available within MASK_TIMEOUT, by row, and the rows of the others."""
    masks: dict[int, Tensor] = {}
    late = []
    arrived = iter(grammar_masks([one.grammar for one in inputs if one.grammar is not None], MASK_TIMEOUT))
    for row, one in enumerate(inputs):
        token = forced_token(one.sampling, one.history)
        mask = None if one.grammar is None else next(arrived)
        if one.grammar is not None and mask is None:
            late.append(row)
        elif token is not None and (mask is None or allows(mask, token)):
            masks[row] = single_token_mask(token, vocabulary)
        elif mask is not None:
            masks[row] = bitmask_tensor(mask)
    return masks, late


def make_random_rows(inputs: Sequence[SamplingInput], rows: Sequence[int], device: torch.device) -> RandomRows:
    """Return the parameters of some of the rows, on ``device``."""
    return RandomRows(*to_device(_make_random_rows(inputs, rows), device))


def num_candidates(sampling: SamplingParams) -> int:
    """Return how many of the largest logits the token is chosen from; 0 if others matter too."""
    masked = sampling.grammar is not None or sampling.reasoning_budget is not None
    changed = sampling.logit_bias or sampling.min_tokens or masked
    penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    if changed or penalties or sampling.logprobs is not None:
        return 0
    return sampling.top_k if sampling.temperature > 0 else 1


def uniform(seed: int, index: int) -> float:
    """Return the ``index``-th number in [0, 1) of a seed's stream. The generator is counter-based (Philox; Salmon et
    al., SC'11), so numbers can be drawn in any order and again after a preemption, without state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def _make_random_rows(inputs: Sequence[SamplingInput], rows: Sequence[int]) -> RandomRows:
    chosen = [inputs[row] for row in rows]
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
"""A row, tokens [N], and the operands that their logits are changed by [N]."""


def _logit_edits(entries: Sequence[Entry]) -> LogitEdits | None:
    if not entries:
        return None
    rows = np.repeat([row for row, _, _ in entries], [len(tokens) for _, tokens, _ in entries])
    tokens, numbers = (np.concatenate([entry[part] for entry in entries]) for part in (1, 2))
    return LogitEdits(torch.from_numpy(rows), torch.from_numpy(tokens), torch.from_numpy(numbers))


def _seen(inputs: Sequence[SamplingInput]) -> list[Entry]:
    return [
        (row, tokens, np.full(len(tokens), one.sampling.repetition_penalty, np.float32))
        for row, one in enumerate(inputs)
        if one.sampling.repetition_penalty != 1
        for tokens, _ in [one.history.seen.update()]
    ]


def _generated(inputs: Sequence[SamplingInput]) -> list[Entry]:
    return [
        (row, tokens, counts * np.float32(one.sampling.frequency_penalty) + np.float32(one.sampling.presence_penalty))
        for row, one in enumerate(inputs)
        if one.sampling.frequency_penalty or one.sampling.presence_penalty
        for tokens, counts in [one.history.generated.update()]
    ]


def _biases(inputs: Sequence[SamplingInput]) -> list[Entry]:
    """Return one entry per row with a bias. A banned token has a bias of minus infinity, which replaces any other."""
    entries: list[Entry] = []
    for row, one in enumerate(inputs):
        biases = dict(one.sampling.logit_bias)
        if one.index < one.sampling.min_tokens:
            biases |= dict.fromkeys(one.end_tokens, float("-inf"))
        if biases:
            entries.append((row, np.array([*biases], np.int64), np.array([*biases.values()], np.float32)))
    return entries
