"""The environment variables for building the compiled kernels, and invalid values of them."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.layers import native

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Build the library again, which is otherwise cached per process, into a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize(("value", "reason"), [("", "it is empty"), ("  ", "it is empty"), ("'gcc", "No closing quot")])
def test_cc_without_a_command_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, reason: str
) -> None:
    monkeypatch.setenv("CC", value)
    with caplog.at_level(logging.WARNING):
        assert native.library() is not None
    (line,) = caplog.messages
    assert line.startswith(f"the variable CC={value!r} names no compiler ({reason}")


@pytest.mark.parametrize("value", ["no-such-compiler -O2", "/", "false"])
def test_broken_compiler_leaves_pytorchs_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv("CC", value)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    (line,) = caplog.messages
    assert line.startswith("no compiled kernels, so PyTorch's slower ones are used: ")


@needs_compiler
def test_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert native.library() is not None
    assert list((tmp_path / "home" / ".cache" / "triptych").glob("*.so"))
    assert not (tmp_path / "relative").exists()


REFUSED = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
code = lambda *instructions: b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
filters = code(
    (0x20, 0, 0, 0),  # load the number of the system call
    (0x15, 0, 1, 158),  # unless it is arch_prctl,
    (0x06, 0, 0, 0x50001),  # fail with EPERM;
    (0x06, 0, 0, 0x7FFF0000),  # allow it
)
program = struct.pack("HxxxxxxQ", len(filters) // 8, ctypes.addressof(buffer := ctypes.create_string_buffer(filters)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0

import torch
from triptych.layers import native
from triptych.layers.float_product import bf16_product
from triptych.layers.int8 import int8_product

torch.manual_seed(0)
library = native.library()
assert not ctypes.c_int.in_dll(library, "tiles_are_granted").value
weight, tokens = torch.randint(-9, 9, (70, 130)).float(), torch.randint(-9, 9, (40, 130)).float()
expected = tokens @ weight.T
assert torch.equal(bf16_product(weight, None)(tokens), expected)
assert torch.allclose(int8_product(weight, None)(tokens), expected, atol=9)
"""
"""Loads the kernels where a filter of system calls refuses the tiles."""


@needs_compiler
@pytest.mark.skipif("amx_tile" not in native.processor_features().split(), reason="this processor has no AMX")
def test_without_permission_for_tiles_vectors_are_used() -> None:
    library = native.library()
    assert library is not None
    subprocess.run([sys.executable, "-c", REFUSED], check=True, env=os.environ.copy(), timeout=120)
