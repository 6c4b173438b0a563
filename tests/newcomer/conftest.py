"""Environments with Triptych installed from a wheel, outside the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ROOT

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "triptych")


@dataclass(frozen=True)
class Environment:
    """A virtual environment; ``bin`` has its commands."""

    bin: Path

    @property
    def variables(self) -> dict[str, str]:
        """Of a shell in which it is active, and little else."""
        return {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "HOME": str(Path.home()), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the checkout, so that neither leaves files in the other."""
    return build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel"))


def build_wheel(copy: Path, made: Path, **variables: str) -> Path:
    """Copy the checkout's sources to a folder, and build a wheel of them in another."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(made), str(copy), **variables)
    (found,) = made.glob("triptych-*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that shares its dependencies with the tests', because installing them takes minutes."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    # after the wheel, which would else be found to be there already
    Path(purelib, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return checked(Environment(folder / "bin"), folder)


def checked(environment: Environment, folder: Path) -> Environment:
    """Check that the environment has its own Triptych."""
    command = [str(environment.bin / "python"), "-P", "-c", "import triptych; print(triptych.__file__)"]
    found = subprocess.check_output(command, text=True, env=environment.variables, cwd="/").strip()
    assert Path(found).is_relative_to(folder), f"{found} is not in {folder}"
    return environment


def pip(*arguments: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        cwd="/",
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
