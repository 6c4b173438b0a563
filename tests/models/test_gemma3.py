"""Gemma 3 with images: plans, pixels, rows, text and logits as transformers has them, and bad configs."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from tests.support.family_parts import config_of
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES, picture, png
from tests.support.reference import Reference
from tests.support.tiny import AROUND_IMAGE_IDS, OWN_TOWERS, make_tiny
from triptych.config import EngineConfig
from triptych.errors import (
    BadMediaSize,
    CheckpointError,
    InvalidRequest,
    PlanMismatch,
    StartError,
    UnsupportedMedia,
)
from triptych.models.base import ModelConfig
from triptych.models.gemma3.encoder import Gemma3
from triptych.models.gemma3.pan_and_scan import PanAndScan
from triptych.models.gemma3.plan import Gemma3Planner
from triptych.models.gemma3.preprocess import Gemma3Preprocessor
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.server.build_engine import check_step
from triptych.types import ImageHeader, ItemContext, ItemPlan, PixelBounds

CONFIG: ModelConfig = OWN_TOWERS["gemma3"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["gemma3"].preprocessor or {}
CROPS: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40, "pan_and_scan_max_num_crops": 3}
CROPS |= {"pan_and_scan_min_ratio_to_activate": 1.2}
RELEASED: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4}
RELEASED |= {"pan_and_scan_min_ratio_to_activate": 1.2}


def reference_of(processor: dict[str, Any]) -> Any:
    return Gemma3ImageProcessorPil(**{key: it for key, it in processor.items() if key != "image_processor_type"})


def text_of(crops: int) -> str:
    processor = Gemma3Processor.__new__(Gemma3Processor)
    processor.full_image_sequence = "\n\n<start><image><end>\n\n"
    text: str = processor.replace_image_token({"num_crops": [crops]}, 0)
    return text


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    """The boxes of the reference's crops, of an image whose pixels say where they are."""
    source, names = random.Random(1), {1: "<start>", 2: "<image>", 3: "<end>"}
    config = config_of("gemma3", image_token_index=2, boi_token_index=1, eoi_token_index=3)
    planner, reference, crops = Gemma3Planner(config, RELEASED), reference_of({}), 0
    places = np.arange(4000)
    for _ in range(count):
        width, height = source.randint(20, 4000), source.randint(20, 4000)
        image = np.broadcast_to(places[:height, None], (1, height, width))
        columns = np.broadcast_to(places[:width], (1, height, width))
        arguments = [value for name, value in RELEASED.items() if name != "do_pan_and_scan"]
        rows_and_columns = zip(*(reference.pan_and_scan(one, *arguments) for one in (image, columns)), strict=True)
        expected = [
            (int(across[0, 0, 0]), int(down[0, 0, 0]), int(across[0, 0, -1]) + 1, int(down[0, -1, 0]) + 1)
            for down, across in rows_and_columns
        ]
        plan = planner.plan(ImageHeader("PNG", width, height))
        assert [part.payload for part in plan.parts] == [(0, 0, width, height), *expected]
        assert (plan.is_whole, plan.atomic, plan.part_rows, plan.rows) == (True, True, 4, 4 * plan.num_parts)
        assert list(planner.runs(plan)) == [4] * plan.num_parts
        assert planner.placeholder(plan, lambda token: names[cast(int, token)]) == text_of(len(expected))
        crops += len(expected) > 0
    assert count // 2 < crops < count


def test_options_and_defaults() -> None:
    planner = Gemma3Planner(CONFIG, PROCESSOR)
    assert (planner.atomic_rows, planner.max_image_pixels) == (4, 84 * 84)

    def parts(width: int, height: int, **options: Any) -> int:
        found: ItemPlan = planner.plan(ImageHeader("PNG", width, height), ItemContext(options=options))
        return found.num_parts

    assert parts(2000, 500) == 1
    assert parts(2000, 500, do_pan_and_scan=True) == 5
    assert parts(2000, 500, do_pan_and_scan=True, pan_and_scan_max_num_crops=3) == 4
    assert parts(2000, 500, do_pan_and_scan=True, pan_and_scan_min_crop_size=501) == 1
    assert parts(2000, 500, do_pan_and_scan=True, pan_and_scan_min_ratio_to_activate=4.1) == 1
    for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate"):
        for options in ({}, {"do_pan_and_scan": False}):
            with pytest.raises(UnsupportedMedia, match=f"pan_and_scan_{name} has no effect without do_pan_and_scan"):
                parts(2000, 500, **{f"pan_and_scan_{name}": 3}, **options)
    with pytest.raises(BadMediaSize, match="crops of"):
        parts(11, 2, do_pan_and_scan=True, pan_and_scan_min_crop_size=2, pan_and_scan_max_num_crops=5)
    always = Gemma3Planner(CONFIG, PROCESSOR | RELEASED)
    assert always.plan(ImageHeader("PNG", 2000, 500)).num_parts == 5
    three = ItemContext(options={"pan_and_scan_max_num_crops": 3})
    assert always.plan(ImageHeader("PNG", 2000, 500), three).num_parts == 4
    off = ItemContext(options={"do_pan_and_scan": False})
    assert always.plan(ImageHeader("PNG", 2000, 500), off).num_parts == 1
    low = ItemContext(PixelBounds(0, 10))  # detail: low
    assert planner.plan(ImageHeader("PNG", 90, 90), low) == planner.plan(ImageHeader("PNG", 90, 90))


@pytest.mark.parametrize(
    "payload", [(), (0, 0, 300), (0, 0, 301, 200), (-1, 0, 300, 200), (9, 0, 9, 200), (0, 0, 9, 0), (0, 7, 9, 6)]
)
def test_boxes_that_arent_within_the_image(payload: tuple[int, ...]) -> None:
    data = png(picture(300, 200, 1))
    plan = Gemma3Planner(CONFIG, PROCESSOR).plan(probe_image(data))
    bad = msgspec.structs.replace(plan, parts=(msgspec.structs.replace(plan.parts[0], payload=payload),))
    with pytest.raises(PlanMismatch, match="box"):
        next(Gemma3Preprocessor(CONFIG, PROCESSOR)(data, bad))
    with pytest.raises(PlanMismatch, match="grid"):
        next(Gemma3Preprocessor(CONFIG, PROCESSOR)(data, msgspec.structs.replace(plan, grid=(1, 6, 7))))


def answered(folder: Path, messages: list[Any], engine: EngineConfig) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(folder, "1E1PD", engine) as service:
            return await service.answers(messages)

    return asyncio.run(run())


@pytest.mark.parametrize("window", [3, 40])
def test_spans_longer_than_blocks_pages_and_windows(tmp_path: Path, window: int) -> None:
    """Images of 9 tokens, in steps of 9, through a pool of a block of 2, on pages of 4."""
    text = CONFIG["text_config"] | {"sliding_window": window}
    folder = make_tiny(tmp_path, "gemma3", seed=4, config={"text_config": text, "mm_tokens_per_image": 9})
    reference, builder, cases = Reference(folder), PromptBuilder(folder), CASES[1:3]
    prompts = [builder.build(case.messages) for case in cases]
    expected = [reference.generate(prompt, case.images) for prompt, case in zip(prompts, cases, strict=True)]
    engine = replace(FLOAT32, max_num_batched_tokens=9, receive_blocks=1, receive_block_rows=2, page_size=4)
    messages = [case.messages for case in cases]
    for one in (engine, replace(FLOAT32, page_size=4)):
        assert answered(folder, messages, one) == expected


def test_a_step_must_hold_an_image() -> None:
    check_step(256, replace(FLOAT32, max_num_batched_tokens=256))
    with pytest.raises(StartError, match="--max-num-batched-tokens 255: one step must compute the 256 tokens"):
        check_step(256, replace(FLOAT32, max_num_batched_tokens=255))


def test_crops_in_a_prompt(tmp_path: Path) -> None:
    """Each crop is a span of its own, and logits are the reference's."""
    folder = make_tiny(tmp_path, "gemma3", seed=4)
    content = [{"type": "image", "data": png(picture(300, 100, 2)), "options": CROPS}, {"type": "text", "text": "?"}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    [item] = prompt.items
    assert len(item.plan.parts) == 4
    assert [span.length for span in item.placement.spans] == [4] * 4
    assert all(span.atomic for span in item.placement.spans)
    image, start, end = (
        AROUND_IMAGE_IDS[name] for name in ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    )
    newlines = prompt.tokens[item.placement.end + 1 : item.placement.end + 3]
    for span in item.placement.spans:
        around = prompt.tokens[span.start - 3 : span.end + 3]
        assert around == [*newlines, start, *[image] * 4, end, *newlines]
    reference = Reference(folder)
    inputs = reference.reference_inputs(prompt, [])
    processed = reference_of(PROCESSOR | CROPS)([picture(300, 100, 2)], return_tensors="pt")
    inputs["pixel_values"] = processed["pixel_values"]
    [answer] = answered(folder, [[{"role": "user", "content": content}]], FLOAT32)
    inputs["input_ids"] = torch.tensor([[*prompt.tokens, *answer]])
    inputs["token_type_ids"] = (inputs["input_ids"] == image).int()
    with torch.inference_mode():  # transformers' generate avoids end tokens, which the answer may have
        logits = reference.model(**inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}).logits[0]
    assert logits[len(prompt.tokens) - 1 : -1].argmax(dim=-1).tolist() == answer
    with pytest.raises(InvalidRequest):
        PromptBuilder(folder).build([{"role": "user", "content": "see <start_of_image>"}])


def test_bad_crops() -> None:
    for name, value in (
        ("do_pan_and_scan", 1),
        ("pan_and_scan_min_crop_size", 0),
        ("pan_and_scan_max_num_crops", 65),
        ("pan_and_scan_min_ratio_to_activate", -1),
    ):
        with pytest.raises(CheckpointError, match=name):
            PanAndScan.from_config({name: value})


def test_published_config() -> None:
    """gemma-3-4b-it's, which relies on the defaults of ``Gemma3TextConfig``."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
    vision |= {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256}
    config |= {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000}
    config |= {"text_config": text, "vision_config": vision}
    adapter, planner = Gemma3(config), Gemma3Planner(config, {})
    decoder = adapter.decoder_config
    assert (decoder.vocab_size, decoder.num_layers, decoder.tie_embeddings) == (262_208, 34, True)
    assert decoder.cache_groups.windows == (None, 1024)
    assert (planner.context_length, planner.atomic_rows, adapter.vision.pooled) == (131_072, 256, 4)
