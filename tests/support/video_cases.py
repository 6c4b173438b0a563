"""Prompts with videos, and what transformers answers to them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tests.support import gemma4
from tests.support.checkpoints import load_reference
from tests.support.clips import picture
from tests.support.families import FRAME_TILES, SAME_MEDIA
from tests.support.harness import FLOAT32, Messages, running
from tests.support.image_cases import picture as still
from tests.support.image_cases import png
from tests.support.planners import seconds_of
from tests.support.tiny import GLM, HEARING, OMNI
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.config import EncodeConfig, EngineConfig
from triptych.media.frames import PackedFrames, pack_frames
from triptych.models.base import VISION, EncoderInput
from triptych.models.registry import family_of, resolve
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder
from triptych.types import ImageHeader, PixelBounds


def video_part(data: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "video", "data": data, **options}


def image_part(width: int, height: int, seed: int) -> dict[str, Any]:
    return {"type": "image", "data": png(still(width, height, seed))}


def user(*parts: str | dict[str, Any]) -> Messages:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def listed(numbers: Sequence[int], rate: float = 2.0) -> bytes:
    files = []
    for number in numbers:
        files.append(png(Image.fromarray(picture(number, 80, 48))))
    return pack_frames(PackedFrames(rate, files))


@dataclass(frozen=True)
class Model:
    """A checkpoint, and its expected answers to all cases."""

    folder: Path
    cases: dict[str, Messages]

    @cached_property
    def family(self) -> str:
        """The model type."""
        return str(load_config(self.folder)["model_type"])

    @cached_property
    def prompts(self) -> list[PlannedPrompt]:
        builder = PromptBuilder(self.folder)
        return [builder.build(messages) for messages in self.cases.values()]

    @cached_property
    def answers(self) -> list[list[int]]:
        """What transformers says to what its own processor would make of the videos (``tests/models``)."""
        reference: Any = load_reference(self.folder)
        answers = []
        for prompt in self.prompts:
            with torch.inference_mode():
                output = reference.generate(
                    **self.reference_inputs(prompt),
                    max_new_tokens=32,
                    min_new_tokens=32,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            answers.append(output[0, len(prompt.tokens) :].tolist())
        assert len({tuple(answer) for answer in answers}) >= len(answers) - 1
        return answers

    def reference_inputs(self, prompt: PlannedPrompt) -> dict[str, Any]:
        config = load_config(self.folder)
        family = SAME_MEDIA.get(config["model_type"], config["model_type"])
        preprocess = resolve(family_of(config).preprocessor or "")(
            config, load_preprocessor_config(self.folder), load_video_config(self.folder)
        )
        tokens = torch.tensor([prompt.tokens])
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if family in FRAME_TILES:
            parts = [list(preprocess(item.data, item.plan)) for item in prompt.items]
            if family == "minicpmv4_6":
                return inputs | _minicpm_inputs(prompt, parts)
            return inputs | TILE_INPUTS[family](prompt, [pixels_of(some, config) for some in parts])
        if family == "gemma4":
            return inputs | gemma4.reference_inputs(prompt, preprocess)
        if family not in (*OMNI, *HEARING):  # the former find out by themselves
            inputs["mm_token_type_ids"] = torch.zeros_like(tokens, dtype=torch.int)
            for item in prompt.items:
                for span in item.placement.spans:
                    inputs["mm_token_type_ids"][:, span.start : span.end] = 1 + (item.plan.modality == "video")
        if family in GLM and len({item.plan.modality for item in prompt.items}) > 1:
            return inputs | _all_as_images(prompt, preprocess)
        for modality, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            items = [item for item in prompt.items if item.plan.modality == modality]
            if items:
                made = [part for item in items for part in preprocess(item.data, item.plan)]
                parts = [part.patches for part in made if part.tower == VISION]
                inputs[values] = torch.from_numpy(np.concatenate(parts))
                inputs[f"{modality}_grid_thw"] = torch.tensor([item.plan.grid for item in items])
        name = "video_second_per_grid" if family in OMNI else {"qwen2_5_vl": "second_per_grid_ts"}.get(family)
        if name and "pixel_values_videos" in inputs:
            seconds = [seconds_of(family, item.plan) for item in prompt.items if item.plan.modality == "video"]
            inputs[name] = torch.tensor(seconds)
        return inputs


def _all_as_images(prompt: PlannedPrompt, preprocess: Any) -> dict[str, Any]:
    """Inputs of GLM-V, to which a video's temporal patches are images at the same places. Transformers fails for images
    beside videos, whose tokens are the same."""
    parts = [part for item in prompt.items for part in preprocess(item.data, item.plan)]
    kinds = torch.zeros(1, len(prompt.tokens), dtype=torch.int)
    for item in prompt.items:
        for span in item.placement.spans:
            kinds[:, span.start : span.end] = 1
    patches = torch.from_numpy(np.concatenate([part.patches for part in parts]))
    grids = torch.tensor([part.grid for part in parts])
    return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def pixels_of(parts: list[EncoderInput], config: dict[str, Any]) -> Tensor:
    """Pixels [tiles, 3, side, side] of the parts' patches; those beyond the last whole patch are 0."""
    side, patch = (np.atleast_1d(config["vision_config"][f"{name}_size"])[0] for name in ("image", "patch"))
    patches = torch.cat([torch.from_numpy(part.patches) for part in parts])
    grid = patches.view(-1, side // patch, side // patch, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
    whole = grid.reshape(len(grid), 3, side // patch * patch, -1)
    return F.pad(whole, (0, side % patch, 0, side % patch))


def _internvl_inputs(prompt: PlannedPrompt, pixels: list[Tensor]) -> dict[str, Any]:
    return {"pixel_values": torch.cat(pixels)} if pixels else {}


def _llava_onevision_inputs(prompt: PlannedPrompt, pixels: list[Tensor]) -> dict[str, Any]:
    modalities = [item.plan.modality for item in prompt.items]
    frames = [made for made, modality in zip(pixels, modalities, strict=True) if modality == "video"]
    inputs: dict[str, Any] = {"pixel_values_videos": torch.stack(frames)} if frames else {}
    if "image" in modalities:
        number = modalities.index("image")  # the only one
        header = prompt.items[number].plan.header
        assert isinstance(header, ImageHeader)
        inputs |= {"pixel_values": pixels[number][None], "batch_num_images": torch.tensor([1])}
        inputs["image_sizes"] = torch.tensor([[header.height, header.width]])
    return inputs


def _minicpm_inputs(prompt: PlannedPrompt, parts: list[list[EncoderInput]]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for modality, suffix in (("image", ""), ("video", "_videos")):
        items = zip(prompt.items, parts, strict=True)
        if some := [part for item, made in items if item.plan.modality == modality for part in made]:
            patches = torch.cat([torch.from_numpy(part.patches) for part in some]).unflatten(1, (3, 4, 4))
            inputs[f"pixel_values{suffix}"] = patches.permute(1, 2, 0, 3).flatten(2)[None]
            inputs[f"target_sizes{suffix}"] = torch.tensor([part.grid[1:] for part in some])
    return inputs


def _smolvlm_inputs(prompt: PlannedPrompt, pixels: list[Tensor]) -> dict[str, Any]:
    return {"pixel_values": torch.cat(pixels)[None]} if pixels else {}


TILE_INPUTS = {
    "internvl": _internvl_inputs,
    "llava_onevision": _llava_onevision_inputs,
    "smolvlm": _smolvlm_inputs,
}


def answered(
    model: Model, topology: str, engine: EngineConfig = FLOAT32, encode: EncodeConfig | None = None
) -> list[list[int]]:
    """What a service says to all of a model's cases at once."""

    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine, encode=encode) as service:
            return await service.answers(list(model.cases.values()))

    return asyncio.run(run())


SMALL = {"bounds": PixelBounds(4 * 28 * 28, 12 * 28 * 28)}

WHOLE, CHUNKS = 4096, 7

ONE_BLOCK = {"receive_blocks": 1, "receive_block_rows": 8, "kv_receive_blocks": 4}

RUNS = [
    ("1E1P1D", CHUNKS, ONE_BLOCK),
]

MORE = [
    (topology, chunk, pool)
    for topology in ("1EPD", "1E1PD", "1E1P1D")
    for chunk in (WHOLE, CHUNKS)
    for pool in ({}, ONE_BLOCK)
    if (topology, chunk, pool) not in RUNS and not (topology == "1EPD" and pool)
]
