"""Wheels have the compiled kernels, so that a machine without a compiler is as fast."""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.newcomer.conftest import Environment, build_wheel
from triptych.layers import native
from triptych.layers.kernel_variants import PIXELS, variants

USED = """
import torch
from triptych.layers import native
from triptych.layers.float_product import half_product
print(native.kernels().description)
weight, activations = torch.arange(600.0).view(20, 30), torch.eye(30)
assert torch.equal(half_product(weight, None)(activations), weight.T)
assert native.pixel_kernels() is not None
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_kernels_of_a_wheel_need_no_compiler(wheel: Path, installed: Environment, tmp_path: Path) -> None:
    machine = os.uname().machine
    found = re.fullmatch(rf"triptych-.*-py3-none-manylinux_2_(\d+)_{machine}\.whl", wheel.name)
    assert found, wheel.name
    assert int(found[1]) <= 28, "PyTorch's wheels need glibc 2.28, so ours may, too"
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert {Path(name).stem for name in libraries} == {PIXELS, *(variant.name for variant in variants(machine))}
        assert not any(b"libgomp" in archive.read(name) for name in libraries), "PyTorch brings its own"
    variables = {**installed.variables, "PATH": str(installed.bin), "XDG_CACHE_HOME": str(tmp_path)}
    command = [str(installed.bin / "python"), "-P", "-c", USED]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{native.usable_variants()[0].name}, prebuilt")
    assert not list(tmp_path.rglob("*.so"))


def test_without_a_compiler_the_wheel_has_no_kernels(tmp_path: Path) -> None:
    for name in ("sources", "wheel"):
        (tmp_path / name).mkdir()
    made = build_wheel(tmp_path / "sources", tmp_path / "wheel", CC="no-such-compiler")
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        assert not any("prebuilt" in name for name in archive.namelist())
