"""The plain manifests: made from the chart as it is, and fitting the program."""

from pathlib import Path

import pytest

from scripts.kubernetes_manifests import is_current, manifests_of, values_files
from tests.support.manifests import problems, read, workloads

GIVEN = ["triptych-secret", "models"]


@pytest.mark.parametrize("values", values_files(), ids=lambda path: path.name)
def test_the_manifests_are_current(values: Path) -> None:
    assert is_current(values), "run scripts/setup-deploy, then .venv/bin/python -m scripts.kubernetes_manifests"


@pytest.mark.parametrize("values", values_files(), ids=lambda path: path.name)
def test_the_manifests_fit_together_and_fit_the_program(values: Path) -> None:
    documents = read(manifests_of(values).read_text())
    assert len(workloads(documents)) >= 3
    assert problems(documents, GIVEN) == []


MISTAKES = [
    ("path: /ready", "path: /redy", "asks for /redy"),
    ("port: health}", "port: health, scheme: HTTPS}", "does not ask by HTTP"),
    ("terminationGracePeriodSeconds: 75", "terminationGracePeriodSeconds: 60", "killed while it drains"),
    ("--join=triptych-frontend-0.triptych-frontend:8001", "--join=triptych-0.triptych:8001", "no frontend's name"),
    ("--join=triptych-frontend-0.", "--join=triptych-frontend-7.", "but the frontends are"),
    ("triptych-frontend:8001", "triptych-frontend:8000", "not the control port"),
    ("--health-port=8080", "--health-port=8081", "port health is not 8080"),
    ("--drain-timeout=60", "--drain-time=60", "does not know these arguments"),
    ("targetPort: http", "targetPort: https", "no port https"),
    ("{name: secrets, mountPath: /secrets, readOnly: true}", "{name: tmp, mountPath: /x}", "nothing is mounted for"),
    ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "more rights"),
    ("--threads=1", "--threads=9", "more threads than cores"),
    ("triptych-secret", "triptych-secrets", "there is no triptych-secrets"),
    ("--start-timeout=61", "--start-timeout=6100", "gives up before the process"),
    ("--kv-cache-memory=256MiB", "--kv-cache-memory=256GiB", "larger than the memory"),
]


@pytest.mark.parametrize(("right", "wrong", "problem"), MISTAKES)
def test_a_mistake_is_found(right: str, wrong: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = manifests_of(values_files()[-1]).read_text()
    assert right in text
    assert problem in "\n".join(problems(read(text.replace(right, wrong)), GIVEN))


def test_selectors_that_match_nothing_are_found() -> None:
    documents = read(manifests_of(values_files()[-1]).read_text())
    kinds = ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet")
    for one in [one for one in documents if one["kind"] in kinds]:
        selector = one["spec"].get("selector") or one["spec"]["podSelector"]
        labels = selector.get("matchLabels", selector)
        before = dict(labels)
        labels["app.kubernetes.io/instance"] = "another"
        assert any("select" in problem for problem in problems(documents, GIVEN)), one["kind"]
        labels.update(before)
    assert problems(documents, GIVEN) == []
