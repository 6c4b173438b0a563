"""LoRAs in folders beside a checkpoint's files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import load_adapter
from tests.support.published_files import PHI4_LORAS, make_published_phi4, write_peft_loras
from tests.support.tiny import PHI4, make_tiny
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.identity import model_identity
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.stored.pack_quantized import GroupQuantization
from triptych.models.quantize import quantize_checkpoint
from triptych.prompt.prompt import PromptBuilder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_published_phi4(tmp_path_factory.mktemp("published"))


@pytest.fixture
def folder(tmp_path: Path, published: Path) -> Path:
    made = make_tiny(tmp_path / "model", PHI4)
    write_peft_loras(published, made)
    return made


def load(folder: Path) -> Any:
    return load_adapter(folder).load_decoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], torch.device("cpu"))


def test_tensors_have_the_names_of_published_files(folder: Path, published: Path) -> None:
    ours, theirs = Checkpoint(folder), load_file(published / "model.safetensors")
    names = [name for name in theirs if ".lora_" in name]
    assert sorted(name for name in ours.tensors if ".lora_" in name) == sorted(names)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.read(names).items())
    loras = load(folder).config.loras
    assert {lora.name: (lora.rank, lora.scale * lora.rank) for lora in loras} == PHI4_LORAS


def test_a_folder_alone(tmp_path: Path, published: Path) -> None:
    """What isn't there isn't used."""
    folder = make_tiny(tmp_path / "model", PHI4)
    assert PromptBuilder(folder).planner.loras == {}
    write_peft_loras(published, folder, ["speech"])
    assert PromptBuilder(folder).planner.loras == {"audio": "speech"}
    assert [lora.name for lora in load(folder).config.loras] == ["speech"]


def test_published_files_keep_their_own(tmp_path: Path, published: Path) -> None:
    """Their repository has both."""
    folder = make_published_phi4(tmp_path / "model")
    identity = model_identity(folder, "Phi4MM")
    write_peft_loras(published, folder)
    save_file({"other": torch.ones(1)}, folder / "vision-lora" / "adapter_model.safetensors")
    assert model_identity(folder, "Phi4MM") == identity
    load(folder)


def test_identity(folder: Path) -> None:
    first = model_identity(folder, "Phi4MM")
    settings = folder / "vision-lora" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 7.0}))
    second = model_identity(folder, "Phi4MM")
    assert first.config != second.config
    assert first.weights == second.weights
    weights = folder / "speech-lora" / "adapter_model.safetensors"
    save_file({name: 2 * weight for name, weight in load_file(weights).items()}, weights)
    assert model_identity(folder, "Phi4MM").weights != second.weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, r"vision-lora/adapter_config.json: use_dora True is not served; merge the LoRA"),
        ({"use_rslora": True}, "use_rslora"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"qkv_proj": 3}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": "many"}, "vision_lora.r"),
        ({"r": None}, "vision_lora.r"),
        ({"lora_alpha": -1}, "lora_alpha"),
        ({"r": 7}, "has shape"),
    ],
)
def test_settings_that_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    path = folder / "vision-lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_files_that_are_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "speech-lora" / "adapter_model.safetensors"
    weights = load_file(file)
    first = next(iter(weights))
    for changed, message in (
        ({name: weight for name, weight in weights.items() if name != first}, "missing|lacks"),
        (weights | {"base_model.model.lm_head.weight": torch.ones(2)}, "is not a LoRA's of a linear layer"),
        (weights | {"base_model.model.model.odd.lora_A.weight": torch.ones(2)}, "model.odd.lora_A.speech.weight"),
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"speech-lora: no adapter_model.safetensors; save the LoRA as safeten"):
        load_config(folder)


def test_a_copy_in_4_bits_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="LoRAs in folders can't be copied"):
        list(quantize_checkpoint(folder, tmp_path / "copy", GroupQuantization(32, has_zeros=False)))
