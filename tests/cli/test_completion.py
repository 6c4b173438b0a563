"""Shells complete commands, flags and values."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.exits import exit_code
from triptych.cli import COMMANDS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert exit_code(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    lines = {
        "triptych ": {*COMMANDS},
        "triptych ser": {"serve"},
        "triptych serve --dt": {"--dtype"},
        "triptych serve demo --dtype ": {"auto", "float32", "float16", "bfloat16"},
        "triptych chat demo --kv-cache-dtype i": {"int8"},
        "triptych bench t": {"transfer"},
        "triptych bench transfer --fabric s": {"shm"},
        "triptych serve run --role": {"--role"},
        "triptych serve --join bench --no-u": {"--no-ui"},
        "triptych completion --fi": set(),
    }
    program = f"source {tmp_path / 'script'}\n"
    for line in lines:
        words = line.split(" ")
        program += f"COMP_WORDS=({' '.join(word or repr('') for word in words)}); COMP_CWORD={len(words) - 1}\n"
        program += '_triptych; echo "${COMPREPLY[*]}"\n'
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = [set(line.split()) - {"-h", "--help", "--version"} for line in done.stdout.splitlines()]
    assert found == list(lines.values())


def test_other_shells(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert script("zsh", capsys).startswith("autoload -U +X bashcompinit && bashcompinit\n_triptych()")
    fish = script("fish", capsys)
    assert (
        "complete -c triptych -n '__fish_seen_subcommand_from serve' -l dtype -x -a 'auto float32 float16 bfloat16'"
        in fish
    )
    for shell, text in (("zsh", script("zsh", capsys)), ("fish", fish)):
        if program := shutil.which(shell):
            (tmp_path / shell).write_text(text)
            subprocess.run([program, "-n", tmp_path / shell], check=True)
