"""The kernels without PyTorch, on aarch64 in an emulator: ``scripts/aarch64`` installs what this needs."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from triptych.layers.kernel_variants import SOURCES, compiled, variants
from triptych.user_cache import user_cache

PROGRAM = Path(__file__).with_name("check_kernels.c")


@pytest.mark.parametrize(
    ("machine", "compiler", "emulator"),
    [
        (platform.machine(), "gcc", []),  # that the program is right
        ("aarch64", "aarch64-linux-gnu-gcc", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
    ],
)
@pytest.mark.slow
def test_kernels(machine: str, compiler: str, emulator: list[str], tmp_path: Path) -> None:
    for tool in (compiler, *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    library, program = compiled([compiler], variants(machine)[-1], user_cache()), tmp_path / "check"
    sources = [str(PROGRAM), str(library), f"-I{SOURCES}"]
    subprocess.run([compiler, "-O1", *sources, "-fopenmp", "-lm", "-o", str(program)], check=True, timeout=60)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
