"""Embeddings of a tower against those of another one."""

from typing import Any

import torch

from triptych.types import ItemPlan

MAX_DIFFERENCE = 1e-4
"""Of embeddings, as a share of the largest value."""


def in_place(parts: list[torch.Tensor], plan: ItemPlan) -> torch.Tensor:
    """Return a picture's embeddings in their order, of those of its parts."""
    rows = torch.zeros(plan.rows, parts[0].shape[1])
    for part, made in zip(plan.parts, parts, strict=True):
        lengths = [length for _, length in part.runs]
        for (first, length), run in zip(part.runs, made.split(lengths), strict=True):
            rows[first : first + length] = run
    return rows


def check_equal(parts: list[torch.Tensor], plan: ItemPlan, output: Any, max_difference: float = MAX_DIFFERENCE) -> None:
    """Raise ValueError if embeddings of the two sides differ in number, or by more than ``max_difference``, a share of
    the largest value. Transformers has them in the order of the parts or of the plan."""
    pooled = getattr(output, "pooler_output", output)
    expected = torch.cat(list(pooled)) if not isinstance(pooled, torch.Tensor) else pooled
    expected = expected.reshape(-1, expected.shape[-1])
    orders = torch.cat(parts), in_place(parts, plan)
    if orders[0].shape != expected.shape:
        raise ValueError(f"{tuple(orders[0].shape)} embeddings, but transformers has {tuple(expected.shape)}")
    difference = min(((found - expected).abs().max() / expected.abs().max()).item() for found in orders)
    if difference > max_difference:
        raise ValueError(f"embeddings differ by {difference:.1e} of the largest value")
