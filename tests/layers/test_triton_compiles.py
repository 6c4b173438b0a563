"""Triton compiles the kernels, which its interpreter doesn't test, and they fit a GPU's resources; needs no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton isn't installed")


@pytest.mark.slow
def test_kernels_compile_for_gpus() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.compile_kernels"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 3 * ((2 * 5 - 1) * 6 + 2 * 3 + 2 * 3)
