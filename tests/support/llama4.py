"""Llama 4's image processor without torchvision, which transformers' class needs: that class's own functions, and
PyTorch's resizing, which torchvision calls."""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.image_utils import SizeDict
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.support.without_torchvision import functions_of

# transformers 5.23 reads it of the language model's outputs, which don't have it
setattr(MoeCausalLMOutputWithPast, "image_outputs", None)  # noqa: B010

FUNCTIONS = ("get_factors", "get_max_res_without_distortion", "find_supported_resolutions", "get_best_fit")
MODES = {2: "bilinear", 3: "bicubic"}


@cache
def source() -> dict[str, Any]:
    """The functions of transformers' file that compute sizes."""
    names: dict[str, Any] = {"math": math, "torch": torch, "defaultdict": defaultdict, "SizeDict": SizeDict}
    names["lru_cache"] = lambda maxsize: cache
    return functions_of("models/llama4/image_processing_llama4.py", FUNCTIONS, names)


def projected(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Rows of tiles, [tiles, rows, width], which transformers' own method leaves unprojected."""
    rows: Tensor = model.multi_modal_projector(model.get_image_features(**inputs).last_hidden_state)
    return rows


class Llama4Pixels:
    """Called as transformers' processors are."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.side = settings["size"]["height"]
        self.most = settings.get("max_patches", 16)
        self.fills = settings.get("resize_to_max_canvas", False)
        self.mode = MODES[settings.get("resample", 2)]
        self.mean, self.std = (settings.get(f"image_{kind}", [0.5] * 3) for kind in ("mean", "std"))

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the scaled image and of its canvas."""
        names, side = source(), self.side
        possible = torch.tensor(names["find_supported_resolutions"](self.most, SizeDict(height=side, width=side)))
        target = names["get_best_fit"]((height, width), possible, resize_to_max_canvas=self.fills)
        limits = target
        if not self.fills:
            limits = (min(max(height, side), target[0]), min(max(width, side), target[1]))
        scaled = names["get_max_res_without_distortion"]((height, width), limits)
        return (max(int(scaled[0]), 1), max(int(scaled[1]), 1)), (int(target[0]), int(target[1]))

    def __call__(self, images: Sequence[Sequence[Any]], return_tensors: str = "pt") -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([self.tiles(image) for image in images[0]]).float()}

    def tiles(self, image: Any) -> Tensor:
        """bfloat16 [tiles, 3, side, side]."""
        channels_first = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        scaled, canvas = self.sizes(*channels_first.shape[2:])
        pixels = self._resized(channels_first, scaled)
        pixels = F.pad(pixels, (0, canvas[1] - scaled[1], 0, canvas[0] - scaled[0]))
        rows, columns = canvas[0] // self.side, canvas[1] // self.side
        tiles = pixels.view(3, rows, self.side, columns, self.side).permute(1, 3, 0, 2, 4).flatten(0, 1)
        if rows * columns > 1:
            tiles = torch.cat((tiles, self._resized(channels_first, (self.side, self.side))))
        mean, std = (torch.tensor(it, dtype=torch.bfloat16)[:, None, None] for it in (self.mean, self.std))
        return (tiles.to(torch.bfloat16) * (1 / 255) - mean) / std

    def _resized(self, pixels: Tensor, size: tuple[int, int]) -> Tensor:
        if tuple(pixels.shape[2:]) == size:
            return pixels
        return F.interpolate(pixels, size, mode=self.mode, antialias=True, align_corners=False)
