"""The terminal of ``scripts/demo --chat``; no model is downloaded."""

import asyncio
import io
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from scripts import chat
from triptych import exit_codes


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of the terminal that standard input is."""
    ours, theirs = pty.openpty()
    with open(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield ours
    os.close(ours)


def test_lines_are_read_as_typed(keyboard: int) -> None:
    shown = io.StringIO()
    typed = {b"Why [/] is it \xff?\n": "Why [/] is it \ufffd?", b"\n": "", b"\x04": ""}  # the last is Ctrl-D
    for line, expected in typed.items():
        os.write(keyboard, line)
        assert asyncio.run(chat.next_question(Console(file=shown))) == expected
    assert "Your question" in shown.getvalue()


def test_waiting_for_a_line_can_be_cancelled(keyboard: int) -> None:
    """Otherwise Ctrl-C would end nothing before the line is typed."""

    async def wait() -> None:
        async with asyncio.timeout(0.01):
            await chat.next_question(Console(file=io.StringIO()))

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


def test_failures_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "argv", ["chat"])
    assert chat.main() == exit_codes.FAILED
    assert "no folder for SmolLM2-135M-Instruct" in capsys.readouterr().err
