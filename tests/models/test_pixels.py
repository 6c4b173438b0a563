"""Each family's pixels of images are, to the bit, those of its Pillow processor in transformers or, where there is
none, of the tests' own. Their order follows from the towers' rows (``test_family_contract.py``)."""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import EDGE_MEDIA
from tests.support.family_parts import bits, made, reference_bits, tiny_of
from tests.support.image_cases import picture, png
from tests.support.reference import image_processor
from tests.support.tiny import write_settings
from triptych.prompt.probe import probe_image

SIZES = ((1, 1), (75, 75), (84, 84), (140, 140), (190, 3), (2, 150), (500, 100), (241, 240), (49, 48), (97, 3))
"""Width and height: one pixel, sides of tiles and nearly so, thin and large ones."""
LEAST = {"phi4_multimodal": 10}
"""Sides below which a family, or its reference, takes no image."""
SEEN = {"idefics3": 84, "smolvlm": 84, "llava": 70, "llava_next": 70, "llava_onevision": 70}
"""Pixels per side of a tile that the tower sees, where its last ones don't fill a patch."""
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2_vl": ({"min_pixels": 4 * 28 * 28, "max_pixels": 40 * 28 * 28},),
    "glm4v": ({"size": {"shortest_edge": 2 * 100 * 100, "longest_edge": 2 * 300 * 301}},),
    "gemma3": (
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40, "pan_and_scan_max_num_crops": 3}
        | {"pan_and_scan_min_ratio_to_activate": 1.2},
    ),
    "gemma4+gemma4_vision": (
        {"do_normalize": True, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4]},
        {"resample": 2, "rescale_factor": 0.01},
    ),
    "llava": (
        {"size": {"shortest_edge": 83}, "crop_size": 75},
        {"size": {"height": 75, "width": 75}, "do_center_crop": False},
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True},
    ),
    "idefics3": ({"do_image_splitting": False}, {"size": {"longest_edge": 88}}, {"size": {"longest_edge": 241}}),
    "smolvlm": ({"do_image_splitting": False}, {"size": {"longest_edge": 88}}, {"size": {"longest_edge": 241}}),
    "minicpmv4_6": ({"downsample_mode": "4x", "max_slice_nums": 9}, {"slice_mode": False, "resample": 2}),
    "internvl": ({"min_patches": 2, "max_patches": 3},),
}
"""Of processors, over the tiny checkpoint's."""
FAMILIES = [name for name in EDGE_MEDIA if name not in ("kimi_k25", "internvl_chat", "phi4mm")]
"""Kimi K2.5's are compared with stored results: its reference here has other means. The others have one without files
of processors, which ``test_same_media.py`` compares."""
CASES = [(family, settings) for family in FAMILIES for settings in ({}, *SETTINGS.get(family, ()))]


def check_pixels(folder: Path, family: str, settings: dict[str, Any], sizes: Iterable[tuple[int, int]]) -> None:
    tiny = tiny_of(family)
    tiny = replace(tiny, preprocessor={**(tiny.preprocessor or {}), **settings})
    write_settings(folder, tiny)
    (planner, preprocess), reference = made(tiny), image_processor(folder)
    for width, height in sizes:
        if min(width, height) >= LEAST.get(family, 1):
            image = picture(width, height, width + height)
            plan = planner.plan(probe_image(png(image)))
            found = sum(bits(part.patches) for part in preprocess(png(image), plan))
            assert found == reference_bits(reference, image, SEEN.get(family)), (width, height)


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_pixels(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    source = random.Random(0)
    check_pixels(
        tmp_path, family, settings, [*SIZES, *((source.randint(1, 300), source.randint(2, 300)) for _ in "12345678")]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_pixels_of_many_sizes(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    source = random.Random(2)
    check_pixels(tmp_path, family, settings, ((source.randint(4, 500), source.randint(4, 500)) for _ in range(300)))
