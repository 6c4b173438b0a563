"""Make deploy/kubernetes/NAME.yaml from the chart, with each deploy/kubernetes/NAME.values.yaml:
``scripts/setup-deploy && .venv/bin/python -m scripts.kubernetes_manifests``."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "triptych"
FOLDER = ROOT / "deploy" / "kubernetes"
HELM = ROOT / ".venv-deploy" / "bin" / "helm"
_BEGIN = "# Made by scripts/kubernetes_manifests.py from the chart and {values}; don't edit.\n# fingerprint: {print}\n"
_OF_HELM = re.compile(r" *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|# Source: .*\n")


def values_files() -> list[Path]:
    return sorted(FOLDER.glob("*.values.yaml"))


def manifests_of(values: Path) -> Path:
    """Where the manifests with these values are."""
    return values.with_name(values.name.replace(".values.yaml", ".yaml"))


def fingerprint(values: Path) -> str:
    """Return a digest of all that the manifests are made from. They have no dashboard, which is a link."""
    digest = hashlib.sha256()
    files = sorted(one for one in CHART.rglob("*") if one.is_file() and not one.is_symlink())
    for path in [*files, values, Path(__file__)]:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(values: Path) -> bool:
    """Return whether the manifests were made from what is there now."""
    path = manifests_of(values)
    return path.exists() and f"# fingerprint: {fingerprint(values)}\n" in path.read_text()


def render(values: Path) -> str:
    """Return the manifests. Raises CalledProcessError when helm fails."""
    command = [str(HELM), "template", "triptych", str(CHART), "--namespace", "triptych", "--values", str(values)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    begin = _BEGIN.format(values=values.name, print=fingerprint(values))
    return begin + _OF_HELM.sub("", made)


def main() -> int:
    for values in values_files():
        manifests_of(values).write_text(render(values))
        print(manifests_of(values).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
