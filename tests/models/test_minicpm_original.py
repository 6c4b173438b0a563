"""MiniCPM-V 2.6 and 4.5: plans, text, pixels and rows as an implementation written from their description has them;
tensors, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support import minicpm
from tests.support.family_parts import tower_of
from tests.support.forward import assert_rows
from tests.support.image_cases import picture, png
from tests.support.minicpm import OLD_IDS, PROCESSOR, MiniCPMReference, config_of, make_minicpm, pieces_of
from tests.support.outlines import check_outline
from tests.support.tiny import MINICPMV4_6, SLICES
from triptych.api.media_parts import MediaSettings
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS
from triptych.models.base import EncoderInput
from triptych.models.minicpmv.navit import places
from triptych.models.minicpmv.plan import MiniCPMV46Planner, MiniCPMVPlanner
from triptych.models.minicpmv.preprocess import MiniCPMVPreprocessor
from triptych.models.minicpmv.resampler import MiniCPMV, shares
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, ItemPlan, PixelBounds, VideoHeader

CONFIG = config_of(2.6)
VERSIONS = (2.6, 4.5)
RELEASED = PROCESSOR | {"scale_resolution": 448, "max_slice_nums": 9, "patch_size": 14, "image_feature_size": 64}
RELEASED_CONFIG = CONFIG | {"query_num": 64, "vision_config": CONFIG["vision_config"] | {"patch_size": 14}}
PUBLISHED = {(448, 448): 64, (1344, 1344): 640}
"""Embeddings of an image by its width and height, as the model's description has them."""


def text_of(planner: MiniCPMVPlanner, plan: ItemPlan, number: int = 0) -> str:
    """Our text, with all placeholders of each run."""
    pieces = planner.placeholder(plan, str).split("<unk>")
    runs = ["<unk>" * count for count in planner.runs(plan)]
    text = "".join(one for pair in zip(pieces, [*runs, ""], strict=True) for one in pair)
    return planner.label(plan, ItemContext(index=number)) + text


def plans_are_the_references(count: int) -> None:
    source, planner = random.Random(1), MiniCPMVPlanner(RELEASED_CONFIG, RELEASED)
    for number in range(count):
        longest = source.choice((300, 1000, 4000))
        width, height = source.randint(longest // 40, longest), source.randint(longest // 40, longest)
        most = source.randint(1, 36) if number % 2 else 9
        options = {"max_slice_nums": most} if number % 2 else {}
        plan = planner.plan(ImageHeader("PNG", width, height), ItemContext(options=options))
        image = cast(Any, Shape(width, height))
        processor = RELEASED | {"max_slice_nums": most}
        areas = [piece.width * piece.height for piece in pieces_of(image, processor)]
        assert [part.patches * 14**2 for part in plan.parts] == areas
        assert text_of(planner, plan, number) == minicpm.text_of(image, number, processor, 64)
        assert plan.is_whole


class Shape:
    """An image without pixels; resized and cut, it is its size."""

    def __init__(self, width: int, height: int) -> None:
        self.size, self.width, self.height = (width, height), width, height

    def resize(self, size: tuple[int, int], _: Any) -> "Shape":
        return Shape(*size)

    def crop(self, box: tuple[int, int, int, int]) -> "Shape":
        return Shape(box[2] - box[0], box[3] - box[1])


def test_plans_are_the_references() -> None:
    plans_are_the_references(400)
    planner = MiniCPMVPlanner(RELEASED_CONFIG, RELEASED)
    for (width, height), rows in PUBLISHED.items():
        assert planner.plan(ImageHeader("PNG", width, height)).rows == rows


@pytest.mark.slow
def test_many_plans_are_the_references() -> None:
    plans_are_the_references(3000)


def inputs_of(*images: Image.Image, processor: dict[str, Any] = PROCESSOR) -> list[EncoderInput]:
    planner, preprocess = MiniCPMVPlanner(CONFIG, processor), MiniCPMVPreprocessor(CONFIG, processor)
    return [part for one in images for part in preprocess(png(one), planner.plan(probe_image(png(one))))]


IMAGES = [picture(200, 150, 1), picture(31, 90, 2), picture(300, 9, 4), picture(5, 9, 5)]


@pytest.mark.parametrize("version", VERSIONS)
def test_rows(tmp_path: Path, version: float) -> None:
    folder = make_minicpm(tmp_path, version)
    expected = torch.cat([MiniCPMReference(folder, config_of(version)).rows(image) for image in IMAGES])
    assert_rows(torch.cat(tower_of(folder).encode(inputs_of(*IMAGES))), expected)
    check_outline(folder)


def test_places_of_released_sizes() -> None:
    for rows, columns in [(32, 32), (4, 444), *((size, 151 - size) for size in range(1, 151))]:
        down, across = (torch.tensor(count, dtype=torch.int32) for count in (rows, columns))
        assert torch.equal(places(rows, columns, 70, shares), minicpm.places(down, across, 70))


@pytest.mark.parametrize(("weights", "error"), [("bfloat16", 0.03), ("int8", 0.1), ("int4", 0.6)])
def test_formats(tmp_path: Path, weights: str, error: float) -> None:
    folder, parts = make_minicpm(tmp_path, 4.5), inputs_of(*IMAGES)
    expected = torch.cat(tower_of(folder).encode(parts))
    found = torch.cat(tower_of(folder, (WEIGHT_FORMATS | QUANTIZED_FORMATS)[weights]).encode(parts)).float()
    assert 0 < (found - expected).norm() < error * expected.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("resampler.proj"), "missing"),
        (lambda weights: weights.update({"resampler.query": torch.ones(3)}), "shape"),
        (lambda weights: weights.update({"vpm.odd": torch.ones(64)}), "no place for"),
        (lambda weights: weights.update({"apm.odd": torch.ones(3)}), "'apm.odd' is neither in"),
    ],
)
def test_bad_tensors(tmp_path: Path, change: Any, message: str) -> None:
    folder = make_minicpm(tmp_path, 2.6)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        tower_of(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": None}, "version"),
        ({"version": 4.0}, "version 4.0"),
        ({"version": []}, "version"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"query_num": 0}, "query_num"),
        ({"drop_vision_last_layer": "no"}, "drop_vision_last_layer"),
        ({"vision_config": CONFIG["vision_config"] | {"num_hidden_layers": 1}}, "drop_vision_last_layer"),
        ({"vision_config": CONFIG["vision_config"] | {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": None}, "vision_config"),
    ],
)
def test_bad_configs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        MiniCPMV(CONFIG | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slice_nums": 65}, "max_slice_nums"),
        ({"patch_size": 14}, "patch_size"),
        ({"image_feature_size": 64}, "image_feature_size"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    for kind in (MiniCPMVPlanner, MiniCPMVPreprocessor):
        with pytest.raises(CheckpointError, match=message):
            kind(CONFIG, PROCESSOR | settings)


def test_what_isnt_planned() -> None:
    planner = MiniCPMVPlanner(CONFIG, PROCESSOR)
    with pytest.raises(UnsupportedMedia):
        planner.plan(VideoHeader("MP4", 90, 90, 4, 2.0), ItemContext(PixelBounds(0, 10_000)))
    with pytest.raises(BadMediaSize):
        planner.plan(ImageHeader("PNG", 201, 1))
    data = png(picture(300, 200, 1))
    other = MiniCPMVPlanner(CONFIG, PROCESSOR | {"scale_resolution": 40}).plan(probe_image(data))
    with pytest.raises(PlanMismatch):
        next(MiniCPMVPreprocessor(CONFIG, PROCESSOR)(data, other))


def test_conversations(tmp_path: Path) -> None:
    """Parts are lines, images are numbered, and equal ones have one key."""
    builder = PromptBuilder(make_minicpm(tmp_path, 2.6))
    shown = picture(300, 200, 1)
    image, text = {"type": "image", "data": png(shown)}, {"type": "text", "text": "and"}
    prompt = builder.build([{"role": "user", "content": [image, text, image]}])
    assert prompt.items[0].key == prompt.items[1].key
    first, second = (minicpm.text_of(shown, number, PROCESSOR, 6) for number in (0, 1))
    written = f"<|im_start|>user\n{first}\nand\n{second}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens == builder.tokenizer.encode(written)
    assert prompt.tokens.count(OLD_IDS["<unk>"]) == sum(item.plan.rows for item in prompt.items)
    for word in ("<unk>", "(<image>./</image>)"):
        with pytest.raises(InvalidRequest):
            builder.build([{"role": "user", "content": f"see {word}"}])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"use_image_id": False}))
    alone = PromptBuilder(tmp_path).build([{"role": "user", "content": [image]}])
    assert OLD_IDS["<image_id>"] not in alone.tokens


def test_options_of_requests() -> None:
    """Those of the request reach the plan, and others are refused by name."""
    options = {"max_slice_nums": 2, "downsample_mode": "4x"}
    newer, older = MiniCPMV46Planner(MINICPMV4_6.config, SLICES), MiniCPMVPlanner(CONFIG, PROCESSOR)
    context = ItemContext(options=MediaSettings.from_options(newer.options, options).options)
    plan = newer.plan(ImageHeader("PNG", 300, 200), context)
    assert plan.num_parts == 3
    assert plan.patches == 4 * plan.rows
    whole = MiniCPMVPlanner(CONFIG, PROCESSOR | {"slice_mode": False})
    assert whole.plan(ImageHeader("PNG", 300, 200), context).num_parts == 1
    with pytest.raises(InvalidRequest, match="downsample_mode; it takes fps, max_slice_nums, num_frames"):
        MediaSettings.from_options(older.options, options)
