"""The chart with many sets of values: rendered by helm, checked against strict schemas, and against the program."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from scripts.kubernetes_manifests import CHART, HELM, ROOT, manifests_of, values_files
from scripts.kubernetes_manifests import render as render_plain
from tests.support.manifests import KUBERNETES, problems, read, schema_errors, workloads

pytestmark = pytest.mark.slow

Render = Callable[..., str]
EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))
GIVEN = ["models", "triptych-cache", "triptych-keys", "triptych-secret", "triptych-tls"]
ROLE = '{"replicas":1,"threads":1,"resources":{"requests":{"cpu":"1"},"limits":{"memory":"8Gi"}}}'
SETS: dict[str, list[Path | str]] = {
    "defaults": ["model.volume.emptyDir={}"],
    **{path.stem: [path] for path in EXAMPLES},
    "1EPD": ['roles={"E":null,"PD":null,"EPD":' + ROLE + "}", 'model.path="demo"'],
    "1EP1D": ['roles={"E":null,"PD":null,"EP":' + ROLE + ',"D":' + ROLE + "}", 'model.path="demo"'],
    "leaderworkerset": ['orchestrator="LeaderWorkerSet"', 'model.path="demo"'],
    "gateway": ['inferencePool={"enabled":true,"endpointPicker":"picker"}', 'model.path="demo"'],
    "https": ['tls.existing="triptych-tls"', 'model.path="demo"', "monitoring.podMonitor=true"],
    "open": ['networkPolicy={"enabled":false}', 'secret.existing="triptych-secret"', 'model.path="demo"'],
    "narrow": [
        'networkPolicy.clients=[{"namespaceSelector":{"matchLabels":{"team":"chat"}}}]',
        'model={"path":"demo","servedName":"demo"}',
        "frontend.ui=false",
        'podAnnotations={"example.com/a":"b"}',
        'image.pullSecrets=["registry"]',
        'frontend.affinity={"podAntiAffinity":{}}',
        'frontend.env=[{"name":"OTEL_EXPORTER_OTLP_HEADERS","value":"a=b"}]',
    ],
}


def test_helm_finds_nothing_to_say(render: Render) -> None:
    command = [str(HELM), "lint", "--strict", str(CHART), "--values", str(CHART.parent / "examples" / "demo.yaml")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("name", SETS)
def test_values_render_to_what_all_versions_of_kubernetes_take(name: str, render: Render) -> None:
    assert len(SETS) >= 10
    manifests = render(*SETS[name])
    assert schema_errors(manifests, *KUBERNETES) == []
    assert problems(read(manifests), GIVEN) == []


MISTAKES = [
    ("readinessProbe:", "readyProbe:", "'readyProbe' was unexpected"),
    ("failureThreshold: 32", "failureThreshold: many", "'many' is not of type 'integer'"),
    ("maxUnavailable: 1\n", "maxUnavailible: 1\n", "'maxUnavailible' was unexpected"),
    ("mountPath: /tmp}", "path: /tmp}", "'mountPath' is a required property"),
    ("containerPort: 8000", "containerPort: '8000'", "is not of type"),
    ("maxReplicaCount: 8", "maxReplicas: 8", "'maxReplicas' was unexpected"),
    ("interval: 5s", "interval: 5", "5 is not of type 'string'"),
    ("minReplicaCount: 2", "minReplicaCount: two", "'two' is not of type 'integer'"),
    ("metricType: Value", "metricType: Utilization", "'Utilization' is not one of"),
    ("behavior: currentReplicasIfHigher", "behavior: highest", "'highest' is not one of"),
    ("policyTypes: [Egress]", "policyType: [Egress]", "'policyType' was unexpected"),
]


@pytest.mark.parametrize(("right", "wrong", "problem"), MISTAKES)
def test_the_schemas_refuse_a_mistake(right: str, wrong: str, problem: str, render: Render) -> None:
    manifests = render(CHART.parent / "examples" / "autoscaling.yaml")
    assert right in manifests
    assert problem in "\n".join(schema_errors(manifests.replace(right, wrong), "1.37"))


def test_the_schemas_refuse_a_mistake_within_a_pod_of_another_kind(render: Render) -> None:
    manifests = render(CHART.parent / "examples" / "disaggregatedset.yaml")
    wrong = manifests.replace("livenessProbe:", "aliveProbe:")
    assert "DisaggregatedSet/triptych" in "\n".join(schema_errors(wrong, "1.37"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ('rolls={"E":{}}', "rolls"),
        ('roles.E.replica=2', "replica"),
        ('roles.X=' + ROLE, "X"),
        ('roles.P={"replicas":1}', "threads"),
        ('frontend.replicas=0', "replicas"),
        ('fabric="shm"', "fabric"),
        ('drainSeconds="60"', "drainSeconds"),
        ('inferencePool.enabled=true', "endpointPicker is needed"),
        ('model.path="/models/x"', "model.volume is needed"),
        ('roles.E.scale={"min":1}', "max"),
        ('apiKeys.existing="keys"', "monitoring.credentials is needed"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(value: str, problem: str, render: Render) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        render('model={"path":"demo"}', "monitoring.podMonitor=true", value)
    assert problem in error.value.stderr


def test_roles_of_a_disaggregated_set_can_not_be_scaled(render: Render) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        render('orchestrator="DisaggregatedSet"', 'roles.E.scale={"min":1,"max":2}', 'model.path="demo"')
    assert "can't be scaled one by one" in error.value.stderr


def test_each_value_is_used_and_documented_in_the_schema(render: Render) -> None:
    """A value that no template reads would be accepted and would do nothing."""
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    leaves = [f"{a}.{b}" for a, inner in values.items() if isinstance(inner, dict) and a != "roles" for b in inner]
    for leaf in leaves:
        name = leaf.rpartition(".")[2]
        assert re.search(rf"\.{name}\b", templates), leaf


def test_a_longer_model_gets_more_time_to_start(render: Render) -> None:
    def patience(gibibytes: int) -> int:
        documents = read(render(f"model.gibibytes={gibibytes}", 'model.volume={"emptyDir":{}}'))
        (frontend,) = [one for one in documents if one["kind"] == "StatefulSet"]
        probe = frontend["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert patience(100) - patience(0) == 1000


def test_the_secret_is_random_and_long(render: Render) -> None:
    first, second = (
        next(one["data"]["secret"] for one in read(render('model.path="demo"')) if one["kind"] == "Secret")
        for _ in range(2)
    )
    assert first != second
    assert len(first) > 40


@pytest.mark.parametrize("values", values_files(), ids=lambda path: path.name)
@pytest.mark.usefixtures("helm")
def test_the_plain_manifests_are_what_helm_makes(values: Path) -> None:
    made = manifests_of(values).read_text()
    assert made == render_plain(values)
    assert schema_errors(made, *KUBERNETES) == []


@pytest.mark.parametrize("name", SETS)
def test_each_workload_is_spread_and_has_a_disruption_budget(name: str, render: Render) -> None:
    documents = read(render(*SETS[name]))
    budgets = [one["spec"] for one in documents if one["kind"] == "PodDisruptionBudget"]
    found = workloads(documents)
    assert found
    for workload in found:
        of_it = [one for one in budgets if one["selector"]["matchLabels"].items() <= workload.labels.items()]
        assert [one["maxUnavailable"] for one in of_it] == [1], workload.name
        spread = workload.pod["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        for one in spread:
            selected = [
                other.name for other in found if one["labelSelector"]["matchLabels"].items() <= other.labels.items()
            ]
            assert selected == [workload.name]


def test_an_accelerator_is_asked_for_and_used_only_where_the_values_say_so(render: Render) -> None:
    containers = {
        one.name.rpartition("-")[2]: one.container
        for one in workloads(read(render(CHART.parent / "examples" / "e-on-cpu.yaml")))
    }
    assert "--device=cuda" in containers["pd"]["args"]
    assert containers["pd"]["resources"]["limits"] == {"memory": "48Gi", "nvidia.com/gpu": 1}
    assert "--device=cpu" in containers["e"]["args"]
    assert containers["e"]["resources"]["limits"] == {"memory": "12Gi"}
    other = read(render(CHART.parent / "examples" / "e-on-cpu.yaml", 'roles.PD.gpuResource="amd.com/gpu"'))
    (pd,) = [one for one in workloads(other) if one.name.endswith("-pd")]
    assert pd.container["resources"]["limits"] == {"memory": "48Gi", "amd.com/gpu": 1}


def test_the_dashboard_is_that_of_the_repository(render: Render) -> None:
    """The chart has it by a symbolic link."""
    documents = read(render(CHART.parent / "examples" / "frontends.yaml"))
    (dashboard,) = [one["data"]["triptych.json"] for one in documents if one["metadata"]["name"].endswith("-dashboard")]
    assert dashboard == (ROOT / "deploy" / "grafana" / "triptych.json").read_text().rstrip("\n")
