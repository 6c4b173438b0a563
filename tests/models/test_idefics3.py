"""Idefics3 and SmolVLM: plans, pixels, rows and keys as transformers has them, their text, and bad configs."""

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.support.family_parts import config_of, inputs_of
from tests.support.image_cases import picture, png
from tests.support.tiny import AROUND_IDS, OWN_TOWERS, make_tiny
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import ModelConfig
from triptych.models.idefics3.plan import Idefics3Planner
from triptych.models.idefics3.preprocess import Idefics3Preprocessor
from triptych.models.shared.shares import places
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, ItemPlan, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: ModelConfig = OWN_TOWERS["smolvlm"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["smolvlm"].preprocessor or {}
REFERENCES: dict[str, Any] = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
NAMES = tuple(REFERENCES)
RELEASED = {"SmolVLM2-2.2B": (1536, 384, 14, 3, 81), "SmolVLM2-500M": (2048, 512, 16, 4, 64)}
RELEASED |= {"Idefics3-8B": (1456, 364, 14, 2, 169)}
"""Longest edge, tile, patch, patches per side of an embedding, and embeddings of a tile."""


def reference_of(name: str, processor: dict[str, Any]) -> Any:
    return REFERENCES[name](**{key: it for key, it in processor.items() if key != "image_processor_type"})


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    """The reference's text for the tiles that its image processor makes; of these, the numbers follow its formulas,
    because making thousands of large images takes minutes."""
    source = random.Random(1)
    for longest, tile, patch, merge, rows in RELEASED.values():
        config = config_of("smolvlm", scale_factor=merge, vision_config={"image_size": tile, "patch_size": patch})
        processor = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
        planner = Idefics3Planner(config, processor)
        for _ in range(count):
            width, height = source.randint(20, 4000), source.randint(20, 4000)
            plan = planner.plan(ImageHeader("PNG", width, height))
            assert (plan.part_rows, plan.rows) == (rows, rows * plan.num_parts)
            assert plan.is_whole
            down, across = tiles_of(width, height, longest, tile)
            assert plan.num_parts == (1 if (down, across) == (0, 0) else down * across + 1)
            assert planner.placeholder(plan, lambda _: "<image>") == text_of(down, across)


class Shape:
    """An image without pixels."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


def tiles_of(width: int, height: int, longest: int, tile: int) -> tuple[int, int]:
    """Rows and columns, as the reference's steps have them, without the pixels."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

    processor = cast(Any, Idefics3ImageProcessorPil())
    processor.resize = lambda image, size, **_: (size.height, size.width)
    size = get_resize_output_image_size(cast(Any, Shape(height, width)), longest)
    made = processor.resize_for_vision_encoder(Shape(*size), tile)
    return (0, 0) if made == (tile, tile) else (made[0] // tile, made[1] // tile)


def text_of(rows: int, columns: int) -> str:
    processor = Idefics3Processor.__new__(Idefics3Processor)
    processor.fake_image_token, processor.image_token = "<fake_token_around_image>", "<image>"
    processor.global_image_tag, processor.image_seq_len = "<global-img>", 1
    text: str = processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
    return text


def test_tiles_of_the_pixels() -> None:
    """The steps without pixels count the tiles that those with pixels make."""
    source = random.Random(3)
    for width, height in ((source.randint(2, 400), source.randint(3, 400)) for _ in range(40)):
        image = picture(width, height, 1)
        made = reference_of("idefics3", PROCESSOR)([[image]], return_row_col_info=True)
        assert tiles_of(width, height, 240, 88) == (made["rows"][0][0], made["cols"][0][0])


def test_bounds_of_the_area() -> None:
    planner, tile = Idefics3Planner(CONFIG, PROCESSOR), 88 * 88

    def tiles(least: int, most: int) -> int:
        plan: ItemPlan = planner.plan(ImageHeader("PNG", 300, 290), ItemContext(PixelBounds(least, most)))
        return plan.num_parts

    assert [tiles(0, 0), tiles(0, 8 * tile), tiles(0, 3 * tile), tiles(9 * tile, 0)] == [10, 5, 1, 10]
    assert planner.max_image_pixels == 9 * tile
    for least, most in ((0, tile - 1), (0, 10 * tile), (5 * tile, 4 * tile), (5 * tile, 6 * tile)):
        with pytest.raises(BadMediaSize):
            tiles(least, most)
    assert len(inputs_of("smolvlm", picture(300, 290, 1), context=ItemContext(PixelBounds(0, 4 * tile)))) == 5


def test_an_input_that_isnt_planned() -> None:
    data = png(picture(300, 200, 1))
    other = Idefics3Planner(CONFIG, PROCESSOR | {"size": {"longest_edge": 100}}).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="tiles"):
        next(Idefics3Preprocessor(CONFIG, PROCESSOR)(data, other))


@pytest.mark.parametrize("side", [6, 22, 26, 27, 32])
def test_places(side: int) -> None:
    """As in the reference, of released sizes too; rounding moves some."""
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    config = Idefics3VisionConfig(image_size=side, patch_size=1, hidden_size=1)
    module = Idefics3VisionEmbeddings(config)
    with torch.inference_mode():
        module.patch_embedding.weight.zero_()
        module.patch_embedding.bias.zero_()
        module.position_embedding.weight.copy_(torch.arange(side**2)[:, None])
        found = module(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))
    assert torch.equal(found.flatten().long(), places(side))


def test_too_many_tiles() -> None:
    """Small tiles of a large image."""
    for kind in (Idefics3Planner, Idefics3Preprocessor):
        kind(CONFIG, PROCESSOR | {"size": {"longest_edge": 16 * 88}})
        with pytest.raises(CheckpointError, match=r"at most 256 tiles, not 289: size\.longest_edge 1409"):
            kind(CONFIG, PROCESSOR | {"size": {"longest_edge": 16 * 88 + 1}})
        kind(CONFIG, PROCESSOR | {"size": {"longest_edge": 4096}, "do_image_splitting": False})


def test_text_around_tiles(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "smolvlm")
    content = [{"type": "image", "data": png(picture(300, 200, 1))}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    [item] = prompt.items
    image, around = AROUND_IDS["<|image_pad|>"], AROUND_IDS["<fake_token_around_image>"]
    assert [span.length for span in item.placement.spans] == [4] * 7
    first, last = item.placement.spans[0], item.placement.spans[-1]
    assert prompt.tokens[first.start - 2 : first.start] == [around, AROUND_IDS["<row_1_col_1>"]]
    assert prompt.tokens[last.start - 1 : last.end + 1] == [AROUND_IDS["<global-img>"], *[image] * 4, around]
    with pytest.raises(InvalidRequest):
        PromptBuilder(folder).build([{"role": "user", "content": "see <fake_token_around_image>"}])
