"""The rendered chart and the manifests against checkov's policies: rights, probes, limits, secrets."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.kubernetes_manifests import CHART, HELM, ROOT, manifests_of, values_files

pytestmark = pytest.mark.slow

DELIBERATE = {
    "CKV_K8S_11": "no limit of processor time: throttling delays heartbeats",
    "CKV_K8S_15": "images are not pulled again: their tags are versions",
    "CKV_K8S_21": "the namespace is the release's",
    "CKV_K8S_43": "images have tags, unless their names have digests",
}
MISTAKES = {
    "CKV_K8S_20": ("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"),
    "CKV_K8S_22": ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
    "CKV_K8S_37": ("drop: [ALL]", "add: [SYS_ADMIN]"),
    "CKV_K8S_8": ("livenessProbe:", "notLivenessProbe:"),
    "CKV_K8S_13": ("memory: 2Gi", "ephemeral-storage: 2Gi"),
    "CKV_K8S_38": ("automountServiceAccountToken: false", "automountServiceAccountToken: true"),
}
"""What is changed in a manifest, by the policy that finds it."""


@pytest.fixture(scope="module")
def findings(render: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The policies that the manifests violate, by the names of their files."""
    folder = tmp_path_factory.mktemp("policies")
    for path in (CHART.parent / "examples").glob("*.yaml"):
        (folder / f"chart-{path.name}").write_text(render(path))
    (folder / "chart-https.yaml").write_text(render('tls.existing="tls"', 'model.path="demo"'))
    given = [*map(manifests_of, values_files()), ROOT / "deploy" / "kuberay" / "demo.yaml"]
    for path in given:
        (folder / f"{path.parent.name}-{path.name}").write_text(path.read_text())
    right = render(CHART.parent / "examples" / "demo.yaml")
    for policy, (part, wrong) in MISTAKES.items():
        assert part in right, policy
        (folder / f"{policy}.yaml").write_text(right.replace(part, wrong))
    command = [str(HELM.with_name("checkov")), "--directory", str(folder), "--framework", "kubernetes"]
    command += ["--skip-download", "--quiet", "--compact", "--output", "json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"LOG_LEVEL": "ERROR"}
    )
    found: dict[str, set[str]] = {path.name: set() for path in folder.iterdir()}
    for one in json.loads(done.stdout)["results"]["failed_checks"]:
        found[Path(one["file_path"]).name].add(one["check_id"])
    return found


def test_manifests_violate_no_policy_but_some_deliberately(findings: dict[str, set[str]]) -> None:
    given = {name: policies for name, policies in findings.items() if not name.startswith("CKV")}
    assert len(given) >= 9
    assert {name: policies - DELIBERATE.keys() for name, policies in given.items()} == {name: set() for name in given}
    assert set().union(*given.values()) == DELIBERATE.keys(), "a reason that nothing needs"


@pytest.mark.parametrize("policy", MISTAKES)
def test_a_mistake_is_found(policy: str, findings: dict[str, set[str]]) -> None:
    assert policy in findings[f"{policy}.yaml"]
