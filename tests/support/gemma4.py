"""What transformers' Gemma 4 takes, of our preprocessor's parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.models.base import EncoderInput
from triptych.prompt.prompt import PlannedPrompt

CHANNELS, POOL = 3, 3


def in_rows(part: EncoderInput) -> Tensor:
    """Patches as the reference has them: row by row, the channels of a pixel side by side."""
    _, rows, columns = part.grid
    patches = torch.from_numpy(part.patches).view(rows // POOL, columns // POOL, POOL, POOL, CHANNELS, -1)
    return patches.permute(0, 2, 1, 3, 5, 4).reshape(rows * columns, -1)


def padded(parts: Sequence[EncoderInput]) -> tuple[Tensor, Tensor]:
    """Patches [parts, most patches, values] and their columns and rows [parts, most patches, 2], padded with -1."""
    most = max(len(part.patches) for part in parts)
    pixels = torch.zeros(len(parts), most, parts[0].patches.shape[1])
    places = torch.full((len(parts), most, 2), -1)
    for number, part in enumerate(parts):
        count = len(part.patches)
        pixels[number, :count] = in_rows(part)
        rows, columns = np.divmod(np.arange(count), part.grid[2])
        places[number, :count] = torch.from_numpy(np.stack([columns, rows], axis=1))
    return pixels, places


def reference_inputs(prompt: PlannedPrompt, preprocess: Any) -> dict[str, Any]:
    """Inputs of the prompt's media."""
    made = {kind: list[list[EncoderInput]]() for kind in ("image", "video", "audio")}
    for item in prompt.items:
        made[item.plan.modality].append(list(preprocess(item.data, item.plan)))
    inputs: dict[str, Any] = {}
    if made["image"]:
        inputs["pixel_values"], inputs["image_position_ids"] = padded([part for [part] in made["image"]])
    if made["video"]:
        frames = [part for parts in made["video"] for part in parts]
        inputs["pixel_values_videos"], inputs["video_position_ids"] = padded(frames)
        inputs["num_frames_per_video"] = torch.tensor([len(parts) for parts in made["video"]])
    if made["audio"]:
        clips = [torch.from_numpy(part.patches) for [part] in made["audio"]]
        lengths = torch.tensor([len(clip) for clip in clips])
        inputs["input_features"] = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
        inputs["input_features_mask"] = torch.arange(int(lengths.max())) < lengths[:, None]
    return inputs
