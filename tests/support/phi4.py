"""Phi-4-multimodal's processor without torchvision, which transformers' class needs, and its published files."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F


class Phi4Pixels:
    """Makes what transformers' model takes for images, as the processor in the published files does, with Pillow."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.side, self.most = settings.get("size", {"height": 448})["height"], settings.get("dynamic_hd", 36)

    def __call__(self, batch: Sequence[Sequence[NDArray[np.uint8]]], return_tensors: str = "pt") -> dict[str, Tensor]:
        made = [_tiles(Image.fromarray(np.asarray(image)), self.side, 14, self.most) for one in batch for image in one]
        largest = max(len(tiles) for tiles, _, _ in made)
        pixels = [F.pad(tiles, (0, 0) * 3 + (0, largest - len(tiles))) for tiles, _, _ in made]
        masks = [F.pad(mask, (0, 0) * 2 + (0, largest - len(mask)), value=1.0) for _, mask, _ in made]
        return {
            "image_pixel_values": torch.stack(pixels),
            "image_attention_mask": torch.stack(masks),
            "image_sizes": torch.tensor([size for _, _, size in made]),
        }


@torch.inference_mode()
def phi4_rows(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Rows [rows, hidden] that transformers' model makes of an image."""
    config = model.config.vision_config
    shown = inputs["image_attention_mask"][0, 1:]
    rows, columns = (int(side) // config.crop_size for side in inputs["image_sizes"][0])
    patches = config.image_size // config.patch_size
    mask = shown.view(rows, columns, patches, patches).transpose(1, 2).reshape(rows * patches, -1)[::2, ::2]
    count = int(mask.sum()) + int(mask[:, 0].sum()) + (patches // 2) ** 2 + patches // 2 + 1
    tokens = torch.full((1, count), config.image_token_id)
    embed, empty = model.model.embed_tokens_extend.image_embed, torch.zeros(1, count, model.config.hidden_size)
    found: Tensor = embed(tokens, empty, **inputs)[0]
    return found


def grid(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """(columns, rows) of tiles."""
    columns, rows = math.ceil(width / side), math.ceil(height / side)
    if columns * rows <= most:
        return columns, rows
    every = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
    best, least = (1, 1), math.inf
    for i, j in sorted(every, key=lambda ratio: ratio[0] * ratio[1]):
        difference = abs(width / height - i / j)
        if difference < least or (difference == least and width * height > 0.5 * side * side * i * j):
            best, least = (i, j), difference
    return best


def padding(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """White pixels at the right and at the bottom."""
    columns, rows = grid(width, height, side, most)
    across, down = side * columns / width, side * rows / height
    if across < down:
        return 0, side * rows - int(height * across)
    return side * columns - int(width * down), 0


def num_tokens(width: int, height: int, side: int = 448, patch: int = 14, most: int = 36) -> int:
    """The published count, of the smallest mask."""
    columns, rows = grid(width, height, side, most)
    mask = _mask(columns, rows, padding(width, height, side, most), side // patch, patch)
    small, half = mask[::2, ::2], side // patch // 2
    return half**2 + 1 + int(small.sum()) + int(small[:, 0].sum()) + half


def _mask(columns: int, rows: int, white: tuple[int, int], side: int, patch: int) -> Tensor:
    mask = torch.ones(side * rows, side * columns)
    right, bottom = white[0] // patch, white[1] // patch
    if right:
        mask[:, -right:] = 0
    if bottom:
        mask[-bottom:] = 0
    return mask


def _tiles(image: Image.Image, side: int, patch: int, most: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """The whole and the tiles [tiles, 3, side, side], the masks [tiles, patches, patches] and (height, width)."""
    columns, rows = grid(*image.size, side, most)
    white = padding(*image.size, side, most)
    width, height = columns * side, rows * side
    canvas = Image.new("RGB", (width, height), "white")
    canvas.paste(image.resize((width - white[0], height - white[1]), Image.Resampling.BILINEAR))
    values = torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float().div(255)  # as ToTensor
    values = (values - 0.5) / 0.5
    whole = F.interpolate(values[None], size=(side, side), mode="bicubic")
    cut = values.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
    patches = side // patch
    mask = _mask(columns, rows, white, patches, patch).view(rows, patches, columns, patches)
    masks = mask.transpose(1, 2).reshape(-1, patches, patches)
    return torch.cat((whole, cut)), torch.cat((torch.ones(1, patches, patches), masks)), (height, width)
