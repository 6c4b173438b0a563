"""Families answer about thin and huge images as transformers does. It lacks MiniCPM-V 2.6 and 4.5; of these, and of
original files, ``tests/models/test_edge_media.py`` compares rows and pixels."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.parity.conftest import Model
from tests.support.checkpoints import make_checkpoint
from tests.support.families import EDGE_ANSWERS, ONE_IMAGE
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import HUGE, Case, picture, thin_sizes
from tests.support.tiny import make_tiny


@pytest.fixture(scope="module")
def huge() -> Image.Image:
    return picture(*HUGE, seed=1210)


@pytest.mark.slow
@pytest.mark.parametrize("family", EDGE_ANSWERS)
def test_thin_and_huge_images(tmp_path: Path, huge: Image.Image, family: str) -> None:
    """With each stage on its own, whole and in chunks of 7."""
    torch.set_num_threads(1)
    thin = [picture(*size, seed=1211 + number) for number, size in enumerate(thin_sizes(family))]
    shown = [(one,) for one in (*thin, huge)] + ([] if family in ONE_IMAGE else [(*thin, huge)])
    cases = [Case(f"{number}", (*images, "What is it?")) for number, images in enumerate(shown)]
    folder = make_checkpoint(tmp_path) if family == "qwen3_vl" else make_tiny(tmp_path, family, seed=4)
    model = Model(folder, cases)

    async def run(chunk: int) -> list[list[int]]:
        async with running(
            model.folder, "1E1P1D", replace(FLOAT32, max_num_batched_tokens=chunk, enable_prefix_caching=False)
        ) as service:
            return await service.answers([case.messages for case in cases])

    for chunk in (4096, 7):
        assert asyncio.run(run(chunk)) == model.answers
