"""A checkpoint to serve, and copies of it with something wrong."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint

MISSING_KEY = "model.language_model.layers.2.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cluster") / "tiny")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another revision of the model."""
    return make_checkpoint(tmp_path_factory.mktemp("revision") / "tiny", seed=1)


@pytest.fixture
def folder_without_a_key(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "broken")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[MISSING_KEY]
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder_without_a_shard(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "broken", sharded=True)
    shards = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    (folder / min(shards)).unlink()
    return folder
