"""``/v1/encode`` gives the features that transformers computes, in the layout that decoders take."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.checkpoints import make_checkpoint
from tests.support.image_cases import picture, png
from tests.support.reference import UNUSED, Reference, image_features, image_processor
from tests.support.serving import image_part, served
from tests.support.tiny import make_tiny
from triptych.client import EncodeClient, EncodedItem

MAX_DIFFERENCE = 1e-4
"""As a share of the largest value."""
PICTURES = [picture(96, 64, 1), picture(300, 200, 2), picture(64, 64, 3)]
MAKE: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": lambda folder: make_tiny(folder, "qwen2_5_vl"),
    "qwen3_vl": make_checkpoint,  # with deepstack levels
    "llava": lambda folder: make_tiny(folder, "llava"),
    "gemma3": lambda folder: make_tiny(folder, "gemma3"),
    "llava+pixtral": lambda folder: make_tiny(folder, "llava+pixtral"),
}


def expected_rows(folder: Path, image: Image.Image) -> tuple[np.ndarray[Any, Any], list[int] | None]:
    """Transformers' rows, deepstack levels behind each, and grid."""
    processed = image_processor(folder)([[image.convert("RGB")]], return_tensors="pt")
    inputs = {name: value for name, value in processed.items() if name not in UNUSED}
    with torch.inference_mode():
        output = image_features(Reference(folder).model, inputs)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    grid = inputs.get("image_grid_thw")
    whole = torch.cat([joined(one) for one in levels], dim=1)
    return whole.numpy(), None if grid is None else grid[0].tolist()


def joined(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all images, of which transformers may return a tensor each."""
    whole = rows if isinstance(rows, torch.Tensor) else torch.cat(list(rows))
    return whole.reshape(-1, whole.shape[-1])


@pytest.fixture(scope="module", params=MAKE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return MAKE[request.param](tmp_path_factory.mktemp(request.param) / "model")


def encoded(url: str) -> list[EncodedItem]:
    with EncodeClient(url) as client:
        return client.encode(*(image_part(png(one)) for one in PICTURES))


@pytest.mark.parametrize("topology", ["1E1PD", "1EPD", "2E1P1D"])
def test_rows_and_grids_are_those_of_transformers(folder: Path, topology: str) -> None:
    with served(folder, topology) as service:
        items = encoded(f"{service.url}/v1")
        again = encoded(service.url)
        service.settle()
    for image, item, repeated in zip(PICTURES, items, again, strict=True):
        rows, grid = expected_rows(folder, image)
        assert item.rows.shape == rows.shape
        assert np.abs(item.rows - rows).max() <= MAX_DIFFERENCE * np.abs(rows).max()
        assert grid is None or list(item.grid_thw) == grid
        assert item.info["tokens"] == len(rows)
        assert (item.key, item.type) == (repeated.key, "image")
        assert np.array_equal(item.rows, repeated.rows)
    assert len({item.key for item in items}) == len(PICTURES)
