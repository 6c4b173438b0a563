"""The tensors that follow from a config alone are those that a stage reads from a checkpoint, for every family."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.published_files import make_original_internvl, make_published_phi4
from tests.support.tiny import HEARING, OWN_TOWERS, TINY, make_tiny
from triptych.checkpoint.outline import META, Outline
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.encoder import ModelAdapter
from triptych.layers.linear import WEIGHT_FORMATS, PlainFormat

FP32 = WEIGHT_FORMATS["float32"]


class Counted(Checkpoint):
    """Counts the bytes of the tensors that are read, each once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen = set[str]()

    def num_bytes(self) -> int:
        return sum(self.info(key).num_bytes for key in self.seen)

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        names = list(keys)
        self.seen.update(names)
        return super().read(names)


def check(folder: Path) -> None:
    adapter: ModelAdapter = load_adapter(folder)
    stored = Counted(folder).tensors
    stages = ["encoder", "decoder"] if adapter.encoder_keys(stored) else ["decoder"]
    for stage in stages:
        real, outline = Counted(folder), Outline(folder)
        getattr(adapter, f"load_{stage}")(real, FP32, torch.device("cpu"))
        getattr(adapter, f"load_{stage}")(outline, PlainFormat(torch.float32), META)
        assert sum(info.num_bytes for info in outline.tensors.values()) == real.num_bytes() > 0


@pytest.mark.parametrize("name", [*TINY, *OWN_TOWERS, *HEARING])
def test_families(tmp_path: Path, name: str) -> None:
    check(make_tiny(tmp_path, name))


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones(tmp_path: Path, name: str) -> None:
    check(make_tiny(tmp_path, BACKBONES[name]))


def test_published_files_of_phi4(tmp_path: Path) -> None:
    check(make_published_phi4(tmp_path))


def test_original_files_of_internvl(tmp_path: Path) -> None:
    check(make_original_internvl(tmp_path))


@pytest.mark.parametrize(
    ("settings", "dtype"), [({}, "F32"), ({"torch_dtype": "bfloat16"}, "BF16"), ({"dtype": 5}, "F32")]
)
def test_the_configs_dtype(tmp_path: Path, settings: dict[str, object], dtype: str) -> None:
    outline = Outline(make_tiny(tmp_path, "qwen3", config=settings))
    [made] = outline.read_shaped({"weight": (3, 5)}).values()
    assert made.shape == (3, 5)
    info = outline.tensors["weight"]
    assert (info.dtype, info.num_bytes) == (dtype, 60 if dtype == "F32" else 30)
