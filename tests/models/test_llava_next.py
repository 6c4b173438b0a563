"""LLaVA-NeXT and LLaVA-OneVision: plans, pixels, rows and keys as transformers has them, and bad configs."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from tests.support.checkpoints import load_reference
from tests.support.family_parts import config_of, processor_of, tower_of
from tests.support.forward import assert_rows
from tests.support.image_cases import picture, png
from tests.support.tiny import make_tiny
from triptych.errors import BadMediaSize, MediaTooLarge, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.llava.anyres import DEFAULTS
from triptych.models.llava.next_plan import LlavaNextPlanner, LlavaOneVisionPlanner
from triptych.models.llava.next_preprocess import LlavaNextPreprocessor, LlavaOneVisionPreprocessor
from triptych.models.shared.vision_transformer import MAX_STATES
from triptych.prompt.probe import probe_image
from triptych.types import ImageHeader, ItemContext, ItemPlan, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
NAMES = ("llava_next", "llava_onevision")
PLANNERS: dict[str, Any] = {"llava_next": LlavaNextPlanner, "llava_onevision": LlavaOneVisionPlanner}
PREPROCESSORS: dict[str, Any] = {"llava_next": LlavaNextPreprocessor, "llava_onevision": LlavaOneVisionPreprocessor}
REFERENCES: dict[str, Any] = {
    "llava_next": LlavaNextImageProcessorPil,
    "llava_onevision": LlavaOnevisionImageProcessorPil,
}
PUBLISHED_TILES = {"llava_next": 336, "llava_onevision": 384}


def published(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and processor with the sizes of released checkpoints, which are the defaults."""
    config = config_of(name, vision_config={"image_size": PUBLISHED_TILES[name]}, image_grid_pinpoints=None)
    if name == "llava_onevision":
        del config["vision_aspect_ratio"]
    return config, {}


def reference_of(name: str, processor: dict[str, Any]) -> Any:
    return REFERENCES[name](**{key: it for key, it in processor.items() if key != "image_processor_type"})


def planned(name: str, image: Image.Image, siblings: int = 0) -> ItemPlan:
    planner = PLANNERS[name](config_of(name), processor_of(name))
    plan: ItemPlan = planner.plan(probe_image(png(image)), ItemContext(siblings=siblings))
    return plan


def inputs_of(name: str, image: Image.Image, siblings: int = 0) -> list[EncoderInput]:
    preprocess = PREPROCESSORS[name](config_of(name), processor_of(name))
    return list(preprocess(png(image), planned(name, image, siblings)))


def pixels_of(inputs: list[EncoderInput]) -> torch.Tensor:
    """Pixels [tiles, 3, 70, 70] of patches: those of the last 5 aren't in any."""
    patches = torch.cat([torch.from_numpy(item.patches) for item in inputs])
    return patches.view(-1, 5, 5, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 70, 70)


def processed(name: str, images: list[Image.Image]) -> Any:
    """What the reference makes of one request's images."""
    return reference_of(name, processor_of(name))([images], return_tensors="pt")


def test_pixels_of_several_images() -> None:
    """Of LLaVA-OneVision's, each is one tile, padded with the mean colour."""
    images = [picture(200, 150, 1), picture(31, 90, 2), picture(64, 64, 3)]
    found = [inputs_of("llava_onevision", image, siblings=2) for image in images]
    assert torch.equal(
        torch.cat([pixels_of(one) for one in found]),
        processed("llava_onevision", images)["pixel_values"].flatten(0, 1)[..., :70, :70],
    )
    assert [planned("llava_onevision", image, 2).rows for image in images] == [26] * 3
    assert planned("llava_next", images[0], 2) == planned("llava_next", images[0])


def plans_are_the_processors(name: str, count: int) -> None:
    source, (config, processor), tile = random.Random(1), published(name), PUBLISHED_TILES[name]
    planner, reference, side = PLANNERS[name](config, processor), REFERENCES[name](), tile // 14
    counting: Any = LlavaNextProcessor if name == "llava_next" else LlavaOnevisionProcessor
    counter = counting.__new__(counting)
    counter.image_processor, counter.patch_size, counter.image_token = reference, 14, "+"
    counter.num_additional_image_tokens, counter.num_image_tokens = 0, side**2
    counter.vision_aspect_ratio, counter.vision_feature_select_strategy = "anyres_max_9", "full"
    pixels = torch.empty(1, 1, 3, tile, tile)
    for _ in range(count):
        width, height = source.randint(14, 4000), source.randint(14, 4000)
        if max(width, height) > 200 * min(width, height):
            continue
        plan = planner.plan(ImageHeader("PNG", width, height))
        made = {"image_sizes": [[height, width]], "pixel_values": pixels, "batch_num_images": [1]}
        assert plan.rows == len(counter.replace_image_token(made, 0))
        assert plan.is_whole


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_the_processors(name: str) -> None:
    plans_are_the_processors(name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_plans_are_the_processors(name: str) -> None:
    plans_are_the_processors(name, 3000)


@pytest.mark.parametrize(
    ("name", "height", "width", "rows"),
    [
        ("llava_next", 336, 336, 1176),
        ("llava_next", 480, 640, 2340),
        ("llava_next", 640, 480, 2352),
        ("llava_next", 1080, 1920, 1948),
        ("llava_onevision", 480, 640, 2929),
        ("llava_onevision", 1080, 1920, 7269),
    ],
)
def test_known_numbers_of_rows(name: str, height: int, width: int, rows: int) -> None:
    assert PLANNERS[name](*published(name)).plan(ImageHeader("PNG", width, height)).rows == rows


@pytest.mark.parametrize("name", NAMES)
def test_default_pinpoints_are_the_processors(name: str) -> None:
    assert DEFAULTS[name][0] == REFERENCES[name]().image_grid_pinpoints


@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_the_area(name: str) -> None:
    planner, tile = PLANNERS[name](config_of(name), processor_of(name)), 75 * 75

    def tiles(least: int, most: int) -> int:
        plan: ItemPlan = planner.plan(ImageHeader("PNG", 300, 290), ItemContext(PixelBounds(least, most)))
        return plan.patches // 25

    assert [tiles(0, 0), tiles(0, 2 * tile), tiles(3 * tile, 3 * tile), tiles(4 * tile, 0)] == [5, 3, 4, 5]
    assert planner.max_image_pixels == 4 * tile
    for least, most in ((0, tile), (0, 5 * tile), (3 * tile, 2 * tile), (2 * tile + 1, 3 * tile - 1)):
        with pytest.raises(BadMediaSize):
            tiles(least, most)
    data = png(picture(300, 290, 1))
    plan = planner.plan(probe_image(data), ItemContext(PixelBounds(0, 2 * tile)))
    preprocess = PREPROCESSORS[name](config_of(name), processor_of(name))
    assert [item.grid for item in preprocess(data, plan)] == [(1, 5, 5), (2, 5, 5)]
    for other in (planner.plan(probe_image(data)), planner.plan(probe_image(png(picture(290, 120, 1))))):
        with pytest.raises(PlanMismatch):
            next(preprocess(data, msgspec.structs.replace(plan, parts=other.parts)))


def test_bounds_among_several_images() -> None:
    """They change neither plan nor pixels, because each image is one tile."""
    planner = LlavaOneVisionPlanner(config_of("llava_onevision"), processor_of("llava_onevision"))
    data = png(picture(200, 150, 1))
    preprocess = LlavaOneVisionPreprocessor(config_of("llava_onevision"), processor_of("llava_onevision"))
    plan = planner.plan(probe_image(data), ItemContext(siblings=1))
    for bounds in (PixelBounds(0, 1000), PixelBounds(75 * 75, 2 * 75 * 75)):
        assert planner.plan(probe_image(data), ItemContext(bounds, siblings=1)) == plan
    [part] = preprocess(data, msgspec.structs.replace(plan, bounds=PixelBounds(0, 1000)))
    assert part.grid == (1, 5, 5)


ROW_CASES = [
    ("llava_next", [(200, 150)]),
    ("llava_next", [(75, 75), (3, 140), (300, 60), (500, 499)]),
    ("llava_onevision", [(300, 290)]),
    ("llava_onevision", [(300, 60)]),
    ("llava_onevision", [(3, 140)]),
    ("llava_onevision", [(200, 150), (31, 90), (64, 64)]),
]


@pytest.mark.parametrize(("name", "sizes"), ROW_CASES)
def test_rows(tmp_path: Path, name: str, sizes: list[tuple[int, int]]) -> None:
    folder = make_tiny(tmp_path, name)
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    parts = [inputs_of(name, image, len(images) - 1) for image in images]
    rows = torch.cat(tower_of(folder).encode([part for one in parts for part in one]))
    model: Any = load_reference(folder, torch.float32)
    given = {key: value for key, value in processed(name, images).items() if key != "num_patches"}
    with torch.inference_mode():
        expected = torch.cat(model.get_image_features(**given).pooler_output)
    assert rows.shape == expected.shape == (sum(planned(name, image, len(images) - 1).rows for image in images), 64)
    assert_rows(rows, expected)


@pytest.mark.parametrize("name", NAMES)
def test_parts_in_one_batch(tmp_path: Path, name: str) -> None:
    """Parts of different sizes are encoded together as they are alone; so is one of more tiles than go at once."""
    tower = tower_of(make_tiny(tmp_path, name))
    parts = [part for seed, side in enumerate((75, 300)) for part in inputs_of(name, picture(side, 280, seed))]
    alone = [tower.encode([part])[0] for part in parts]
    for rows, expected in zip(tower.encode(parts), alone, strict=True):
        assert_rows(rows, expected)
    times = 1 + MAX_STATES // sum(len(part.patches) for part in parts)
    for rows, expected in zip(tower.encode(parts * times), alone * times, strict=True):
        assert_rows(rows, expected)


def test_a_thin_image_among_several() -> None:
    """Its square would have many times its pixels."""
    planner = LlavaOneVisionPlanner(config_of("llava_onevision"), processor_of("llava_onevision"))
    assert planner.plan(ImageHeader("PNG", 14_000, 100), ItemContext(siblings=1)).rows == 26
    assert planner.plan(ImageHeader("PNG", 20_000, 100)).rows
    with pytest.raises(MediaTooLarge, match="square"):
        planner.plan(ImageHeader("PNG", 20_000, 100), ItemContext(siblings=1))


def test_planned_squares_are_checked() -> None:
    """Plans come from another process."""
    plan, data = planned("llava_onevision", picture(200, 150, 1), siblings=1), png(picture(200, 150, 1))
    with pytest.raises(PlanMismatch, match="tiles"):
        next(LlavaNextPreprocessor(config_of("llava_next"), processor_of("llava_next"))(data, plan))
    wide = msgspec.structs.replace(plan, header=ImageHeader("PNG", 50_000_000, 1))
    with pytest.raises(MediaTooLarge, match="square"):
        next(LlavaOneVisionPreprocessor(config_of("llava_onevision"), processor_of("llava_onevision"))(data, wide))


@pytest.mark.parametrize("name", NAMES)
def test_an_image_without_tiles(name: str) -> None:
    """Nothing remains of a thin image's tiles, so it is only shown as a whole."""
    pinpoints = {"image_grid_pinpoints": [[150, 150]]}
    config, processor, data = config_of(name, **pinpoints), processor_of(name, **pinpoints), png(picture(200, 1, 1))
    plan = PLANNERS[name](config, processor).plan(probe_image(data))
    assert [part.grid for part in PREPROCESSORS[name](config, processor)(data, plan)] == [(1, 5, 5)]
    assert plan.rows == 25
