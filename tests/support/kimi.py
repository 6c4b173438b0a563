"""Kimi-VL as its report (arXiv:2504.07491) and published files describe it, over transformers' DeepSeek-V3; and how
Kimi-VL and Kimi K2.5 prepare images."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


class Block(nn.Module):
    """One layer of MoonViT."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.ModuleDict({"fc0": nn.Linear(width, inner), "fc1": nn.Linear(inner, width)})

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        """``hidden`` [patches, width] of one image; ``turns``, complex [patches, 1, head dim / 2]."""
        queries, keys, values = self.wqkv(self.norm0(hidden)).unflatten(1, (3, self.heads, -1)).unbind(1)
        queries, keys = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(2, (-1, 2)).contiguous()) * turns).flatten(2)
            for one in (queries, keys)
        )
        queries, keys, values = (one.transpose(0, 1) for one in (queries, keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values)
        hidden = hidden + self.wo(attended.transpose(0, 1).flatten(1))
        inner = F.gelu(self.mlp["fc0"](self.norm1(hidden)), approximate="tanh")
        output: Tensor = hidden + self.mlp["fc1"](inner)
        return output


class Projector(nn.Module):
    def __init__(self, width: int, merged: int, out: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width)
        self.linear_1, self.linear_2 = nn.Linear(merged, merged), nn.Linear(merged, out)

    def forward(self, squares: Tensor) -> Tensor:
        """``squares`` [rows, patches of a square, width] → [rows, out]"""
        output: Tensor = self.linear_2(F.gelu(self.linear_1(self.pre_norm(squares).flatten(1))))
        return output


class Table(nn.Module):
    def __init__(self, rows: int, columns: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, width))


class MoonViT(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        width, patch = settings["hidden_size"], settings["patch_size"]
        self.head_dim, self.merge = width // settings["num_attention_heads"], settings["merge_kernel_size"][0]
        size = settings["init_pos_emb_height"], settings["init_pos_emb_width"]
        self.patch_embed: Any = nn.ModuleDict(
            {"proj": nn.Conv2d(3, width, patch, patch), "pos_emb": Table(*size, width)}
        )
        blocks = [
            Block(width, settings["intermediate_size"], settings["num_attention_heads"])
            for _ in range(settings["num_hidden_layers"])
        ]
        self.encoder: Any = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "final_layernorm": nn.LayerNorm(width)})

    def forward(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """``pixels`` [rows * columns, 3, patch, patch] of one image, row by row → [squares, merge², width]"""
        table = self.patch_embed["pos_emb"].weight.permute(2, 0, 1)[None]
        places = F.interpolate(table, size=(rows, columns), mode="bicubic")[0].permute(1, 2, 0).flatten(0, 1)
        hidden = self.patch_embed["proj"](pixels).flatten(1) + places
        steps = 10_000.0 ** -(torch.arange(0, self.head_dim, 4) / self.head_dim)
        row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        angles = torch.stack((torch.outer(column.float(), steps), torch.outer(row.float(), steps)), dim=2).flatten(1)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        for block in self.encoder["blocks"]:
            hidden = block(hidden, turns)
        hidden = self.encoder["final_layernorm"](hidden)
        squares = hidden.view(rows // self.merge, self.merge, columns // self.merge, self.merge, -1).transpose(1, 2)
        return squares.reshape(-1, self.merge**2, hidden.shape[1])


class KimiVL(nn.Module):
    """Named as the published files' tensors, but for the experts, which transformers stacks."""

    config_class = dict

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type=config["model_type"], image_token_id=config["media_placeholder_token_id"]
        )
        text, vision = config["text_config"], config["vision_config"]
        self.vision_tower = MoonViT(vision)
        merged = vision["hidden_size"] * vision["merge_kernel_size"][0] ** 2
        self.multi_modal_projector = Projector(vision["hidden_size"], merged, text["hidden_size"])
        self.language_model = DeepseekV3ForCausalLM(DeepseekV3Config(**text))

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype) -> "KimiVL":
        model = cls(json.loads((folder / "config.json").read_text())).to(dtype)
        weights = load_file(folder / "model.safetensors")
        for name in model.state_dict():
            if ".experts." not in name:
                continue
            place, _, kind = name.rpartition(".")
            number, stacked = 0, []
            parts = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
            while f"{place}.{number}.{parts[0]}.weight" in weights:
                stacked.append(torch.cat([weights.pop(f"{place}.{number}.{part}.weight") for part in parts]))
                number += 1
            weights[name] = torch.stack(stacked)
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
        return model

    def get_image_features(self, pixel_values: Tensor, image_grid_hws: Tensor) -> list[Tensor]:
        """The embeddings of each image."""
        grids = [(int(rows), int(columns)) for rows, columns in image_grid_hws]
        each = pixel_values.split([rows * columns for rows, columns in grids])
        return [
            self.multi_modal_projector(self.vision_tower(one, *grid)) for one, grid in zip(each, grids, strict=True)
        ]

    def _embedded(self, input_ids: Tensor, **images: Tensor) -> Tensor:
        embedded: Tensor = self.language_model.get_input_embeddings()(input_ids)
        if images:
            embedded[input_ids == self.config.image_token_id] = torch.cat(self.get_image_features(**images))
        return embedded

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **images: Tensor) -> Any:
        return self.language_model(inputs_embeds=self._embedded(input_ids, **images), attention_mask=attention_mask)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        images = {}
        if pixel_values is not None and image_grid_hws is not None:
            images = {"pixel_values": pixel_values, "image_grid_hws": image_grid_hws}
        embedded = self._embedded(input_ids, **images)
        output: Tensor = self.language_model.generate(
            input_ids, inputs_embeds=embedded, attention_mask=attention_mask, **settings
        )
        return output


def kimi_vl_size(width: int, height: int, limit: int, patch: int = 14, merge: int = 2) -> tuple[int, int, int, int]:
    """Width and height of an image, and of what it is padded to."""
    patches = (width // patch) * (height // patch)
    if patches > limit:
        scale = math.sqrt(limit / patches)
        width, height = int(width * scale), int(height * scale)
    side = patch * merge
    return width, height, width + (side - width % side) % side, height + (side - height % side) % side


def kimi_vl_pixels(settings: dict[str, Any], images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """Pixels [patches, 3, patch, patch] of all images, and each image's rows and columns of patches."""
    patch = settings["patch_size"]
    mean, std = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
    pixels, grids = [], []
    for image in images:
        width, height, padded_width, padded_height = kimi_vl_size(*image.size, settings["in_token_limit"], patch)
        canvas = Image.new("RGB", (padded_width, padded_height))
        canvas.paste(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC), (0, 0))
        values = (np.asarray(canvas, np.float32) / np.float32(255) - mean) / std
        pixels.append(_patches(torch.from_numpy(values).permute(2, 0, 1), patch))
        grids.append((padded_height // patch, padded_width // patch))
    return {"pixel_values": torch.cat(pixels), "image_grid_hws": torch.tensor(grids)}


def _patches(pixels: Tensor, patch: int) -> Tensor:
    """[3, height, width] → [patches, 3, patch, patch], row by row"""
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    return pixels.view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4).reshape(-1, 3, patch, patch)


def kimi_k25_size(
    width: int, height: int, limit: int, *, patch: int = 14, merge: int = 2, most: int = 512
) -> tuple[int, int, int, int]:
    """As ``kimi_vl_size``: the arithmetic of ``navit_resize`` in transformers."""
    patches = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(limit / patches), (most * patch) / height, (most * patch) / width)
    new_height = min(max(1, int(height * scale)), most * patch)
    new_width = min(max(1, int(width * scale)), most * patch)
    side = patch * merge
    padded = (size + (side - size % side) % side for size in (new_width, new_height))
    padded_width, padded_height = padded
    return new_width, new_height, padded_width, padded_height


def kimi_k25_pixels(settings: dict[str, Any], images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """As ``kimi_vl_pixels``, of an image's tensor, which torchvision resizes by the kernel of ``interpolate``."""
    patch = settings["patch_size"]
    mean, std = (torch.tensor(settings[name]) * 255 for name in ("image_mean", "image_std"))
    pixels, grids = [], []
    for image in images:
        width, height, padded_width, padded_height = kimi_k25_size(*image.size, settings["max_patches"], patch=patch)
        values = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
        if (width, height) != image.size:
            values = F.interpolate(values, (height, width), mode="bicubic", antialias=True, align_corners=False)
        values = F.pad(values[0], (0, padded_width - width, 0, padded_height - height))
        normal = (values.float() - mean[:, None, None]) / std[:, None, None]
        pixels.append(_patches(normal, patch))
        grids.append((1, padded_height // patch, padded_width // patch))
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def kimi_k25_video(settings: dict[str, Any], frames: Sequence[Image.Image]) -> dict[str, Tensor]:
    """As ``kimi_k25_pixels``: chunks of four frames."""
    whole = kimi_k25_pixels(settings, frames)
    _, rows, columns = whole["image_grid_thw"][0].tolist()
    grids = [(len(frames[first : first + 4]), rows, columns) for first in range(0, len(frames), 4)]
    return {"pixel_values": whole["pixel_values"], "image_grid_thw": torch.tensor(grids)}


class KimiVLPixels:
    """``kimi_vl_pixels`` as an image processor."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def __call__(self, images: Sequence[Sequence[Any]], return_tensors: str = "pt") -> dict[str, Tensor]:
        return kimi_vl_pixels(self.settings, [Image.fromarray(np.asarray(image)) for image in images[0]])


class KimiK25Pixels(KimiVLPixels):
    """``kimi_k25_pixels`` as an image processor."""

    def __call__(self, images: Sequence[Sequence[Any]], return_tensors: str = "pt") -> dict[str, Tensor]:
        return kimi_k25_pixels(self.settings, [Image.fromarray(np.asarray(image)) for image in images[0]])
