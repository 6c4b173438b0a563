"""DeepSeek-OCR and DeepSeek-OCR-2: plans, pixels and rows as in the references, their text, and bad input."""

import json
import math
import random
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import get_optimal_tiled_canvas

from tests.support import deepseek_ocr
from tests.support.checkpoints import load_reference
from tests.support.family_parts import inputs_of, tower_of
from tests.support.forward import assert_close, assert_rows
from tests.support.image_cases import picture, png
from tests.support.released import RELEASED, merged
from tests.support.tiny import OCR_IDS, OWN_TOWERS, make_tiny
from triptych.api.media_parts import MediaSettings
from triptych.checkpoint.config_files import with_text_config
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.deepseek_ocr.config import ocr_config
from triptych.models.deepseek_ocr.encoder import DeepseekOcr
from triptych.models.deepseek_ocr.plan import DeepseekOcrPlanner
from triptych.models.deepseek_ocr.preprocess import DeepseekOcrPreprocessor
from triptych.models.deepseek_ocr.sam import Convolution, RelativeAttention
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import NO_CONTEXT, ImageHeader, ItemContext, ItemPlan, PixelBounds, VideoHeader

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
FIRST, SECOND = "deepseek_vl_v2", "deepseek_ocr2"
SIDES = {FIRST: (32, 64, 4), SECOND: (96, 128, 2)}
"""Pixels per side of a tile, of a whole and of a patch, in the tiny models."""
SEVERAL = ItemContext(siblings=2)
UNCUT = ItemContext(options={"crop_mode": False})
CUT = ItemContext(siblings=2, options={"crop_mode": True})


def settings_of(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    return with_text_config(OWN_TOWERS[name].config), OWN_TOWERS[name].preprocessor or {}


def released_planner(name: str) -> DeepseekOcrPlanner:
    tiny = RELEASED[name].tiny(name)
    return DeepseekOcrPlanner(with_text_config(tiny.config), tiny.preprocessor or {})


def pixels_of(item: EncoderInput, patch: int) -> torch.Tensor:
    """Pixels [3, side, side] of patches."""
    side = item.grid[1]
    patches = torch.from_numpy(item.patches).view(side, side, 3, patch, patch)
    return patches.permute(2, 0, 3, 1, 4).reshape(3, side * patch, side * patch)


def references_of(name: str, folder: Path, images: list[Image.Image], *, cuts: bool = True) -> dict[str, Any]:
    """What the reference's processor makes; of DeepSeek-OCR's, each image by itself."""
    if name == SECOND:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        return dict(processor(images, crop_to_patches=cuts, return_tensors="pt"))
    tile, whole, _ = SIDES[name]
    made = [deepseek_ocr.views_of(image, tile, whole, cuts=cuts) for image in images]
    tiles = [deepseek_ocr.pixels_of(view) for views, _ in made for view in views[:-1]]
    return {
        "pixel_values": torch.stack([deepseek_ocr.pixels_of(views[-1]) for views, _ in made]),
        "num_local_patches": [len(views) - 1 for views, _ in made],
        "patches_grid": [list(grid) for _, grid in made],
    } | ({"pixel_values_local": torch.stack(tiles)} if tiles else {})


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_pixels_of_wholes_alone(tmp_path: Path, name: str) -> None:
    folder, source, patch = make_tiny(tmp_path, name), random.Random(0), SIDES[name][2]
    sizes = [(1, 1), (96, 96), (97, 3), (2, 150), (241, 240), (32, 33), (64, 63), (500, 100)]
    for width, height in [*sizes, *((source.randint(1, 300), source.randint(2, 300)) for _ in "12345678")]:
        image = picture(width, height, width + height)
        inputs = inputs_of(name, image, context=UNCUT)
        expected = references_of(name, folder, [image], cuts=False)
        views = [*expected.get("pixel_values_local", []), *expected["pixel_values"]]
        assert len(inputs) == len(views)
        for item, view in zip(inputs, views, strict=True):
            assert torch.equal(pixels_of(item, patch), torch.as_tensor(view))


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_references(count: int) -> None:
    first, second, source = released_planner(FIRST), released_planner(SECOND), random.Random(1)
    for _ in range(count):
        width, height = source.randint(20, 4000), source.randint(20, 4000)
        header = ImageHeader("PNG", width, height)
        plan = first.plan(header)
        grid = deepseek_ocr.grid_of(width, height, 640)
        assert plan.rows == deepseek_ocr.num_rows(grid)
        assert (plan.resized_width, plan.resized_height) == (
            (1024, 1024) if grid == (1, 1) else (640 * grid[0], 640 * grid[1])
        )
        other, tiles = second.plan(header), 0
        if max(width, height) > 768:
            columns, rows = get_optimal_tiled_canvas((height, width), (768, 768), 2, 6)
            tiles = columns * rows
        assert other.rows == 144 * tiles + 256 + 1
        assert plan.is_whole
        assert other.is_whole


def test_published_numbers() -> None:
    """Those of the papers, and the newlines and the separator: 256 for the whole, 100 (144) for each tile."""
    first, second = released_planner(FIRST), released_planner(SECOND)
    page, small = ImageHeader("PNG", 1200, 1700), ImageHeader("PNG", 640, 500)
    assert first.plan(small).rows == 256 + 16 + 1
    assert first.plan(page).rows == 6 * 100 + 30 + 256 + 16 + 1
    assert second.plan(page).rows == 6 * 144 + 256 + 1 == 1120 + 1
    assert second.plan(ImageHeader("PNG", 768, 500)).rows == 257
    assert second.plan(page, UNCUT).rows == 144 + 1


def test_several_images() -> None:
    first, second = released_planner(FIRST), released_planner(SECOND)
    page = ImageHeader("PNG", 1200, 1700)
    assert [first.plan(page, context).num_parts for context in (SEVERAL, UNCUT, CUT)] == [1, 1, 7]
    assert [second.plan(page, context).num_parts for context in (SEVERAL, UNCUT, CUT)] == [7, 1, 7]


MODES = {"tiny": (512, 64), "small": (640, 100), "base": (1024, 256), "large": (1280, 400)}
"""Published modes without tiles: pixels per side, and embeddings beside newlines and the separator."""


def sized(**options: Any) -> ItemContext:
    return ItemContext(options=options)


@pytest.mark.parametrize("mode", MODES)
def test_published_modes(mode: str) -> None:
    planner, page = released_planner(FIRST), ImageHeader("PNG", 1200, 1700)
    (side, rows), uncut = MODES[mode], {"crop_mode": False}
    plans = [
        planner.plan(page, sized(**uncut, **sizes))
        for sizes in ({"base_size": side, "image_size": side}, {"base_size": side}, {"image_size": side})
    ]
    assert plans[0].rows == rows + math.isqrt(rows) + 1
    assert plans[1] == plans[2] == plans[0]
    assert (plans[0].resized_width, plans[0].num_parts) == (side, 1)


def test_gundam() -> None:
    """The published default, which may have another whole."""
    planner, page = released_planner(FIRST), ImageHeader("PNG", 1200, 1700)
    assert planner.plan(page, sized(base_size=1024, image_size=640, crop_mode=True)) == planner.plan(page)
    assert planner.plan(page, sized(base_size=1280)).rows == planner.plan(page).rows - 273 + 421


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 512}, "image_size 512: tiles have 640 pixels per side, unless crop_mode is false"),
        ({"base_size": 512, "image_size": 640, "crop_mode": False}, "base_size 512 and image_size 640 must be equal"),
        ({"base_size": 1344}, "base_size 1344 must be a multiple of 64, at most 1280"),
        ({"image_size": 1000, "crop_mode": False}, "image_size 1000 must be a multiple of 64"),
    ],
)
def test_sizes_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadMediaSize, match=message):
        released_planner(FIRST).plan(ImageHeader("PNG", 1200, 1700), sized(**options))


def test_sizes_are_options_of_the_first_alone() -> None:
    options = {"base_size": 1024, "image_size": 640}
    MediaSettings.from_options(released_planner(FIRST).options, options)
    with pytest.raises(InvalidRequest, match="doesn't take base_size"):
        MediaSettings.from_options(released_planner(SECOND).options, options)


@pytest.mark.parametrize("side", [16, 32, 48, 80])
def test_pixels_and_rows_of_other_sizes(tmp_path: Path, side: int) -> None:
    """Below, as large as, and larger than a tile of the tiny model; relative to values up to 20."""
    folder, context = make_tiny(tmp_path, FIRST), sized(image_size=side, crop_mode=False)
    model, image = cast(Any, load_reference(folder)), picture(150, 90, 1)
    view = deepseek_ocr.pixels_of(deepseek_ocr.only_view_of(image, side, small=32))
    [item] = inputs_of(FIRST, image, context=context)
    assert torch.equal(pixels_of(item, 4), view)
    [found] = rows_of(FIRST, folder, [image], context)
    processed = {"pixel_values": view[None], "num_local_patches": [0], "patches_grid": [[1, 1]]}
    with torch.inference_mode():
        [expected] = model.get_image_features(**processed).pooler_output
    assert_rows(found, expected)


def test_plans_of_sizes_that_arent_served() -> None:
    data = png(picture(100, 80, 1))
    preprocess = DeepseekOcrPreprocessor(*settings_of(FIRST))
    plan = DeepseekOcrPlanner(*settings_of(FIRST)).plan(probe_image(data), sized(image_size=32, crop_mode=False))
    for payload in ((2, 8, 1), (2, 96, 1), (2,), (2, 32, 1, 1)):
        part = msgspec.structs.replace(plan.parts[0], payload=payload)
        with pytest.raises(PlanMismatch):
            list(preprocess(data, msgspec.structs.replace(plan, parts=(part,))))


def test_bounds_of_the_area() -> None:
    planner, tile = released_planner(FIRST), 640 * 640

    def tiles(least: int, most: int) -> int:
        plan: ItemPlan = planner.plan(ImageHeader("PNG", 1300, 1290), ItemContext(PixelBounds(least, most)))
        return plan.num_parts

    assert [tiles(0, 0), tiles(0, 3 * tile), tiles(0, 2 * tile), tiles(0, tile), tiles(5 * tile, 0)] == [5, 3, 3, 1, 7]
    for least, most in ((0, 10 * tile), (4 * tile, 3 * tile), (3 * tile + 1, 4 * tile - 1)):
        with pytest.raises(BadMediaSize):
            tiles(least, most)
    inputs = inputs_of(FIRST, picture(300, 290, 1), context=ItemContext(PixelBounds(0, 2 * 32 * 32)))
    assert len(inputs) == 3


IMAGES = [picture(200, 90, 1), picture(20, 9, 4)]


def rows_of(
    name: str, folder: Path, images: list[Image.Image], context: ItemContext, weights: Any = FP32
) -> list[torch.Tensor]:
    """Each image's rows in their order."""
    planner, tower = DeepseekOcrPlanner(*settings_of(name)), tower_of(folder, weights)
    found = []
    for image in images:
        plan = planner.plan(probe_image(png(image)), context)
        made = tower.encode(inputs_of(name, image, context=context))
        rows = torch.zeros(plan.rows, tower.embedding_width, dtype=made[0].dtype)
        for part, some in zip(plan.parts, made, strict=True):
            lengths = [length for _, length in part.runs]
            for (first, length), run in zip(part.runs, some.split(lengths), strict=True):
                rows[first : first + length] = run
        found.append(rows)
    return found


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_rows(tmp_path: Path, name: str) -> None:
    """Of tiles and of wholes, and of wholes alone; relative to values up to 20."""
    folder = make_tiny(tmp_path, name)
    model = cast(Any, load_reference(folder))
    for cuts, images in ((True, IMAGES[:1]), (False, IMAGES[1:])):
        found = rows_of(name, folder, images, NO_CONTEXT if cuts else UNCUT)
        for image, rows in zip(images, found, strict=True):
            processed = references_of(name, folder, [image], cuts=cuts)
            with torch.inference_mode():
                [expected] = model.get_image_features(**processed).pooler_output
            assert_rows(rows, expected)


def test_parts_of_several_images_in_one_batch(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, FIRST)
    tower, parts = tower_of(folder), inputs_of(FIRST, *IMAGES)
    alone = [row for part in parts for row in tower.encode([part])]
    for ours, theirs in zip(tower.encode(parts), alone, strict=True):
        assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize(("squares", "side"), [(3, 14), (1, 24)])
def test_attention_of_both_kinds_is_the_same(squares: int, side: int) -> None:
    """Positions as values of longer keys, in bfloat16, and as biases."""
    torch.manual_seed(0)
    heads, dim = 2, 16
    projected = torch.randn(squares, side, side, 3 * heads * dim)
    tables = torch.randn(2 * side - 1, dim), torch.randn(2 * side - 1, dim)
    biased, longer = (RelativeAttention(heads, tables, in_bf16)(projected) for in_bf16 in (False, True))
    assert biased.std() > 0.3
    assert (longer - biased).norm() < 0.02 * biased.norm()


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_convolutions_are_products(size: int, stride: int) -> None:
    torch.manual_seed(0)
    weight, image = torch.randn(7, 5, size, size), torch.randn(2, 8, 8, 5)
    expected = torch.conv2d(image.permute(0, 3, 1, 2), weight, stride=stride, padding=size // 2)
    linear = WEIGHT_FORMATS["float32"].linear(weight.permute(0, 2, 3, 1).flatten(1), None, torch.device("cpu"))
    assert_close(Convolution(linear, size, stride)(image).permute(0, 3, 1, 2), expected, 1e-4)


def test_published_config_of_the_second(tmp_path: Path) -> None:
    """The published files leave the second tower's sizes to their code."""
    widths = {"sam_vit_b": {"width": 768, "layers": 12, "heads": 12, "global_attn_indexes": [2, 5, 8, 11]}}
    widths["sam_vit_b"]["downsample_channels"] = [512, 1024]
    vision = {"model_name": "deepencoderv2", "image_size": 1024, "width": widths | {"qwen2-0-5b": {"dim": 896}}}
    found = ocr_config({"model_type": "deepseek_vl_v2", "vision_config": vision})
    assert found == ocr_config(
        merged(
            RELEASED[SECOND].tiny(SECOND).config,
            {"vision_config": {"sam_config": {"downsample_channels": [512, 896]}}},
        )
    )
    assert not found.is_first


def test_tensors_that_arent_used(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, FIRST)
    weights = load_file(folder / "model.safetensors")
    weights["model.vision_model.embeddings.patch_embedding.weight"] = torch.ones(32, 3, 14, 14)
    save_file(weights, folder / "model.safetensors")
    tower_of(folder)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (FIRST, "tile_tag", "1D", "tile_tag"),
        (FIRST, "text_config.use_mla", True, "use_mla"),
        (FIRST, "text_config", None, "text_config"),
        (FIRST, "vision_config.model_name", "siglip_large_patch16_384", "model_name"),
        (FIRST, "vision_config.width", 3, "sam_vit_b"),
        (FIRST, "vision_config.width.sam_vit_b.heads", 5, "divide"),
        (FIRST, "vision_config.width.sam_vit_b.layers", 10**6, "num_hidden_layers"),
        (FIRST, "vision_config.width.sam_vit_b.global_attn_indexes", [7], "global_attn_indexes"),
        (FIRST, "vision_config.width.sam_vit_b.downsample_channels", [3], "downsample_channels"),
        (FIRST, "vision_config.width.clip-l-14-224.width", 30, "equal"),
        (FIRST, "vision_config.image_size", 10**9, "image_size"),
        (SECOND, "vision_config.sam_config.use_rel_pos", False, "use_rel_pos"),
        (SECOND, "vision_config.encoder_config.num_key_value_heads", 3, "num_key_value_heads"),
        (SECOND, "vision_config.encoder_config.rope_parameters", {"rope_type": "yarn"}, "rope_type"),
        (SECOND, "vision_config.encoder_config.hidden_act", "gelu", "hidden_act"),
        (SECOND, "text_config.mlp_layer_types", ["dense", "odd", "sparse"], "mlp_layer_types"),
        (SECOND, "vision_config", None, "vision_config"),
    ],
)
def test_bad_configs(name: str, path: str, value: Any, message: str) -> None:
    config = deepcopy(settings_of(name)[0])
    *sections, last = path.split(".")
    section = config
    for one in sections:
        section = section[one]
    section[last] = value
    with pytest.raises(CheckpointError, match=message):
        DeepseekOcr(config)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (FIRST, {"tile_size": 30}, "tile_size"),
        (FIRST, {"tile_size": 16 * 10**6}, "tile_size"),
        (FIRST, {"size": {"height": 64, "width": 32}}, "square"),
        (FIRST, {"max_patches": 1}, "max_patches"),
        (FIRST, {"max_patches": 10**6}, "max_patches"),
        (SECOND, {"tile_size": 64}, "queries"),
    ],
)
def test_bad_processors(name: str, settings: dict[str, Any], message: str) -> None:
    config, processor = settings_of(name)
    for kind in (DeepseekOcrPlanner, DeepseekOcrPreprocessor):
        with pytest.raises(CheckpointError, match=message):
            kind(config, processor | settings)


def test_what_isnt_planned(tmp_path: Path) -> None:
    config, processor = settings_of(FIRST)
    planner, data = DeepseekOcrPlanner(config, processor), png(picture(300, 200, 1))
    for header, error in (
        (VideoHeader("MP4", 90, 90, 4, 2.0), UnsupportedMedia),
        (ImageHeader("PNG", 201, 1), BadMediaSize),
        (ImageHeader("PNG", 10_000, 10_000), MediaTooLarge),
    ):
        with pytest.raises(error):
            planner.plan(header)
    for settings in ({"max_patches": 4}, {"size": {"height": 96, "width": 96}}):
        other = DeepseekOcrPlanner(config, processor | settings).plan(probe_image(data))
        with pytest.raises(PlanMismatch, match="views"):
            next(DeepseekOcrPreprocessor(config, processor)(data, other))
    [part] = inputs_of(FIRST, picture(16, 16, 1))
    with pytest.raises(PlanMismatch, match="square"):
        tower_of(make_tiny(tmp_path, FIRST)).encode([EncoderInput(part.patches, (1, 4, 9), "name")])


def test_text_without_a_template(tmp_path: Path) -> None:
    """The published files have no template, and their code's format has no roles."""
    folder = make_tiny(tmp_path, FIRST)
    (folder / "chat_template.jinja").unlink()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    content = [{"type": "image", "data": png(picture(20, 20, 1))}, {"type": "text", "text": "Free OCR. "}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    assert prompt.tokens[:21] == [OCR_IDS["<image>"]] * 21
    assert PromptBuilder(folder).tokenizer.decode(prompt.tokens[21:]) == "\nFree OCR. "
