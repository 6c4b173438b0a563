"""How vLLM takes the embeddings of media in a request."""

from collections.abc import Sequence
from typing import Any

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni")
"""How the ``model_type`` of each family begins of which it takes an image's embedding together with its grid."""
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""The same for videos."""
FAMILIES = (*GRID_FAMILIES, "llava")
"""The same of all families that a gateway before vLLM serves."""


def refusal(model_type: str, modality: str) -> str:
    """Return why a vLLM gets no embeddings of a family's media of a kind; empty if it does."""
    taken = {"image": FAMILIES, "video": VIDEO_FAMILIES}.get(modality, ())
    if model_type.startswith(taken):
        return ""
    return f"vLLM takes no embeddings of {modality} from a gateway for models of the type {model_type}"


def grid_part(
    modality: str, grid: Sequence[int], key: str, *, rows: str = "", times: Sequence[float] = ()
) -> dict[str, Any]:
    """Return a content part for a medium of a family with grids, under the name ``key``.

    ``grid`` is its patches in time, rows and columns, ``rows`` a NumPy file in base64; empty if a connector asks for
    them. ``times`` are those that the prompt has before a video's temporal patches, in seconds."""
    embeds: dict[str, Any] = {f"{modality}_embeds": rows} if rows else {}
    embeds[f"{modality}_grid_thw"] = list(grid)
    if times:
        embeds["timestamps"] = list(times)
    return {"type": f"{modality}_embeds", f"{modality}_embeds": embeds, "uuid": key}


def image_part(rows: str, grid: Sequence[int], key: str, model_type: str) -> dict[str, Any]:
    """Return a content part for a vLLM that runs with ``--enable-mm-embeds``. ``rows`` are a NumPy file in base64,
    ``grid`` is an item's patches in time, rows and columns, and ``key`` names the item's content."""
    if model_type.startswith(GRID_FAMILIES):
        return grid_part("image", grid, key, rows=rows)
    return {"type": "image_embeds", "image_embeds": rows, "uuid": key}


def file_part(file: str, key: str) -> dict[str, Any]:
    """Return a content part for a family without a grid and a vLLM that gets rows by a connector: it needs the image
    itself, as a URL, ``file``."""
    return {"type": "image_url", "image_url": {"url": file}, "uuid": key}
