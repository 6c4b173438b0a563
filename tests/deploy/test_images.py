"""The container files against hadolint, and their pins against what the project asks for. No image is built."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.kubernetes_manifests import HELM, ROOT

FOLDER = ROOT / "deploy" / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
HADOLINT = HELM.with_name("hadolint")
MISTAKES = {
    "DL3002": ("USER 10001:10001", "USER root"),
    "DL3006": ("${BASE}", "python"),
    "DL3025": ('ENTRYPOINT ["triptych"]', "ENTRYPOINT triptych"),
    "DL3008": ("# hadolint ignore=DL3008\n", ""),
    "DL3045": ("WORKDIR /src\n", ""),
}
"""What is changed in a file, by the rule that finds it."""


def findings(text: str) -> set[str]:
    """The rules that a container file breaks."""
    if not HADOLINT.exists():
        pytest.skip("no hadolint: scripts/setup-deploy")
    command = [str(HADOLINT), "--no-color", "--format", "tty", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr, done.stderr
    return set(re.findall(r"\b(?:DL|SC)\d{4}\b", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert findings(path.read_text()) == set()


@pytest.mark.slow
@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_is_found(rule: str) -> None:
    right, wrong = MISTAKES[rule]
    text = (FOLDER / "worker.Dockerfile").read_text()
    assert right in text
    assert rule in findings(text.replace(right, wrong))


def test_versions_are_pinned_as_the_project_asks() -> None:
    pins = {}
    for line in (FOLDER / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = Version(version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["worker"], *extras["nixl"], *extras["otel"], *extras["ray"]]
    for requirement in map(Requirement, asked):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    # PyTorch with CUDA asks for another version of it than PyTorch without
    assert "triton" not in pins
