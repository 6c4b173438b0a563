"""The header parser against real files, and against damaged and hostile ones."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import TensorInfo, read_folder, read_header
from triptych.errors import CheckpointError


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with the given header, which may be nonsense, and header length, which may be a lie."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "scalar": torch.tensor(1)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    assert read_folder(tmp_path) == {
        "a": TensorInfo(path, "F32", (2, 3), 24),
        "b": TensorInfo(path, "BF16", (5,), 10),
        "scalar": TensorInfo(path, "I64", (), 8),
    }


def test_reads_shards(checkpoint_folder: Any) -> None:
    folder = checkpoint_folder(sharded=True)
    tensors = read_folder(folder)
    whole = read_folder(checkpoint_folder())
    assert len({info.file for info in tensors.values()}) == 3
    assert {key: (info.dtype, info.shape) for key, info in tensors.items()} == {
        key: (info.dtype, info.shape) for key, info in whole.items()
    }
    for key, info in tensors.items():
        with safe_open(info.file, "pt") as file:
            assert tuple(file.get_slice(key).get_shape()) == info.shape


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (["x"], b"", "must hold a JSON object"),
        (entry(), b"1234567", "holds 7 bytes of data"),
        (entry(offsets=(8, 0)), bytes(8), "lies at bytes 8 to 0"),
        (entry(offsets=(-8, 0)), bytes(8), "malformed"),
        (entry(offsets=(0, True)), bytes(8), "malformed"),
        (entry(offsets=(0, 4, 8)), bytes(8), "malformed"),
        (entry(offsets=(0, 8.0)), bytes(8), "malformed"),
        (entry(shape=(3,)), bytes(8), "doesn't fill"),
        (entry(shape=(-1, -2)), bytes(8), "malformed"),
        (entry(shape="2"), bytes(8), "malformed"),
        ({"x": {"dtype": "F32"}}, bytes(8), "malformed"),
        ({"x": 7}, bytes(8), "malformed"),
    ],
)
def test_damaged_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_folder(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [3, 1 << 20, (1 << 64) - 1])
def test_header_length_beyond_the_file(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "model.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x02\x00\x00"])
def test_file_shorter_than_the_length_field(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


def test_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse: takes no room on the disk
    with pytest.raises(CheckpointError, match="over the limit"):
        read_header(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_tensors_or_a_checkpoint_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    with suppress(CheckpointError):
        read_header(path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_folder(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_index(tmp_path, {"x": "model-00001-of-00001.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: missing"):
        read_folder(tmp_path)


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"'y' in a\.safetensors"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..\\a.safetensors", "a.bin", "..", ""]
)
def test_index_may_not_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file({"x": torch.zeros(1)}, place / "a.safetensors")
    write_index(folder, {"x": name})
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file"):
        read_folder(folder)


@pytest.mark.parametrize("weight_map", [None, ["x"], {"x": 3}, {"x": None}])
def test_malformed_index(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        read_folder(tmp_path)


def test_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: must hold a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    assert load_config(tmp_path) == {"model_type": "qwen3_vl"}
