"""How vLLM takes the embedding of an image in a request."""

from collections.abc import Sequence
from typing import Any

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni", "qwen3_omni")
"""How the ``model_type`` of each family begins of which it takes an embedding together with its grid."""
FAMILIES = (*GRID_FAMILIES, "llava")
"""The same of all families that a gateway before vLLM serves."""


def placeholder_part(file: str, grid: Sequence[int], key: str, model_type: str) -> dict[str, Any]:
    """Return a content part for a vLLM that gets rows by a connector, under the name ``key``. Families without a grid
    need the image itself, as a URL: ``file``."""
    if model_type.startswith(GRID_FAMILIES):
        return {"type": "image_embeds", "image_embeds": {"image_grid_thw": list(grid)}, "uuid": key}
    return {"type": "image_url", "image_url": {"url": file}, "uuid": key}


def image_part(rows: str, grid: Sequence[int], key: str, model_type: str) -> dict[str, Any]:
    """Return a content part for a vLLM that runs with ``--enable-mm-embeds``. ``rows`` are a NumPy file in base64,
    ``grid`` is an item's patches in time, rows and columns, and ``key`` names the item's content."""
    embeds: Any = rows
    if model_type.startswith(GRID_FAMILIES):
        embeds = {"image_embeds": rows, "image_grid_thw": list(grid)}
    return {"type": "image_embeds", "image_embeds": embeds, "uuid": key}
