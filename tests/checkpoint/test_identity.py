"""The identity of a checkpoint covers the contents of all its files that matter, and nothing else."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from triptych.checkpoint.identity import model_identity
from triptych.errors import CheckpointError
from triptych.messages.identity import ModelIdentity

HEADER = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
SINGLE = "model.safetensors"


def weights(data: bytes, header: bytes = HEADER) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def identity(folder: Path) -> ModelIdentity:
    return model_identity(folder, "Adapter")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / SINGLE).write_bytes(weights(b"1234"))
    return folder


def test_the_same_files_are_the_same_model_anywhere(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, copy)
    assert identity(copy) == identity(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert identity(link) == identity(folder)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        (SINGLE, weights(b"1235"), "weights"),
        (SINGLE, weights(b"1234", HEADER.replace(b"a", b"b", 1)), "weights"),
        ("config.json", b"[]", "config"),
        ("preprocessor_config.json", None, "config"),
        ("video_preprocessor_config.json", b"{}", "config"),
        ("processor_config.json", b"{}", "config"),
        ("tokenizer.json", b"[]", "tokenizer"),
        ("chat_template.jinja", b"x", ""),
        ("generation_config.json", b"{}", ""),
        ("consolidated.safetensors", weights(b"1234"), ""),
        ("model.safetensors.index.json", b"{}", ""),
    ],
)
def test_what_is_part_of_it(folder: Path, name: str, content: bytes | None, part: str) -> None:
    before = identity(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    after = identity(folder)
    differing = [field for field in before.__struct_fields__ if getattr(before, field) != getattr(after, field)]
    assert differing == [part] * bool(part)
    assert (before.digest != after.digest) == (part in ("weights", "config"))
    assert after.difference(before).startswith(part)


def test_the_adapter_is_part_of_it(folder: Path) -> None:
    one, other = model_identity(folder, "Adapter"), model_identity(folder, "Other")
    assert one.digest != other.digest
    assert one.difference(other) == "adapter Adapter here, Other there"


def test_shards_are_told_apart_by_name_and_the_index_counts(folder: Path) -> None:
    (folder / SINGLE).unlink()
    index = folder / "model.safetensors.index.json"
    header = HEADER.replace(b"a", b"b", 1)
    first, second = folder / "1.safetensors", folder / "2.safetensors"
    first.write_bytes(weights(b"1234"))
    second.write_bytes(weights(b"1234", header))
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
    seen = {identity(folder).weights}
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}, "metadata": {}}))
    seen.add(identity(folder).weights)
    first.write_bytes(weights(b"1234", header))
    second.write_bytes(weights(b"1234"))
    seen.add(identity(folder).weights)
    assert len(seen) == 3
    second.unlink()
    with pytest.raises(CheckpointError, match=r"2\.safetensors: missing"):
        identity(folder)


def test_a_folder_without_weights_has_none(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="neither"):
        identity(folder)
