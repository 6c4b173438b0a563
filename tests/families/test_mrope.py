"""Positions of random prompts of text, images and videos, against each family's ``get_rope_index``."""

import importlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from triptych.errors import PlanMismatch
from triptych.families.shared.mrope import Shape, grid_shape, mrope_positions
from triptych.types import Span

MERGE = 2
TEXT, IMAGE, VIDEO = 0, 1, 2
MODELS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoe"),
}
TOKENS_PER_SECOND = 2


@dataclass
class Mix:
    """A random prompt as the reference takes it, and as we do. Grids count patches; ``seconds`` is a frame's length."""

    types: list[int] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)

    def add(self, kind: int, frames: int, height: int, width: int, interval: float = 1.0) -> None:
        rows = frames * height * width
        self.spans.append(Span(len(self.types), rows))
        self.shapes.append(grid_shape(frames, height, width, interval))
        self.types += [kind] * rows


def random_mix(source: random.Random, family: str) -> Mix:
    """The ends may be bare, but two items always have text between them, as in templates."""
    mix = Mix(types=[TEXT] * source.choice([0, 1, 20]))
    for _ in range(source.randrange(6)):
        height, width = source.randint(1, 9), source.randint(1, 9)
        if source.random() < 0.5:
            mix.images.append((1, MERGE * height, MERGE * width))
            mix.add(IMAGE, 1, height, width)
        else:
            frames, seconds = source.randint(1, 12), source.choice([1.0, 0.5, 2 / 3, 1.7, 0.04])
            mix.videos.append((frames, MERGE * height, MERGE * width))
            mix.seconds.append(seconds)
            if family.startswith("qwen3"):  # each frame by itself, behind its time stamp
                for frame in range(frames):
                    mix.add(VIDEO, 1, height, width)
                    mix.types += [TEXT] * (3 if frame < frames - 1 else 0)
            else:
                mix.add(VIDEO, frames, height, width, TOKENS_PER_SECOND * seconds if family == "qwen2_5_vl" else 1.0)
        mix.types += [TEXT] * source.choice([1, 2, 30])
    if mix.spans and source.random() < 0.3:
        del mix.types[mix.spans[-1].end :]
    return mix if mix.types else Mix(types=[TEXT])


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_as_the_reference(family: str, count: int) -> None:
    folder, prefix = MODELS[family]
    package = f"transformers.models.{folder}"
    model_class = getattr(importlib.import_module(f"{package}.modeling_{folder}"), f"{prefix}Model")
    config_class = getattr(importlib.import_module(f"{package}.configuration_{folder}"), f"{prefix}Config")
    reference = model_class.__new__(model_class)  # ``get_rope_index`` reads the config only
    torch.nn.Module.__init__(reference)
    reference.config = config_class()
    reference.config.vision_config.tokens_per_second = TOKENS_PER_SECOND
    source = random.Random(count)
    for _ in range(count):
        mix = random_mix(source, family)
        expected, delta = reference.get_rope_index(
            torch.zeros(1, len(mix.types), dtype=torch.int64),
            torch.tensor([mix.types]),
            image_grid_thw=torch.tensor(mix.images) if mix.images else None,
            video_grid_thw=torch.tensor(mix.videos) if mix.videos else None,
            **({"second_per_grid_ts": mix.seconds} if family == "qwen2_5_vl" else {}),
        )
        positions = mrope_positions(len(mix.types), mix.spans, mix.shapes)
        assert positions.prompt.dtype == np.int64
        np.testing.assert_array_equal(positions.prompt, expected[:, 0].numpy())
        assert positions.next_position == len(mix.types) + delta.item()


def test_any_shape() -> None:
    """A shape that isn't a grid: what follows goes on where the shape says."""
    shape = Shape(np.array([[0, 0, 5], [0, 1, 1], [3, 2, 1]]), advance=4)
    positions = mrope_positions(6, [Span(1, 3)], [shape])
    assert positions.prompt.tolist() == [[0, 1, 1, 6, 5, 6], [0, 1, 2, 2, 5, 6], [0, 4, 3, 2, 5, 6]]
    assert positions.next_position == 7
    with pytest.raises(PlanMismatch, match="3 rows"):
        mrope_positions(6, [Span(4, 3)], [shape])
