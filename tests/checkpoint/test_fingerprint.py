import struct
from pathlib import Path

import pytest

from triptych.checkpoint.fingerprint import fingerprint
from triptych.errors import CheckpointError


def test_fingerprint_sees_every_file(tmp_path: Path) -> None:
    folder = tmp_path
    for name in ("config.json", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    seen = {fingerprint(folder)}

    def is_new() -> bool:
        before = len(seen)
        seen.add(fingerprint(folder))
        return len(seen) > before

    assert not is_new()
    weights = folder / "model.safetensors"
    header = b'{"a":{}}'
    weights.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    assert is_new()
    weights.write_bytes(struct.pack("<Q", len(header)) + header.replace(b"a", b"b") + b"1234")
    assert is_new()
    weights.write_bytes(struct.pack("<Q", len(header)) + header.replace(b"a", b"b") + b"12345")
    assert is_new()
    weights.rename(folder / "other.safetensors")
    assert is_new()
    for name in ("config.json", "preprocessor_config.json"):
        (folder / name).unlink()
        assert is_new()
    (folder / "other.safetensors").write_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(CheckpointError, match=r"other\.safetensors"):
        fingerprint(folder)
