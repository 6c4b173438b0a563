"""Videos in the families that ``test_video.py`` isn't about: answered as transformers answers them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chat import url_of
from tests.support.clips import clip
from tests.support.families import FRAME_PARTS, FRAME_TILES, SAME_MEDIA, SAME_VIDEOS, VIDEO_ANSWERS
from tests.support.harness import FLOAT32, Messages, running
from tests.support.published_files import ORIGINALS, make_of_type
from tests.support.serving import served
from tests.support.stage_loops import answer_of_two_encoders, count_parts
from tests.support.tiny import TINY, make_tiny
from tests.support.video_cases import MORE, RUNS, SMALL, Model, answered, image_part, listed, user, video_part
from triptych.config import EncodeConfig
from triptych.prompt.tokenizer import Tokenizer
from triptych.types import MODEL_SAMPLING, FrameSampling

CASES: dict[str, Messages] = {
    "mp4": user(video_part(clip("mp4", frames=50), **SMALL), "What happens?"),
    "three a second": user(video_part(clip("mp4", frames=27), sampling=FrameSampling(fps=3.0), **SMALL), "How fast?"),
    "gif and an image": user(video_part(clip("gif", frames=9), **SMALL), "or ", image_part(96, 64, 1), " which?"),
    "two videos": user(
        video_part(clip("webm", frames=30, seed=3), sampling=FrameSampling(num_frames=6), **SMALL),
        " and ",
        video_part(clip("mp4", frames=20, width=64, height=96, seed=4)),
        "Same?",
    ),
    "a list of frames": user(image_part(64, 64, 2), video_part(listed([0, 1, 2, 3, 4], 1.0), **SMALL), "And now?"),
    "one frame": user(video_part(clip("mp4", frames=1), **SMALL), "What is it?"),
}


def cases_of(family: str) -> dict[str, Messages]:
    """Without what the family refuses: bounds if frames are tiles, which all have one size; numbers of frames in
    GLM-V."""

    def taken(part: dict[str, Any]) -> dict[str, Any]:
        without = {"bounds"} if family in FRAME_TILES else set()
        if family == "glm4v" and part.get("sampling", MODEL_SAMPLING).num_frames:
            without = {"sampling"}
        return {key: value for key, value in part.items() if key not in without}

    return {name: user(*map(taken, messages[0]["content"])) for name, messages in CASES.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    torch.set_num_threads(1)
    yield {
        family: Model(make_tiny(tmp_path_factory.mktemp(family), family), cases_of(family))
        for family in (*VIDEO_ANSWERS, *FRAME_TILES, *FRAME_PARTS)
    }
    asyncio.set_event_loop(None)


@pytest.mark.parametrize(
    ("topology", "chunk", "pool"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE)]
)
@pytest.mark.parametrize("family", [*VIDEO_ANSWERS, *FRAME_TILES, *FRAME_PARTS])
def test_as_the_reference(
    models: dict[str, Model], family: str, topology: str, chunk: int, pool: dict[str, Any]
) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=chunk, **pool)
    assert answered(models[family], topology, engine) == models[family].answers


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
@pytest.mark.parametrize("model_type", SAME_VIDEOS)
def test_model_types_whose_videos_are_another_ones(tmp_path: Path, model_type: str, topology: str) -> None:
    """Original files, which don't say how many frames are sampled, are compared with those of transformers. GLM-4.6V
    takes no sampling."""
    cases = cases_of(SAME_MEDIA[model_type])
    if model_type == "glm46v":
        del cases["three a second"]
    if model_type in ORIGINALS:
        cases = {name: cases[name] for name in ("three a second", "a list of frames", "one frame")}
    reference = model = Model(make_of_type(tmp_path / "own", model_type, seed=4), cases)
    if model_type in ORIGINALS:
        reference = Model(make_tiny(tmp_path / "saved", SAME_MEDIA[model_type], seed=4), cases)
    assert any(item.plan.modality == "video" for item in model.prompts[0].items)
    assert answered(model, topology) == reference.answers


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_glm_4_6v_as_published(tmp_path: Path, topology: str) -> None:
    """Of GLM-4.5V's model type, with GLM-4.6V's processors: these decide on the frames and on the texts after them."""
    tiny = TINY["glm4v_moe"]
    cases = cases_of("glm4v")
    del cases["three a second"]
    own, other = (
        Model(make_tiny(tmp_path / name, replace(tiny, preprocessor=image, video_preprocessor=video), seed=4), cases)
        for name, image, video in (
            ("4.6", named(tiny.preprocessor, "Image"), named(tiny.video_preprocessor, "Video")),
            ("4.5", tiny.preprocessor, tiny.video_preprocessor),
        )
    )
    assert own.prompts[0].tokens != other.prompts[0].tokens
    assert answered(own, topology) == own.answers


def named(settings: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """A processor's file with the names of GLM-4.6V's."""
    return (
        (settings or {})
        | {"processor_class": "Glm46VProcessor"}
        | {f"{kind.lower()}_processor_type": f"Glm46V{kind}Processor"}
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", [*VIDEO_ANSWERS, *FRAME_TILES, *FRAME_PARTS])
def test_an_encoder_that_is_lost_in_the_middle_of_a_video(models: dict[str, Model], family: str) -> None:
    model = models[family]
    [item] = model.prompts[0].items
    assert answer_of_two_encoders(model.folder, model.cases["mp4"], item.plan.rows) == model.answers[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*VIDEO_ANSWERS, *FRAME_TILES, *FRAME_PARTS])
@pytest.mark.parametrize("patches", [1, 50, 10**6])
def test_batches(models: dict[str, Model], family: str, patches: int) -> None:
    encode = EncodeConfig(encode_batch_patches=patches, encode_cache_mb=0)
    assert answered(models[family], "1E1PD", encode=encode) == models[family].answers


@pytest.mark.parametrize(
    ("family", "topology"), [("qwen2_vl", "1E1P1D"), ("qwen2_5_vl", "1EPD"), ("qwen3_omni_moe", "1E1PD")]
)
def test_over_http(models: dict[str, Model], family: str, topology: str) -> None:
    model = models[family]
    number = list(CASES).index("three a second")
    data, tokenizer = CASES["three a second"][0]["content"][0]["data"], Tokenizer(model.folder)
    with served(model.folder, topology) as service:
        with service.client() as client:
            (about,) = client.get("/v1/models").json()["data"]
        assert {"text", "image", "video"} <= set(about["input_modalities"])
        bounds = {"min_pixels": SMALL["bounds"].min_pixels, "max_pixels": SMALL["bounds"].max_pixels}
        text = service.text(
            [{"type": "video_url", "video_url": {"url": url_of(data)}}, {"type": "text", "text": "How fast?"}],
            mm_processor_kwargs={"fps": 3, **bounds},
            max_tokens=32,
            temperature=0,
            skip_special_tokens=False,
        )
    assert text == tokenizer.decode(model.answers[number], skip_special_tokens=False)


@pytest.mark.parametrize("family", VIDEO_ANSWERS)
def test_clips_that_share_frames_share_the_work(models: dict[str, Model], family: str) -> None:
    """Whatever their rate: a patch in time looks the same, wherever it is."""
    seen: list[int] = []
    first, second = listed([0, 1, 2, 3, 4, 5]), listed([2, 3, 0, 1, 8, 9], rate=0.5)

    async def run() -> None:
        async with running(models[family].folder, "1E1PD", prepare=partial(count_parts, seen=seen)) as service:
            await service.answer(user(video_part(first, **SMALL), "?"), max_tokens=1)
            assert sum(seen) == 3
            await service.answer(user(video_part(second, **SMALL), "?"), max_tokens=1)
            assert sum(seen) == 4

    asyncio.run(run())
