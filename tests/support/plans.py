"""Plans of items that no model made."""

from collections.abc import Sequence

from triptych.models.base import VISION
from triptych.types import ImageHeader, ItemPart, ItemPlan


def plan_of(*parts: int, patches: Sequence[int] = (), cost: float = 1.0) -> ItemPlan:
    """A plan with parts of these numbers of rows, by default one row. Each has a patch, unless ``patches`` says how
    many, and an equal share of the cost."""
    rows = parts or (1,)
    patches = patches or [1] * len(rows)
    made, first = [], 0
    for number, count in zip(rows, patches, strict=True):
        made.append(ItemPart(((first, number),), count, cost / len(rows), VISION))
        first += number
    return ItemPlan(
        modality="image",
        header=ImageHeader("png", 1, 1),
        resized_height=1,
        resized_width=1,
        grid=(sum(patches), 1, 1),
        rows=first,
        patches=sum(patches),
        cost=cost,
        parts=tuple(made),
    )
