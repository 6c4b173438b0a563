"""Model types that share another one's code make the same of media: plans, texts, the bytes of each part, and rows.
Videos of GLM-4.6V are sampled otherwise: see ``test_glm4v.py``."""

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.audio_cases import noise
from tests.support.checkpoints import load_adapter
from tests.support.clips import clip
from tests.support.families import SAME_MEDIA
from tests.support.image_cases import picture, png
from tests.support.published_files import make_of_type
from tests.support.sounds import sound
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import Planner, Preprocessor
from triptych.models.registry import FAMILIES, family_of, resolve
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.probe_video import probe_video
from triptych.types import FrameSampling, ItemContext, MediaHeader

CPU, FP32 = torch.device("cpu"), WEIGHT_FORMATS["float32"]


def parts_of(folder: Path) -> tuple[Planner, Preprocessor]:
    config = load_config(folder)
    settings, family = (load_preprocessor_config(folder), load_video_config(folder)), family_of(config)
    return resolve(family.planner)(config, *settings), resolve(family.preprocessor or "")(config, *settings)


def media_of(modalities: Collection[str]) -> list[tuple[bytes, MediaHeader]]:
    source, found = random.Random(5), list[tuple[bytes, MediaHeader]]()
    for _ in range(12):
        data = png(picture(source.randint(30, 700), source.randint(30, 700), seed=1300))
        found.append((data, probe_image(data)))
    if "video" in modalities:
        data = clip(frames=20, width=96, height=64, seed=1301)
        found.append((data, probe_video(data)))
    if "audio" in modalities:
        data = sound("wav", noise(1.3, 1302))
        found.append((data, probe_audio(data)))
    return found


@torch.inference_mode()
@pytest.mark.parametrize("model_type", SAME_MEDIA)
def test_they_are_the_others(tmp_path: Path, model_type: str) -> None:
    """Towers with the same weights make the same rows of the first image, and of the last of the media."""
    base, own = (make_of_type(tmp_path / one, one) for one in (SAME_MEDIA[model_type], model_type))
    assert load_config(own)["model_type"] == model_type

    # the original files of InternVL don't say how many frames are sampled
    sampling = FrameSampling(num_frames=6) if model_type == "internvl_chat" else FrameSampling()

    def made(folder: Path, data: bytes, header: MediaHeader) -> tuple[Any, ...]:
        planner, preprocess = parts_of(folder)
        plan = planner.plan(header, ItemContext(sampling=sampling))
        assert plan.is_whole
        return plan, planner.runs(plan), [part.name for part in preprocess(data, plan)]

    modalities = [name for name in FAMILIES[model_type].modalities if (name, model_type) != ("video", "glm46v")]
    media = media_of(modalities)
    for data, header in media:
        assert made(own, data, header) == made(base, data, header)
    planner, preprocess = parts_of(base)
    for data, header in (media[0], media[-1]):
        parts = list(preprocess(data, planner.plan(header, ItemContext(sampling=sampling))))
        towers = (load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU) for folder in (own, base))
        rows, expected = (torch.cat(tower.encode(parts)) for tower in towers)
        assert torch.equal(rows, expected)
