"""Checkpoint folders of a GGUF file and a ``mmproj`` file: they are the checkpoints that both were made of, and files
of another model or of none are refused by one line."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from PIL import Image

from tests.support.checkpoints import load_adapter
from tests.support.exits import exit_code
from tests.support.gguf_files import SOURCES as TEXT_SOURCES
from tests.support.gguf_files import write_gguf
from tests.support.image_cases import png
from tests.support.mmproj_files import F32, SOURCES, write_both, write_mmproj
from tests.support.serving import image_part, served, text_part
from tests.support.tiny import make_tiny
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.gguf import folder
from triptych.checkpoint.gguf.architectures import ARCHITECTURES
from triptych.checkpoint.gguf.file import read_gguf
from triptych.checkpoint.gguf.folder import gguf_folder
from triptych.checkpoint.gguf.projectors import PROJECTORS
from triptych.checkpoint.identity import model_identity
from triptych.checkpoint.reader import Checkpoint
from triptych.cli.flags import model_folder
from triptych.errors import CheckpointError, ConfigError, MediaNotServed
from triptych.layers.linear import PlainFormat
from triptych.models.registry import family_of, resolve
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder

CPU, FP32 = torch.device("cpu"), PlainFormat(torch.float32)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "user_cache", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return write_both("gemma3", tmp_path_factory.mktemp("gemma3"))


def weights_of(stage: Any) -> dict[str, torch.Tensor]:
    """The weights of a decoder or an encoder, or those of several towers."""
    towers = getattr(stage, "towers", {"": stage})
    return {f"{name} {key}": weight for name, one in towers.items() for key, weight in one.state_dict().items()}


@pytest.mark.parametrize("family", SOURCES)
def test_a_model_is_what_both_files_were_made_of(tmp_path: Path, family: str) -> None:
    source, text, mmproj = write_both(family, tmp_path)
    made = model_folder(str(text), str(mmproj))
    ours, theirs = load_adapter(made), load_adapter(source)
    for load in ("load_encoder", "load_decoder"):
        found, expected = (
            getattr(one, load)(Checkpoint(where), FP32, CPU) for one, where in ((ours, made), (theirs, source))
        )
        weights, theirs_by_name = weights_of(found), weights_of(expected)
        assert weights.keys() == theirs_by_name.keys()
        for name, weight in theirs_by_name.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0, msg=name)
    assert ours.decoder_config == theirs.decoder_config


@pytest.mark.parametrize("family", SOURCES)
def test_an_image_becomes_the_same(tmp_path: Path, family: str) -> None:
    """Files have mean and deviation in float32."""
    source, text, mmproj = write_both(family, tmp_path)
    image = png(Image.effect_noise((90, 70), 60).convert("RGB"))
    plans, patches = [], []
    for place in (gguf_folder(text, mmproj), source):
        config, settings = load_config(place), (load_preprocessor_config(place), load_video_config(place))
        one = family_of(config)
        assert one.preprocessor is not None
        plans.append(resolve(one.planner)(config, *settings).plan(probe_image(image)))
        patches.append([part.patches for part in resolve(one.preprocessor)(config, *settings)(image, plans[-1])])
    assert plans[0] == plans[1]
    for ours, theirs in zip(*patches, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_towers_count_for_the_model_s_identity(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, text, mmproj = gemma
    before = model_identity(gguf_folder(text, mmproj), "a")
    data = bytearray(mmproj.read_bytes())
    data[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(data)
    assert model_identity(gguf_folder(text, tmp_path / "other.gguf"), "a").weights != before.weights
    assert gguf_folder(text) != gguf_folder(text, mmproj), "without towers it is another model"
    assert load_config(gguf_folder(text))["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"projector_type": "ldp"}, "clip.projector_type 'ldp' is not served; served: mlp, gemma3"),
        ({"projector_type": "mlp"}, "projector 'mlp' is that of llama"),
        ({"vision.image_mean": "grey"}, "clip.vision.image_mean must be numbers"),
        ({"vision.block_count": 2**31}, "num_hidden_layers must be a positive integer"),
    ],
)
def test_settings_that_are_refused(
    gemma: tuple[Path, Path, Path], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    source, text, _ = gemma
    with pytest.raises(CheckpointError, match=says):
        load_adapter(gguf_folder(text, write_mmproj("gemma3", source, tmp_path / "m.gguf", **changes)))


def test_towers_of_another_model(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The same architecture in another width, and a vocabulary without the token that stands for embeddings."""
    _, text, mmproj = gemma
    wider = make_tiny(tmp_path / "wider", TEXT_SOURCES["gemma3"])
    write_gguf(wider, tmp_path / "wider.gguf", "gemma3", F32)
    with pytest.raises(CheckpointError, match=r"makes no embeddings of 96 values.*they are files of two models"):
        gguf_folder(tmp_path / "wider.gguf", mmproj)
    with pytest.raises(CheckpointError, match=r"general.architecture is 'gemma3': it is no mmproj file"):
        gguf_folder(text, text)
    narrower = make_tiny(
        tmp_path / "narrower", TEXT_SOURCES["gemma3"], config={"hidden_size": 64, "num_attention_heads": 4}
    )
    write_gguf(narrower, tmp_path / "narrower.gguf", "gemma3", F32)
    with pytest.raises(CheckpointError, match="has no token '<image_soft_token>'"):
        gguf_folder(tmp_path / "narrower.gguf", mmproj)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_damaged_files_of_towers_are_refused_or_read(tmp_path: Path, family: str) -> None:
    """A few bytes changed anywhere before the values, or the end cut off."""
    _, text, mmproj = write_both(family, tmp_path)
    data, source = mmproj.read_bytes(), random.Random(11)
    begin = min(one.offset for one in read_gguf(mmproj).tensors.values())
    refused = 0
    for number in range(40):
        damaged = bytearray(data[: source.randrange(len(data))] if number % 5 == 0 else data)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(min(begin, len(damaged)))] = source.randrange(256)
        mmproj.write_bytes(damaged)
        try:
            made = gguf_folder(text, mmproj)
            load_adapter(made).load_encoder(Checkpoint(made), FP32, CPU)
        except CheckpointError as error:
            refused += "\n" not in str(error)
    assert refused > 15


def test_the_docs_name_what_is_served() -> None:
    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    assert [name for name in (*ARCHITECTURES, *PROJECTORS) if f"`{name}`" not in page] == []
    assert {name for by_architecture in PROJECTORS.values() for name in by_architecture} <= ARCHITECTURES.keys()


def test_a_file_of_towers_needs_a_gguf_file(gemma: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, text, mmproj = gemma
    with pytest.raises(ConfigError, match=r"--mmproj .* is for a GGUF file as MODEL"):
        model_folder(str(source), str(mmproj))
    with pytest.raises(CheckpointError, match="no such file"):
        model_folder(str(text), str(tmp_path / "none.gguf"))


def test_pictures_without_towers_are_refused_with_what_to_give(gemma: tuple[Path, Path, Path]) -> None:
    source, text, mmproj = gemma
    content = [{"type": "image", "data": png(Image.new("RGB", (30, 30)))}]
    with pytest.raises(MediaNotServed, match=r"text alone; .* their GGUF file as --mmproj"):
        PromptBuilder(gguf_folder(text)).build([{"role": "user", "content": content}])
    message = {"role": "user", "content": content}
    ours, theirs = (PromptBuilder(place).build([message]) for place in (gguf_folder(text, mmproj), source))
    assert ours.tokens == theirs.tokens


def test_a_file_without_a_template_has_its_projector_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture and a question to LLaVA, whose vocabulary has no token for pictures."""
    monkeypatch.setattr(GGUFWriter, "add_chat_template", lambda *_: None)
    _, text, mmproj = write_both("llava_next", tmp_path)
    picture = [{"type": "image", "data": png(Image.new("RGB", (30, 30)))}, {"type": "text", "text": "What?"}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": picture}]
    builder = PromptBuilder(gguf_folder(text, mmproj))
    prompt = builder.build([*messages, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "Sure?"}])
    [item] = prompt.items
    told = "".join(builder.tokenizer.decode([token]) for token in prompt.tokens[: item.placement.start])
    assert told == "Be brief. USER: "
    asked = "".join(builder.tokenizer.decode([token]) for token in prompt.tokens[item.placement.end :])
    assert asked == "\nWhat? ASSISTANT: Red.</s>USER: Sure? ASSISTANT:"


def test_doctor_finds_towers_in_their_file(gemma: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, text, mmproj = gemma
    assert exit_code(["doctor", str(text), "--mmproj", str(mmproj), "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"gemma3, rows of 64 values", said)
    assert re.search(r"tensors +│ all \d+ are read", said)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_answers_about_a_picture(tmp_path: Path, family: str) -> None:
    """They are those of the checkpoint, in one process and with encoding apart."""
    source, text, mmproj = write_both(family, tmp_path)
    question = [text_part("What is it?"), image_part(png(Image.effect_noise((90, 70), 60).convert("RGB")))]
    answers, made = list[str](), gguf_folder(text, mmproj)
    for place, topology in ((source, "1EPD"), (made, "1EPD"), (made, "1E1PD")):
        with served(place, topology) as service:
            answers.append(service.text(question, temperature=0, max_tokens=16))
    assert answers[0]
    assert answers[1:] == answers[:1] * 2


def test_an_index_cannot_join_what_doesn_t_fit(tmp_path: Path) -> None:
    _, text, mmproj = write_both("qwen2_vl", tmp_path)
    made = gguf_folder(text, mmproj)
    entries = json.loads((made / "gguf.json").read_text())
    key = "model.visual.blocks.0.attn.qkv.weight"  # of shape, parts and axis
    assert Checkpoint(made).info(key).shape == (96, 32)
    for change in ({2: [96, 33]}, {2: [-96, -32]}, {8: -1}, {8: 5}):
        changed = [change.get(place, value) for place, value in enumerate(entries[key])]
        (made / "gguf.json").write_text(json.dumps(entries | {key: changed}))
        with pytest.raises(CheckpointError, match="malformed"):
            Checkpoint(made)
