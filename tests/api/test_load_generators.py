"""Load generators that others wrote work unchanged: AIPerf and GuideLLM, in an environment of their own, which
``scripts/setup-clients`` makes; vLLM's ``bench serve``, where the variable names its command."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.serving import Served, served
from tests.harness import FLOAT32
from triptych.demo import MODEL_DIR

LOAD = Path(__file__).parents[2] / ".venv-load" / "bin"
VLLM = os.environ.get("TRIPTYCH_TEST_VLLM", "")
NUMBER = 4


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    """With a tokenizer that transformers can load."""
    with served(MODEL_DIR, engine=replace(FLOAT32, kv_cache_tokens=8192)) as service:
        yield service


def ran(command: Path, *arguments: Any, cwd: Path) -> str:
    """What a command prints, in a folder where it may leave files."""
    if not command.exists():
        pytest.skip(f"no {command.parents[1].name}; scripts/setup-clients makes it")
    environment = os.environ | {"NO_PROXY": "*", "COLUMNS": "200", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
