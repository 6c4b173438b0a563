"""Walks with the command, on several topologies: nothing is lost, wrong or stuck, and nothing is left over."""

import subprocess
from pathlib import Path

import pytest

from triptych import children

SECONDS = 60
LONGEST = 900
"""Seconds for the quiet runs before and after it, too, also on a busy machine."""
FLAGS = ("--threads", "1", "--kv-cache-memory", "64MiB")


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "seed"), [("1EPD", 1), ("1E1PD", 2), ("2E1P2D", 3)])
def test_a_walk_holds(tmp_path: Path, topology: str, seed: int) -> None:
    page = str(tmp_path / "walk.md")
    walk = ("--walk", str(seed), "--topology", topology, "--seconds", str(SECONDS), "--report", page)
    command = children.command("triptych", "chaos", "demo", *walk, *FLAGS)
    ended = subprocess.run(
        command,
        cwd=children.FOLDER,
        env=children.environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    log = (tmp_path / "walk" / f"walk-{seed}.log").read_text()
    assert "Traceback" not in log, log
    assert "while idle" not in log, log
