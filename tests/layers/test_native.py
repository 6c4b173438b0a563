"""The environment variables for building the compiled kernels, and invalid values of them."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.layers import native

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Build the library again, which is otherwise cached per process, into a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


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
