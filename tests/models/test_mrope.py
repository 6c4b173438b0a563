"""Positions of random prompts of text and media, as planned, against each family's ``get_rope_index``."""

import importlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.families import ROPE_INDEX
from tests.support.planners import BOUNDS, config_of, planner_of, random_sound, random_video, seconds_of
from tests.support.tiny import GLM, OMNI, TINY
from triptych.errors import PlanMismatch
from triptych.models.base import AUDIO, Planner
from triptych.models.shared.mrope import MediaPositions, mrope_positions
from triptych.types import MODEL_SAMPLING, ImageHeader, ItemContext, ItemPlan, Placement, Span

TEXT = 65
KINDS = {"image": 1, "video": 2, "audio": 3}


@dataclass
class Mix:
    """A random prompt as the reference takes it, and as we do. ``types`` says of what kind each token is; ``seconds``
    how long a patch in time of each video is."""

    tokens: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plans: list[ItemPlan] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    with_audio: bool = False

    def add_text(self, count: int, token: int = TEXT) -> None:
        self.tokens += [token] * count
        self.types += [0] * count

    def add(self, planner: Planner, plan: ItemPlan, marks: tuple[int, int] | None) -> None:
        """``marks`` stand before and behind each run."""
        spans: list[Span] = []
        for run in planner.runs(plan):
            if spans:
                self.add_text(3)  # a time
            if marks:
                self.add_text(1, marks[0])
            spans.append(Span(len(self.tokens), run))
            placeholder = planner.placeholder_tokens[plan.modality]
            assert isinstance(placeholder, int)
            self.tokens += [placeholder] * run
            self.types += [KINDS[plan.modality]] * run
            if marks:
                self.add_text(1, marks[1])
        self.plans.append(plan)
        self.placements.append(Placement(tuple(spans)))

    def add_heard(self, planner: Planner, plan: ItemPlan, marks: tuple[int, int]) -> None:
        """Add a video with audio, whose audio markers are between its own."""
        kinds = {token: KINDS[name] for name, token in planner.placeholder_tokens.items()}
        runs, spans = iter(planner.runs(plan)), []
        self.add_text(1, marks[0])
        for token in map(int, planner.placeholder(plan, "{} ".format).split()):
            if token not in kinds:
                self.add_text(1, token)
                continue
            spans.append(Span(len(self.tokens), next(runs)))
            self.tokens += [token] * spans[-1].length
            self.types += [kinds[token]] * spans[-1].length
        self.add_text(1, marks[1])
        self.plans.append(plan)
        self.placements.append(Placement(tuple(spans)))

    def grids(self, modality: str) -> torch.Tensor | None:
        grids = [plan.grid for plan in self.plans if plan.modality == modality]
        return torch.tensor(grids) if grids else None


def random_mix(source: random.Random, family: str, planner: Planner) -> Mix:
    """The ends may be bare, but two items always have text between them, as in templates; Omni looks for the marks.
    Either all videos of a prompt are heard or none."""
    config = config_of(family)
    config = config.get("thinker_config", config)
    kind = "image" if family in GLM else "vision"
    seen = config[f"{kind}_start_token_id"], config[f"{kind}_end_token_id"]
    mix = Mix(with_audio=planner.audio_in_video and source.random() < 0.5)
    mix.add_text(source.choice([0, 1, 20]))
    for _ in range(source.randrange(6)):
        marks = None if family not in OMNI and source.random() < 0.3 else seen
        if family in OMNI and source.random() < 0.4:
            plan = planner.plan(random_sound(source))
            marks = config["audio_start_token_id"], TEXT
        elif source.random() < 0.5:
            plan = planner.plan(ImageHeader("PNG", source.randint(20, 300), source.randint(20, 300)))
        else:
            header, sampling = random_video(source)
            sampling = MODEL_SAMPLING if family in GLM else sampling  # which refuses numbers of frames
            context = ItemContext(BOUNDS, sampling, random_sound(source) if mix.with_audio else None)
            plan = planner.plan(header, context)
            mix.seconds.append(seconds_of(family, plan))
        if plan.sound:
            mix.add_heard(planner, plan, seen)
        else:
            mix.add(planner, plan, marks)
        mix.add_text(source.choice([1, 2, 30]))
    if mix.plans and source.random() < 0.3:
        end = mix.placements[-1].end + (family in OMNI) * (2 if mix.plans[-1].sound else 1)
        del mix.tokens[end:], mix.types[end:]
    return mix if mix.tokens else Mix([TEXT], [0])


def reference_of(family: str) -> Any:
    """A model without weights: ``get_rope_index`` reads the config only."""
    if family in OMNI:
        model_class: Any = getattr(transformers, TINY[family].model)
        config: Any = model_class.config_class(**TINY[family].config["thinker_config"])
    else:
        folder, prefix = ROPE_INDEX[family]
        package = f"transformers.models.{folder}"
        model_class = getattr(importlib.import_module(f"{package}.modeling_{folder}"), f"{prefix}Model")
        config = getattr(importlib.import_module(f"{package}.configuration_{folder}"), f"{prefix}Config")()
    reference = model_class.__new__(model_class)
    torch.nn.Module.__init__(reference)
    reference.config = config
    if family == "qwen2_5_vl":
        config.vision_config.tokens_per_second = TINY[family].config["vision_config"]["tokens_per_second"]
    reference.spatial_merge_size = config.vision_config.spatial_merge_size
    return reference


@pytest.mark.parametrize("family", ROPE_INDEX)
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_as_the_reference(family: str, count: int) -> None:
    reference, planner, source = reference_of(family), planner_of(family), random.Random(count)
    seconds_name = "second_per_grids" if family in OMNI else {"qwen2_5_vl": "second_per_grid_ts"}.get(family)
    for _ in range(count):
        mix = random_mix(source, family, planner)
        tokens = torch.tensor([mix.tokens])
        given: dict[str, Any] = {"image_grid_thw": mix.grids("image"), "video_grid_thw": mix.grids("video")}
        if family in OMNI:
            given["attention_mask"] = torch.ones_like(tokens)
            heard = [p for p in mix.plans if p.sound or p.modality == "audio"]
            given["audio_seqlens"] = torch.tensor(
                [sum(part.patches for part in p.parts if part.tower == AUDIO) for p in heard]
            )
            given["use_audio_in_video"] = mix.with_audio
        else:
            given["mm_token_type_ids"] = torch.tensor([mix.types])
        if seconds_name:
            given[seconds_name] = torch.tensor(mix.seconds)
        expected, delta = reference.get_rope_index(tokens, **given)
        positions = planner.positions(len(mix.tokens), mix.placements, mix.plans)
        assert positions.prompt.dtype == np.float64
        if expected.is_floating_point():  # Omni's, in float32, where frames may be between whole numbers
            np.testing.assert_allclose(positions.prompt, expected[:, 0].numpy(), rtol=1e-6, atol=1e-3)
            assert positions.next_position == pytest.approx(len(mix.tokens) + delta.item(), abs=1e-3)
        else:
            np.testing.assert_array_equal(positions.prompt, expected[:, 0].numpy())
            assert positions.next_position == len(mix.tokens) + delta.item()


def test_positions_other_than_a_grid() -> None:
    """A shape that isn't a grid: what follows continues where the shape says."""
    shape = MediaPositions(np.array([[0, 0, 5.0], [0, 1, 1], [3, 2, 1]]), advance=4)
    positions = mrope_positions(6, [Span(1, 3)], [shape])
    assert positions.prompt.tolist() == [[0, 1, 1, 6, 5, 6], [0, 1, 2, 2, 5, 6], [0, 4, 3, 2, 5, 6]]
    assert positions.next_position == 7
    with pytest.raises(PlanMismatch, match="3 rows"):
        mrope_positions(6, [Span(4, 3)], [shape])
