"""Planner, preprocessor and tower of each family's tiny checkpoint, and transformers' rows of the same image."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.checkpoints import load_adapter, load_reference
from tests.support.families import SAME_MEDIA
from tests.support.image_cases import png
from tests.support.minicpm import MiniCPMReference, make_minicpm
from tests.support.minicpm import config_of as minicpm_config
from tests.support.published_files import ORIGINALS
from tests.support.reference import UNUSED, image_features, image_processor
from tests.support.released import BASES, RELEASED
from tests.support.tiny import Tiny, make_tiny
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, with_text_config
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WEIGHT_FORMATS, WeightFormat
from triptych.models.base import EncoderInput, ModelConfig, Planner, Preprocessor
from triptych.models.registry import family_of, resolve
from triptych.prompt.probe import probe_image
from triptych.types import NO_CONTEXT, ItemContext, ItemPlan

MINICPM_VERSION = 4.5
FP32 = WEIGHT_FORMATS["float32"]


def tiny_of(family: str) -> Tiny:
    """The checkpoint whose settings, and so planner and preprocessor, a family's have."""
    tiny = BASES[family]
    if family == "qwen3_vl":
        return replace(tiny, preprocessor={**(tiny.preprocessor or {}), "patch_size": 16})
    return tiny


def with_settings(family: str, settings: dict[str, Any]) -> Tiny:
    """The tiny checkpoint with other settings; a dict changes a section's."""
    config = deepcopy(tiny_of(family).config)
    for name, value in settings.items():
        is_section = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = config[name] | value if is_section else value
    return replace(tiny_of(family), config=config)


def config_of(family: str, **settings: Any) -> ModelConfig:
    """The config of ``with_settings``."""
    return with_settings(family, settings).config


def processor_of(family: str, **settings: Any) -> dict[str, Any]:
    """The settings of the tiny checkpoint's image processor, with these."""
    return {**(tiny_of(family).preprocessor or {}), **settings}


def made(tiny: Tiny) -> tuple[Planner, Preprocessor]:
    config = with_text_config(tiny.config)
    family, settings = family_of(config), (tiny.preprocessor or {}, tiny.video_preprocessor or {})
    assert family.preprocessor is not None
    return resolve(family.planner)(config, *settings), resolve(family.preprocessor)(config, *settings)


@cache
def served_parts(family: str) -> tuple[Planner, Preprocessor]:
    """Planner and preprocessor of the tiny checkpoint."""
    if family not in ORIGINALS:
        return made(tiny_of(family))
    with TemporaryDirectory() as name:
        folder = ORIGINALS[family](Path(name))
        return made(Tiny(load_config(folder), preprocessor=load_preprocessor_config(folder)))


@cache
def released_parts(family: str) -> tuple[Planner, Preprocessor]:
    """The same with the settings of a released checkpoint."""
    return made(RELEASED[family].tiny(family))


def rows_of(folder: Path, family: str, image: Image.Image) -> tuple[ItemPlan, list[torch.Tensor]]:
    """An image's plan, and the embeddings of its parts."""
    plan, parts = parts_of(family, image)
    return plan, tower_of(folder).encode(parts)


def parts_of(family: str, image: Image.Image) -> tuple[ItemPlan, list[EncoderInput]]:
    """An image's plan, and what it becomes for the tower."""
    planner, preprocess = served_parts(family)
    plan = planner.plan(probe_image(png(image)))
    return plan, list(preprocess(png(image), plan))


def inputs_of(family: str, *images: Image.Image, context: ItemContext = NO_CONTEXT) -> list[EncoderInput]:
    """What images become for the tower of the tiny checkpoint."""
    planner, preprocess = served_parts(family)
    return [part for one in images for part in preprocess(png(one), planner.plan(probe_image(png(one)), context))]


def tower_of(folder: Path, weights: WeightFormat = FP32) -> Encoder:
    return load_adapter(folder).load_encoder(Checkpoint(folder), weights, torch.device("cpu"))


def reference_rows(folder: Path, family: str, image: Image.Image) -> torch.Tensor:
    """The same of the reference, with deepstack features beside them."""
    if family == "minicpmv":
        return MiniCPMReference(folder, minicpm_config(MINICPM_VERSION)).rows(image)
    if family in ORIGINALS:
        folder = make_tiny(folder / "counterpart", SAME_MEDIA[family], seed=4)
    processed = image_processor(folder)([[image]], return_tensors="pt")
    output = image_features(load_reference(folder), {k: v for k, v in processed.items() if k not in UNUSED})
    deepstack = getattr(output, "deepstack_features", None) or []
    features = [_joined(one) for one in (getattr(output, "pooler_output", output), *deepstack)]
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in features], dim=1)


def _joined(features: Any) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else torch.cat(list(features))


def make_checkpoint(folder: Path, family: str) -> Path:
    if family in ORIGINALS:
        return ORIGINALS[family](folder, seed=4)
    return make_minicpm(folder, MINICPM_VERSION) if family == "minicpmv" else make_tiny(folder, tiny_of(family), seed=4)


def bits(values: Any) -> int:
    """The sum of the values' bits, which doesn't depend on their order: zeros add nothing to it."""
    return int(np.ascontiguousarray(values, np.float32).view(np.uint32).sum(dtype=np.uint64))


def reference_bits(processor: Any, image: Image.Image, seen: int | None = None, **options: Any) -> int:
    """Those of what a reference's processor makes of an image. ``seen`` is the side, in pixels, of what the tower sees
    of a tile, if not all."""
    made = processor([[image]], return_tensors="pt", **options)
    return sum(bits(it[..., :seen, :seen] if seen else it) for name, it in made.items() if "pixel_values" in name)
