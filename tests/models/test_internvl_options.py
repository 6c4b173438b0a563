"""InternVL: options of requests for tiles, and settings that only its original files have."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.support.forward import random_input
from tests.support.image_cases import picture, png
from tests.support.published_files import make_original_internvl
from tests.support.tiny import OWN_TOWERS
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.internvl.config import vision_config
from triptych.models.internvl.encoder import InternVLChat
from triptych.models.internvl.plan import TILE_OPTIONS, InternVLPlanner
from triptych.models.internvl.preprocess import InternVLPreprocessor
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, PixelBounds, VideoHeader

CONFIG: dict[str, Any] = OWN_TOWERS["internvl"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["internvl"].preprocessor or {}
INPUTS = [random_input((1, 4, 4), seed, 3 * 14 * 14) for seed in range(2)]
TILE = 56 * 56
IMAGE = ImageHeader("PNG", 900, 600)


def original_config(folder: Path, **settings: Any) -> dict[str, Any]:
    return load_config(make_original_internvl(folder, **settings))


def parts(planner: InternVLPlanner, bounds: PixelBounds | None = None, **options: Any) -> int:
    """Tiles and thumbnail of an image whose best grid is 3 by 2."""
    return planner.plan(IMAGE, ItemContext(bounds or PixelBounds(), options=options)).num_parts


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"max_dynamic_patch": 2}, {"max_patches": 2}),
        ({"min_dynamic_patch": 4}, {"min_patches": 4}),
        ({"min_dynamic_patch": 2, "max_dynamic_patch": 3, "dynamic_image_size": True}, {"max_patches": 3}),
        ({"dynamic_image_size": False, "max_dynamic_patch": 4}, {"max_patches": 1}),
        ({"dynamic_image_size": True}, {}),
    ],
)
def test_numbers_of_tiles_are_the_processors(options: dict[str, Any], settings: dict[str, Any]) -> None:
    """The preprocessor learns of the options from the plan."""
    settings = settings | ({"min_patches": options["min_dynamic_patch"]} if "min_dynamic_patch" in options else {})
    known = {name: it for name, it in PROCESSOR.items() if name != "image_processor_type"} | settings
    reference, source = GotOcr2ImageProcessorPil(**known), random.Random(3)
    planner, preprocess = InternVLPlanner(CONFIG, PROCESSOR), InternVLPreprocessor(CONFIG, PROCESSOR)
    for _ in range(100):
        width, height = source.randint(20, 2000), source.randint(20, 2000)
        plan = planner.plan(ImageHeader("PNG", width, height), ItemContext(options=options))
        assert plan.num_parts == reference.get_number_of_image_patches(height, width)
    image = picture(300, 200, 1)
    plan = planner.plan(probe_image(png(image)), ItemContext(options=options))
    found = np.stack([part.patches for part in preprocess(png(image), plan)]).reshape(-1, 4, 4, 3, 14, 14)
    expected = np.stack(reference(image)["pixel_values"])
    assert np.array_equal(found.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 56, 56), expected)


def test_options_that_are_refused(tmp_path: Path) -> None:
    planner = InternVLPlanner(CONFIG, PROCESSOR)
    assert planner.options.keys() >= TILE_OPTIONS.keys()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_dynamic_patch": 7}, "max_dynamic_patch 7 exceeds the model's own, 6"),
        ({"min_dynamic_patch": 7}, "min_dynamic_patch 7 exceeds the largest number of tiles, 6"),
        ({"min_dynamic_patch": 3, "max_dynamic_patch": 2}, "min_dynamic_patch 3 exceeds the largest"),
        ({"max_dynamic_patch": 2, "bounds": PixelBounds(0, TILE)}, "bounds of the area exclude"),
    ]
    for options, message in refused:
        with pytest.raises(BadMediaSize, match=message):
            parts(planner, **options)
    one = InternVLPlanner(original_config(tmp_path, dynamic_image_size=False), {})
    assert parts(one) == parts(one, use_thumbnail=True) == 1
    with pytest.raises(BadMediaSize, match="dynamic_image_size"):
        parts(one, dynamic_image_size=True)


@pytest.mark.parametrize("option", sorted(TILE_OPTIONS))
def test_options_of_tiles_are_for_images(option: str) -> None:
    planner, video = InternVLPlanner(CONFIG, PROCESSOR), VideoHeader("MP4", 90, 60, 8, 2.0)
    plain = planner.plan(video)
    for value in (True, False) if option in ("dynamic_image_size", "use_thumbnail") else (1, 2):
        with pytest.raises(UnsupportedMedia, match=f"there is no {option}"):
            planner.plan(video, ItemContext(options={option: value}, modalities=frozenset(("video",))))
        together = ItemContext(options={option: value}, modalities=frozenset(("image", "video")))
        assert planner.plan(video, together) == plain


def test_thumbnails(tmp_path: Path) -> None:
    """With the files' setting and a request's; an item has another key, because its plan differs."""
    planner = InternVLPlanner(CONFIG, PROCESSOR)
    assert (parts(planner), parts(planner, use_thumbnail=False)) == (7, 6)
    assert parts(planner, PixelBounds(0, 2 * TILE), use_thumbnail=False) == 2
    config = original_config(tmp_path, use_thumbnail=False)
    without = InternVLPlanner(config, {})
    assert (parts(without), parts(without, use_thumbnail=True)) == (6, 7)
    data = png(picture(300, 200, 1))
    message = {"type": "image", "data": data}
    content = [message, message | {"options": {"use_thumbnail": True}}]
    [first, second] = PromptBuilder(tmp_path).build([{"role": "user", "content": content}]).items
    assert (first.plan.rows, second.plan.rows) == (24, 28)
    assert first.key != second.key
    short, long = (list(InternVLPreprocessor(config, {})(data, item.plan)) for item in (first, second))
    assert [part.name for part in short] == [part.name for part in long[:-1]]


def test_plans_of_other_tiles() -> None:
    data = png(picture(300, 200, 1))
    plan = InternVLPlanner(CONFIG, PROCESSOR).plan(probe_image(data))
    damaged = msgspec.structs.replace(plan, parts=plan.parts[:5])
    with pytest.raises(PlanMismatch, match="tiles"):
        next(InternVLPreprocessor(CONFIG, PROCESSOR)(data, damaged))


@pytest.mark.parametrize("settings", [{"ps_version": "v1"}, {"ps_version": None}])
def test_order_of_columns(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The published code doesn't turn a tile's embeddings back by ``ps_version`` v1, its default: its grid is
    transposed."""
    found = []
    for name, changes in (("rows", {}), ("columns", settings)):
        config = original_config(tmp_path / name, **changes)
        if config["ps_version"] is None:
            del config["ps_version"]
        tower = InternVLChat(config).load_encoder(
            Checkpoint(tmp_path / name), WEIGHT_FORMATS["float32"], torch.device("cpu")
        )
        found.append(torch.stack(tower.encode(INPUTS)))
    rows, columns = found
    assert torch.equal(columns, rows.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2))
    assert not torch.equal(columns, rows)


def test_ps_version_is_one_of_the_original_files() -> None:
    assert not vision_config(CONFIG | {"ps_version": "v1"}).by_columns
