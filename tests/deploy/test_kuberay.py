"""The manifests for KubeRay: against strict schemas, and against the programs that their pods run."""

import json
import shlex
from typing import Any

import pytest

from scripts.kubernetes_manifests import ROOT
from tests.support.manifests import KUBERNETES, Document, read, schema_errors
from triptych.cli import make_parser
from triptych.cli.ray_flags import ray_address, ray_resources
from triptych.topology import Role, Topology

pytestmark = pytest.mark.slow

MANIFESTS = (ROOT / "deploy" / "kuberay" / "demo.yaml").read_text()


@pytest.fixture(scope="module")
def cluster() -> Document:
    (found,) = [one for one in read(MANIFESTS) if one["kind"] == "RayCluster"]
    return found


@pytest.fixture(scope="module")
def serve() -> Document:
    """The specification of the pod that places the instances."""
    (found,) = [one["spec"]["template"]["spec"] for one in read(MANIFESTS) if one["kind"] == "Deployment"]
    return found


@pytest.mark.usefixtures("helm")
def test_all_versions_of_kubernetes_take_them() -> None:
    assert schema_errors(MANIFESTS, *KUBERNETES) == []


MISTAKES = [
    ("minReplicas: 3", "minimum: 3", "'minimum' was unexpected"),
    ('num-cpus: "0"', "num-cpus: 0", "0 is not of type 'string'"),
    ("mode: token}", "mode: tokens}", "'tokens' is not one of"),
    ("containerPort: 6379", "port: 6379", "'containerPort' is a required property"),
]


@pytest.mark.parametrize(("right", "wrong", "problem"), MISTAKES)
@pytest.mark.usefixtures("helm")
def test_a_mistake_is_found(right: str, wrong: str, problem: str) -> None:
    assert MANIFESTS.count(right) == 1
    assert problem in "\n".join(schema_errors(MANIFESTS.replace(right, wrong), "1.37"))


def container(pod: Document) -> Any:
    (found,) = pod["containers"]
    return found


def test_ray_knows_the_parameters_of_its_nodes(cluster: Document, serve: Document) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    commands = [[f"--{name}={value}" for name, value in one["rayStartParams"].items()] for one in groups]
    ray_start, _ = commands_of(serve)
    for words in [*commands, ray_start]:
        # as KubeRay has it: what is true is a flag
        given = [word.removesuffix("=true") for word in words]
        scripts.start.make_context("start", given)


def commands_of(serve: Document) -> tuple[list[str], list[str]]:
    """The arguments of ``ray start`` and of ``triptych``."""
    bash, flag = container(serve)["command"]
    assert (bash, flag) == ("bash", "-c")
    first, second = container(serve)["args"][0].split("&&")
    ray, start, *node = shlex.split(first)
    replaced, triptych, *words = shlex.split(second)
    assert (ray, start, replaced, triptych) == ("ray", "start", "exec", "triptych")
    return node, words


def test_the_service_fits_the_cluster(cluster: Document, serve: Document) -> None:
    node, words = commands_of(serve)
    name = cluster["metadata"]["name"]
    assert f"--address={name}-head-svc:6379" in node
    (token,) = [one["secret"] for one in serve["volumes"] if one["name"] == "token"]
    assert (token["secretName"], [one["key"] for one in token["items"]]) == (name, ["auth_token"])
    settings = make_parser(["serve"]).parse_args(words)
    assert ray_address(settings.on) == "auto"
    assert serve["terminationGracePeriodSeconds"] > 2 * float(settings.drain_timeout)
    assert str(container(serve)["ports"][0]["containerPort"]) == str(settings.port)
    # each instance has a node, and each kind of node one to spare
    groups = {one["groupName"]: one for one in cluster["spec"]["workerGroupSpecs"]}
    roles = Topology.parse(settings.topology).roles
    assert groups["encode"]["replicas"] > roles.count(Role.E)
    assert groups["decode"]["replicas"] > len(roles) - roles.count(Role.E)
    # no instance takes a node of the other kind
    asked = ray_resources(settings.ray_resources)
    assert asked.keys() == set(roles)
    for role, group in ((Role.E, "encode"), (Role.PD, "decode")):
        (offered,) = shlex.split(groups[group]["rayStartParams"]["resources"])
        assert asked[role] == json.loads(offered)


def test_all_pods_are_alike(cluster: Document, serve: Document) -> None:
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [serve, *(one["template"]["spec"] for one in groups)]
    for field in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert len({str(pod[field]) for pod in pods}) == 1, field
    for field in ("image", "securityContext"):
        assert len({str(container(pod)[field]) for pod in pods}) == 1, field
