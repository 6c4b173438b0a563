"""The linter refuses what would run code that came from outside, or let everybody in."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def refused(source: str) -> list[str]:
    """The codes of the rules that a file of the package would break."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename=triptych/x.py", "-"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT, check=False)
    return re.findall(r"triptych/x\.py:\d+:\d+: (\S+)", result.stdout)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import pickle\n", "TID251"),
        ("from pickle import loads\n", "TID251"),
        ("import cloudpickle\n", "TID251"),
        ("import dill\n", "TID251"),
        ("import marshal\n", "TID251"),
        ("import shelve\n", "TID251"),
        ("import torch\n\ntorch.load('x')\n", "TID251"),
        ("import numpy as np\n\nnp.load('x')\n", "TID251"),
        ("import yaml\n\nyaml.load('x')\n", "TID251"),
        ("from yaml import unsafe_load\n\nunsafe_load('x')\n", "TID251"),
        ("eval('x')\n", "S307"),
        ("exec('x')\n", "S102"),
        ("import subprocess\n\nsubprocess.run('x', shell=True, check=True)\n", "S602"),
        ("import os\n\nos.system('x')\n", "S605"),
        ("HOST = '0.0.0.0'\n", "S104"),
        ("import tarfile\n\ntarfile.open('x').extractall()\n", "S202"),
    ],
)
def test_what_is_refused(source: str, code: str) -> None:
    assert code in refused(source)


def test_nothing_else_is() -> None:
    assert refused('"""Nothing."""\n\nHOST = "127.0.0.1"\n') == []


def test_no_socket_is_bound_to_all_addresses_and_no_remote_code_is_trusted() -> None:
    wrong = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\])|trust_remote_code\s*=\s*True|weights_only\s*=\s*False")
    sources = {path: path.read_text() for path in (ROOT / "triptych").rglob("*.py")}
    assert len(sources) > 100
    assert [str(path) for path, source in sources.items() if wrong.search(source)] == []
