"""What runs without the packages of the extra ``worker``, and what names it instead."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import walked
from triptych.cli import make_parser
from triptych.server.worker_extra import PACKAGES

WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from triptych.cli import main
main({arguments!r})
"""


def started(*arguments: str) -> "subprocess.Popen[str]":
    """A command of a Python that has none of those packages."""
    code = WITHOUT.format(packages=PACKAGES, arguments=list(arguments))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"COLUMNS": "80"}, **pipes)  # type: ignore[call-overload]


@pytest.mark.parametrize("program", [parser.prog for parser in walked(make_parser())])
def test_help_of_every_command(program: str) -> None:
    with started(*program.split()[1:], "--help") as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert out.startswith(f"usage: {program}")


def test_a_frontend_starts_and_ends() -> None:
    with started("serve", "demo", "--role", "frontend", "--port", "0") as process:
        assert process.stdout
        assert re.match("ready: demo as the frontend alone on http", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("serve demo --port 0", "an instance"),
        ("serve demo --role E --join 127.0.0.1:1", "an instance"),
        ("run demo Why?", "an instance"),
        ("demo --port 0", "an instance"),
        ("chaos demo", "chaos"),
        ("doctor demo", "doctor"),
    ],
)
def test_a_command_that_computes_names_the_extra(arguments: str, what: str) -> None:
    with started(*arguments.split()) as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert not Path("chaos.md").exists(), "no report of nothing"
    assert errors == f"triptych: {what} needs {', '.join(PACKAGES)}: pip install '.[worker]' in a checkout\n"
