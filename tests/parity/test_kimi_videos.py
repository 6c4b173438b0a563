"""Kimi K2.5 answers about videos as transformers does, in every kind of topology."""

import asyncio
import io
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.support.checkpoints import load_reference
from tests.support.clips import clip
from tests.support.harness import FLOAT32, Messages, running
from tests.support.image_cases import picture, png
from tests.support.kimi import kimi_k25_pixels, kimi_k25_video
from tests.support.stage_loops import answer_of_two_encoders, first_logits
from tests.support.tiny import OWN_TOWERS, make_tiny
from tests.support.video_cases import user, video_part
from triptych.models.shared.video import sampled_frames
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder
from triptych.types import FrameSampling

TINY = OWN_TOWERS["kimi_k25"]
FIRST, SECOND = clip("mp4", frames=50), clip("webm", frames=20, width=64, height=96, seed=4)
STILL = picture(200, 150, 1)
CASES: dict[str, Messages] = {
    "mp4": user(video_part(FIRST), "What happens?"),
    "image and video": user({"type": "image", "data": png(STILL)}, video_part(SECOND), "Same?"),
    "five a second": user("See", video_part(FIRST, sampling=FrameSampling(fps=5.0))),
    "one frame": user(video_part(clip("mp4", frames=1)), "What is it?"),
}


@dataclass(frozen=True)
class Kimi:
    """A checkpoint, and transformers' answers to all cases."""

    folder: Path

    @cached_property
    def reference(self) -> Any:
        return load_reference(self.folder, torch.float32)

    @cached_property
    def prompts(self) -> list[PlannedPrompt]:
        builder = PromptBuilder(self.folder)
        return [builder.build(messages) for messages in CASES.values()]

    @cached_property
    def answers(self) -> list[list[int]]:
        answers = []
        for prompt in self.prompts:
            output = self.reference.generate(
                **self.inputs(prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
            )
            answers.append(output[0, len(prompt.tokens) :].tolist())
        assert len({tuple(answer) for answer in answers}) == len(answers)
        return answers

    def inputs(self, prompt: PlannedPrompt) -> dict[str, Tensor]:
        """Videos are images of several frames, as in transformers' own method for them."""
        shown = [_shown(item.data, item.plan) for item in prompt.items]
        tokens = torch.tensor([prompt.tokens])
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} | {
            name: torch.cat([one[name] for one in shown]) for name in ("pixel_values", "image_grid_thw")
        }


def _shown(data: bytes, plan: Any) -> dict[str, Tensor]:
    if plan.modality == "image":
        return kimi_k25_pixels(TINY.preprocessor or {}, [Image.open(io.BytesIO(data))])
    with av.open(io.BytesIO(data), "r") as file:
        frames = [frame.to_image() for frame in file.decode(video=0)]
    return kimi_k25_video(TINY.video_preprocessor or {}, [frames[number] for number in sampled_frames(plan)])


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Kimi:
    torch.set_num_threads(1)
    return Kimi(make_tiny(tmp_path_factory.mktemp("kimi"), "kimi_k25"))


@pytest.mark.parametrize(
    ("topology", "chunk"), [("1EPD", 4096), pytest.param("1E1PD", 7, marks=pytest.mark.slow), ("1E1P1D", 7)]
)
def test_answers(kimi: Kimi, topology: str, chunk: int) -> None:
    async def run() -> list[list[int]]:
        async with running(kimi.folder, topology, replace(FLOAT32, max_num_batched_tokens=chunk)) as service:
            return await service.answers(list(CASES.values()))

    assert asyncio.run(run()) == kimi.answers


@pytest.mark.slow
def test_an_encoder_that_is_lost_in_the_middle_of_a_video(kimi: Kimi) -> None:
    [item] = kimi.prompts[0].items
    assert answer_of_two_encoders(kimi.folder, CASES["mp4"], item.plan.rows) == kimi.answers[0]


def test_first_token_logits(kimi: Kimi) -> None:
    recorded = first_logits(kimi.folder, CASES.values())
    for name, prompt, logits in zip(CASES, kimi.prompts, recorded, strict=True):
        with torch.inference_mode():
            expected = kimi.reference(**kimi.inputs(prompt)).logits[0, -1]
        assert (logits - expected).abs().max() < 1e-4, name
