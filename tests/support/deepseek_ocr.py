"""DeepSeek-OCR, which transformers doesn't have: its config as that of a class with the same layers, and its views of
an image, written from the published description.

``UnlimitedOcrForConditionalGeneration`` has DeepSeek-OCR's towers and decoder. Its attention has a window over
generated tokens, which is longer than all answers here.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, UnlimitedOcrConfig, UnlimitedOcrForConditionalGeneration

PUBLISHED = "deepseek_vl_v2"
IMAGE = "<image>"
GREY = (127, 127, 127)


def model_of(config: dict[str, Any], image_token: int) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class and its config, of a published ``config.json``."""
    sections = config["vision_config"]["width"]
    sam, clip = (dict(sections[name]) for name in ("sam_vit_b", "clip-l-14-224"))
    for section in (sam, clip):
        section["hidden_size"] = section.pop("width")
        section["num_hidden_layers"] = section.pop("layers")
        section["num_attention_heads"] = section.pop("heads")
    text = {**config["language_config"], "sliding_window": 4096}
    vision = {"sam_config": sam | {"image_size": config["vision_config"]["image_size"]}, "encoder_config": clip}
    made = UnlimitedOcrConfig(text_config=text, vision_config=vision, image_token_id=image_token)
    return UnlimitedOcrForConditionalGeneration, made


def grid_of(width: int, height: int, tile: int, least: int = 2, most: int = 6) -> tuple[int, int]:
    """Columns and rows of tiles: of all grids in order of their number, the one of the nearest aspect ratio; of equally
    near ones a later one if the image has more than half of its pixels. (1, 1) for an image within a tile."""
    if width <= tile and height <= tile:
        return 1, 1
    sizes = range(1, most + 1)
    grids = [(columns, rows) for columns in sizes for rows in sizes if least <= columns * rows <= most]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > tile**2 * columns * rows / 2):
            best, nearest = (columns, rows), distance
    return best


def num_rows(grid: tuple[int, int], tile: int = 640, whole: int = 1024, patch: int = 16) -> int:
    """Rows of an image in tiles of ``grid``."""
    local, across = (math.ceil(side // patch / 4) for side in (tile, whole))
    tiled = 0 if grid == (1, 1) else grid[1] * local * (grid[0] * local + 1)
    return tiled + across * (across + 1) + 1


def views_of(image: Image.Image, tile: int, whole: int, *, cuts: bool) -> tuple[list[Image.Image], tuple[int, int]]:
    """Tiles, then the whole; and the grid."""
    columns, rows = grid_of(*image.size, tile) if cuts else (1, 1)
    stretched = image.resize((columns * tile, rows * tile))
    tiles = [
        stretched.crop((left, top, left + tile, top + tile))
        for top in range(0, rows * tile, tile)
        for left in range(0, columns * tile, tile)
    ]
    last = ImageOps.pad(image, (whole, whole), color=GREY)
    return [*(tiles if columns * rows > 1 else []), last], (columns, rows)


def only_view_of(image: Image.Image, side: int, small: int = 640) -> Image.Image:
    """What the published code shows without tiles: small squares are stretched, others padded."""
    stretched = image.resize((side, side)) if side <= small else image
    return ImageOps.pad(stretched, (side, side), color=GREY)


def pixels_of(view: Image.Image) -> Tensor:
    """float32 [3, height, width] from -1 to 1, as torchvision's ``ToTensor`` and ``Normalize`` compute them."""
    pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255
    return (pixels - 0.5) / 0.5


def inputs_of(images: Sequence[Image.Image], tile: int, whole: int) -> dict[str, Any]:
    """What the model takes: one image is tiled, several aren't."""
    made = [views_of(image.convert("RGB"), tile, whole, cuts=len(images) == 1) for image in images]
    found: dict[str, Any] = {
        "pixel_values": torch.stack([pixels_of(views[-1]) for views, _ in made]),
        "num_local_patches": [len(views) - 1 for views, _ in made],
        "patches_grid": [list(grid) for _, grid in made],
    }
    if tiles := [pixels_of(view) for views, _ in made for view in views[:-1]]:
        found["pixel_values_local"] = torch.stack(tiles)
    return found


class OCRPixels:
    """``inputs_of`` as an image processor."""

    def __init__(self, settings: dict[str, Any], config: dict[str, Any]) -> None:
        self.tile, self.whole = settings.get("tile_size", 640), config["vision_config"]["image_size"]

    def __call__(self, images: Sequence[Sequence[Any]], return_tensors: str = "pt") -> dict[str, Any]:
        return inputs_of([Image.fromarray(np.asarray(image)) for image in images[0]], self.tile, self.whole)
