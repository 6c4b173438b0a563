"""Runs the walk-throughs of docs/contributing: their code blocks, in order, in a copy of the repository.

A Python block's title says where it goes: the path of a new file, or ``at the end of`` the path of a file. Shell blocks
are run, with free ports for 8100 to 8199. Blocks of other languages are for readers.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT
from tests.support.doc_examples import free_port

PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
COPIED = ("triptych", "tests", "bench", "demo", "scripts", "pyproject.toml")
APPEND = "at the end of "
TIMEOUT = 300.0

_BLOCK = re.compile(r'^```(python|sh)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_END_JOBS = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
"""Ends background jobs that a failing command leaves."""
_PORT = re.compile(r"\b81\d\d\b")


@dataclass(frozen=True)
class Step:
    """One code block of a page."""

    language: str
    title: str
    text: str

    @property
    def path(self) -> str:
        """The file that a Python block goes to."""
        return self.title.removeprefix(APPEND)


def steps(page: Path) -> Iterator[Step]:
    """The blocks of a page that are written or run."""
    for language, title, text in _BLOCK.findall(page.read_text()):
        yield Step(language, title, text)


def copy_repository(folder: Path) -> None:
    """Copy what a contributor's changes concern, with its bytecode, which each page's commands would compile again."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            # the file of bytecode that another process is writing may vanish
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(ROOT / name, folder / name)


def follow(step: Step, folder: Path) -> None:
    """Write or run a block in ``folder``. Raises AssertionError with the output of a command that fails."""
    if step.language == "sh":
        _run(step.text, folder)
        return
    assert step.title, f"a Python block without a title: {step.text[:80]!r}"
    path = folder / step.path
    if step.title.startswith(APPEND):
        with path.open("a") as file:
            file.write("\n\n" + step.text)
        return
    assert not path.exists(), f"{step.title} is there already"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(step.text)


def run_ruff(paths: Collection[str], folder: Path) -> None:
    """Check the files with the project's rules. Raises AssertionError with what is wrong."""
    _run(f"ruff check --no-cache {' '.join(paths)}", folder)


def _run(commands: str, folder: Path) -> None:
    for port in set(_PORT.findall(commands)):
        commands = commands.replace(port, str(free_port()))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _END_JOBS + commands],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
