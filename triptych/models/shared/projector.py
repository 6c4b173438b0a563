"""Names of the parts of families with a projector between their tower and the language model."""

from triptych.models.base import VISION
from triptych.models.shared.tower_adapter import WeightPrefixes

PROJECTOR = "projector"


def projector_layouts(tower: str = VISION, **others: str) -> tuple[WeightPrefixes, ...]:
    """Return the naming schemes of families with a tower, a projector and a language model: that of published files and
    of ``save_pretrained``, and that of modules. ``tower`` is its name, and ``others`` are names of more tensors, by the
    names that ``tower_keys`` gives them."""
    parts = {tower: f"{tower}_tower.", PROJECTOR: "multi_modal_projector.", **others}
    nested = {name: f"model.{prefix}" for name, prefix in parts.items()}
    return (
        WeightPrefixes(parts, "language_model.model.", "language_model.lm_head.weight"),
        WeightPrefixes(nested, "model.language_model."),
    )
