"""Every family answers as transformers does, in every kind of topology; the Qwen3-VL ones are in the other files."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.backbones import BACKBONES
from tests.support.families import ANSWERED_IMAGES, ONE_IMAGE, SLIDING_WINDOWS, TEXT_ALONE, TWO_RANKS
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES, TEXTS, Case
from tests.support.published_files import (
    LLAMA_LIKE_INTERNLM2,
    internvl_over,
    make_internvl_over_internlm2,
    make_original_internvl,
)
from tests.support.stage_loops import answer_of_two_encoders, count_parts, first_logits
from tests.support.tiny import OWN_TOWERS, SHARED, TINY, make_tiny
from triptych.checkpoint.config_files import load_config
from triptych.config import EngineConfig, RankSizes

FEW = [case for case in CASES if case.name in {"tiny image", "image last"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """By a seed for which no answer hangs on rounding: a token's logit is 1e-3 or more above all others. With another,
    two tokens of an answer of Qwen3-Omni's differ by 2e-6."""
    torch.set_num_threads(1)
    return {
        name: Model(make_tiny(tmp_path_factory.mktemp(name), name, seed=4), cases_of(name))
        for name in (*TINY, *OWN_TOWERS)
    }


@pytest.fixture(scope="module")
def cropped(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Gemma 3 with crops of long images, each of which is a span of its own: three of four rows."""
    tiny = OWN_TOWERS["gemma3"]
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40, "pan_and_scan_max_num_crops": 3}
    settings = (tiny.preprocessor or {}) | crops | {"pan_and_scan_min_ratio_to_activate": 1.2}
    folder = make_tiny(tmp_path_factory.mktemp("cropped"), replace(tiny, preprocessor=settings), seed=4)
    return Model(folder, [case for case in CASES if case.name == "large image"])


def cases_of(family: str) -> list[Case]:
    """The prompts that a family takes."""
    if family in TEXT_ALONE:
        return TEXTS
    return [case for case in CASES if len(case.images) <= 1] if family in ONE_IMAGE else CASES


def answered(model: Model, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([case.messages for case in model.cases])

    return asyncio.run(run())


def check_lost_encoder(model: Model, reference: Model) -> None:
    number = next(number for number, case in enumerate(model.cases) if case.name == "large image")
    [item] = model.prompts[number].items
    answer = answer_of_two_encoders(model.folder, model.cases[number].messages, item.plan.rows)
    assert answer == reference.answers[number]


@pytest.mark.parametrize(
    ("topology", "chunk"),
    [("1PD", 4096), ("1P1D", 7), *(pytest.param(*it, marks=pytest.mark.slow) for it in (("1PD", 7), ("1P1D", 4096)))],
)
@pytest.mark.parametrize("family", TEXT_ALONE)
def test_text_alone(models: dict[str, Model], family: str, topology: str, chunk: int) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=chunk)
    assert answered(models[family], topology, engine) == models[family].answers


@pytest.mark.parametrize(
    "topology", ["1E1P1D", *(pytest.param(topology, marks=pytest.mark.slow) for topology in ("1EPD", "1E1PD"))]
)
@pytest.mark.parametrize("family", ANSWERED_IMAGES)
def test_images(models: dict[str, Model], family: str, topology: str) -> None:
    """Twice: the second answers, with rows of a warm encoder cache, are the same, and no part is encoded again."""
    model, seen = models[family], list[int]()

    async def run() -> tuple[list[list[int]], int, list[list[int]]]:
        async with running(model.folder, topology, prepare=partial(count_parts, seen=seen)) as service:
            cold = await service.answers([case.messages for case in model.cases])
            return cold, sum(seen), await service.answers([case.messages for case in model.cases[:3]])

    cold, encoded, warm = asyncio.run(run())
    assert cold == model.answers
    assert warm == model.answers[:3]
    assert sum(seen) == encoded > 0


@pytest.mark.parametrize("family", ANSWERED_IMAGES)
def test_chunks_through_a_receive_pool_of_one_block(models: dict[str, Model], family: str) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=7, receive_blocks=1, receive_block_rows=8)
    assert answered(models[family], "1E1PD", engine) == models[family].answers


@pytest.mark.parametrize("family", ANSWERED_IMAGES)
def test_an_encoder_that_is_lost_in_the_middle_of_an_item(
    models: dict[str, Model], cropped: Model, family: str
) -> None:
    """Gemma 3's item has crops: the whole image alone is one span, whose rows wait for no step."""
    model = cropped if family == "gemma3" else models[family]
    check_lost_encoder(model, model)


@pytest.mark.parametrize("family", TWO_RANKS)
def test_two_ranks(models: dict[str, Model], family: str) -> None:
    assert (
        answered(models[family], "1PD", replace(FLOAT32, tensor_parallel_size=RankSizes(2))) == models[family].answers
    )


@pytest.mark.parametrize("family", SLIDING_WINDOWS)
def test_sliding_windows(models: dict[str, Model], tmp_path: Path, family: str) -> None:
    """Of 16 tokens, in the upper layers (of the mixture, in all): prompts, chunks and answers are longer."""
    folder = make_tiny(tmp_path, family, config={"use_sliding_window": True})
    model = Model(folder, models[family].cases)
    assert model.answers != models[family].answers
    topology = "1PD" if family in TEXT_ALONE else "1EPD"
    assert answered(model, topology) == model.answers
    for chunk in (7, 40):
        assert answered(model, topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == model.answers


@pytest.mark.parametrize("family", [*TINY, *OWN_TOWERS])
def test_first_token_logits(models: dict[str, Model], family: str) -> None:
    """Within 1e-4 in float32, through the transfer of E to PD where there is one."""
    model, topology = models[family], "1PD" if family in TEXT_ALONE else "1E1PD"
    recorded = first_logits(model.folder, [case.messages for case in model.cases], topology)
    for case, prompt, logits in zip(model.cases, model.prompts, recorded, strict=True):
        assert (logits - model.reference.first_logits(prompt, case.images)).abs().max() < 1e-4, case.name


@pytest.mark.parametrize("topology", [pytest.param("1EPD", marks=pytest.mark.slow), "1E1P1D"])
def test_original_files_of_internvl(models: dict[str, Model], tmp_path: Path, topology: str) -> None:
    """The same model by other names answers alike."""
    model = models["internvl"]
    original = Model(make_original_internvl(tmp_path, seed=4), model.cases)
    assert answered(original, topology) == model.answers


@pytest.mark.slow
def test_original_files_of_internvl_and_a_lost_encoder(models: dict[str, Model], tmp_path: Path) -> None:
    reference = models["internvl"]
    check_lost_encoder(Model(make_original_internvl(tmp_path, seed=4), reference.cases), reference)


@pytest.mark.parametrize("model_type", SHARED)
def test_model_types_that_share_a_family(tmp_path: Path, model_type: str) -> None:
    model = Model(make_tiny(tmp_path, *SHARED[model_type], seed=4), FEW)
    assert load_config(model.folder)["model_type"] == model_type
    recorded = first_logits(model.folder, [case.messages for case in model.cases], "1E1PD")
    for case, prompt, logits in zip(model.cases, model.prompts, recorded, strict=True):
        assert (logits - model.reference.first_logits(prompt, case.images)).abs().max() < 1e-4, case.name
    assert answered(model, "1E1PD") == model.answers
    assert answered(model, "1E1P1D") == model.answers


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SHARED)
def test_model_types_that_share_a_family_and_a_lost_encoder(tmp_path: Path, model_type: str) -> None:
    model = Model(make_tiny(tmp_path, *SHARED[model_type], seed=4))
    check_lost_encoder(model, model)


@pytest.mark.parametrize("text", ["qwen3", "qwen3_moe", "gpt_oss", "internlm2"])
def test_original_files_of_internvl_over_other_language_models(tmp_path: Path, text: str) -> None:
    """The mixture's experts are stored one by one in the original files. InternLM2 is compared with a Llama that
    computes the same."""
    if text == "internlm2":
        tiny, files = LLAMA_LIKE_INTERNLM2, make_internvl_over_internlm2(tmp_path / "original", seed=4)
    else:
        tiny = (TINY | BACKBONES)[text]
        files = make_original_internvl(tmp_path / "original", seed=4, text=tiny)
    model, original = Model(make_tiny(tmp_path / "saved", internvl_over(tiny), "saved", seed=4), FEW), Model(files, FEW)
    assert answered(original, "1E1PD") == model.answers
    recorded = first_logits(files, [case.messages for case in FEW])
    for case, prompt, logits in zip(FEW, model.prompts, recorded, strict=True):
        assert (logits - model.reference.first_logits(prompt, case.images)).abs().max() < 1e-4, case.name
