"""The tensors that follow from a config alone are those that a stage reads from a checkpoint, for every family."""

from pathlib import Path

import pytest

from tests.support.backbones import BACKBONES
from tests.support.outlines import check_outline
from tests.support.published_files import make_original_internvl, make_published_phi4
from tests.support.tiny import HEARING, OWN_TOWERS, TINY, make_tiny
from triptych.checkpoint.outline import Outline


@pytest.mark.parametrize("name", [*TINY, *OWN_TOWERS, *HEARING])
def test_families(tmp_path: Path, name: str) -> None:
    check_outline(make_tiny(tmp_path, name))


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones(tmp_path: Path, name: str) -> None:
    check_outline(make_tiny(tmp_path, BACKBONES[name]))


def test_published_files_of_phi4(tmp_path: Path) -> None:
    check_outline(make_published_phi4(tmp_path))


def test_original_files_of_internvl(tmp_path: Path) -> None:
    check_outline(make_original_internvl(tmp_path))


@pytest.mark.parametrize(
    ("settings", "dtype"), [({}, "F32"), ({"torch_dtype": "bfloat16"}, "BF16"), ({"dtype": 5}, "F32")]
)
def test_the_configs_dtype(tmp_path: Path, settings: dict[str, object], dtype: str) -> None:
    outline = Outline(make_tiny(tmp_path, "qwen3", config=settings))
    [made] = outline.read_shaped({"weight": (3, 5)}).values()
    assert made.shape == (3, 5)
    info = outline.tensors["weight"]
    assert (info.dtype, info.num_bytes) == (dtype, 60 if dtype == "F32" else 30)
