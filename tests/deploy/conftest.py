"""The Helm chart, rendered, and what pods share."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.kubernetes_manifests import CHART, HELM
from triptych.user_cache import user_cache

Render = Callable[..., str]


@pytest.fixture(scope="session")
def helm() -> Path:
    """The program, which ``scripts/test-deploy`` installs."""
    if not HELM.exists():
        pytest.skip("no helm: scripts/setup-deploy")
    return HELM


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    """Renders the chart with files of values, and with ``name=value`` words. Raises CalledProcessError."""

    def template(*values: Path | str, chart: Path = CHART, release: str = "triptych") -> str:
        flags = [word for one in values for word in ("--set-json" if isinstance(one, str) else "--values", str(one))]
        command = [str(helm), "template", release, str(chart), "--namespace", "serving", *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    return template


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels, as they are in an image."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "triptych").mkdir()
    for kernels in user_cache().glob("kernels-*"):
        shutil.copy(kernels, folder / "triptych")
    for path in (folder, folder / "triptych"):
        path.chmod(0o777)  # pods have a user of their own
    return folder
