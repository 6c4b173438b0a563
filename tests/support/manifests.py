"""Kubernetes manifests: what in them must fit together, and must fit the program, which no schema says."""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from scripts.kubernetes_manifests import HELM, ROOT
from triptych.cli import make_parser

Document = Mapping[str, Any]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PORTS = {"http": "port", "control": "control_port", "health": "health_port"}
"""Names of containers' ports, and the flags that give their numbers."""
KUBERNETES = [f"1.{minor}" for minor in range(31, 38)]
"""The versions whose schemas are checked."""
METRIC = re.compile(r"triptych:\w+")


def read(text: str) -> list[Document]:
    return [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one]


def schema_errors(manifests: str, *versions: str) -> list[str]:
    """What the strict schemas refuse. Needs what ``scripts/setup-deploy`` installs."""
    kinds = ROOT / "tests" / "deploy" / "custom_kinds.json"
    command = [str(HELM.with_name("python")), "-m", "scripts.validate_manifests", str(kinds), *versions]
    result = subprocess.run(
        command, input=manifests, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
    assert result.returncode in (0, 1) and not result.stderr, result.stderr
    return result.stdout.splitlines()


@dataclass(frozen=True)
class Workload:
    """What starts pods, with the template of those."""

    name: str
    kind: str
    template: Document
    selector: Mapping[str, str]
    """Labels by which it finds its pods; empty where its controller sets labels of its own."""
    replicas: int | None

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def pod(self) -> Document:
        return self.template["spec"]

    @property
    def container(self) -> Document:
        (container,) = self.pod["containers"]
        return container

    @property
    def is_known(self) -> bool:
        """Whether the program knows the container's arguments."""
        try:
            return self.settings is not None
        except SystemExit:
            return False

    @cached_property
    def settings(self) -> Any:
        """What the program reads from the container's arguments. Raises SystemExit when it can't."""
        return _parser().parse_args([word.replace("$(POD_IP)", "10.0.0.1") for word in self.container["args"]])

    def port(self, name: str) -> int | None:
        return next((one["containerPort"] for one in self.container["ports"] if one["name"] == name), None)


@cache
def _parser() -> Any:
    return make_parser(["serve"])


def workloads(documents: Sequence[Document]) -> list[Workload]:
    found = []
    for one in documents:
        name, kind, spec = one["metadata"]["name"], one["kind"], one.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            selector = spec["selector"]["matchLabels"]
            found.append(Workload(name, kind, spec["template"], selector, spec.get("replicas")))
        elif kind == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]["workerTemplate"]
            found.append(Workload(name, kind, template, {}, spec.get("replicas")))
        elif kind == "DisaggregatedSet":
            for role in spec["roles"]:
                template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
                found.append(Workload(f"{name}-{role['name']}", kind, template, {}, role["spec"].get("replicas")))
    return found


def problems(documents: Sequence[Document], given: Sequence[str] = ()) -> list[str]:
    """Return what doesn't fit. ``given`` are names of Secrets and claims that others make."""
    pods = workloads(documents)
    found = [*_selectors(documents, pods)]
    for workload in pods:
        if not workload.is_known:
            found.append(f"{workload.name}: serve does not know these arguments: {workload.container['args']}")
            continue
        for check in (_ports, _probes, _grace, _joins, _volumes, _rights, _sizes):
            found += [f"{workload.name}: {problem}" for problem in check(workload, documents, given)]
    return [*found, *_scaling(documents), *_metrics(documents)]


def _named(documents: Sequence[Document], kind: str) -> dict[str, Document]:
    return {one["metadata"]["name"]: one for one in documents if one["kind"] == kind}


def _selected(pods: Sequence[Workload], labels: Mapping[str, str]) -> list[Workload]:
    return [one for one in pods if labels.items() <= one.labels.items()]


def _selectors(documents: Sequence[Document], pods: Sequence[Workload]) -> Iterator[str]:
    for workload in pods:
        if not workload.selector.items() <= workload.labels.items():
            yield f"{workload.kind}/{workload.name} does not select its own pods"
        if workload.selector and len(_selected(pods, workload.selector)) > 1:
            yield f"{workload.kind}/{workload.name} selects another workload's pods"
    for one in documents:
        if (labels := _selector(one)) is not None:
            selected = _selected(pods, labels)
            if not selected:
                yield f"{one['kind']}/{one['metadata']['name']} selects nothing"
            yield from _ports_of(one, selected)


def _selector(one: Document) -> Mapping[str, str] | None:
    """The labels by which an object that starts no pods finds some."""
    spec = one.get("spec", {})
    if one["kind"] == "Service":
        return spec["selector"]
    if one["kind"] == "NetworkPolicy":
        return spec["podSelector"]["matchLabels"]
    if one["kind"] in ("PodDisruptionBudget", "PodMonitor", "InferencePool"):
        return spec["selector"]["matchLabels"]
    return None


def _ports_of(one: Document, selected: Sequence[Workload]) -> Iterator[str]:
    spec, name = one["spec"], f"{one['kind']}/{one['metadata']['name']}"
    wanted = [port["targetPort"] for port in spec.get("ports", ())]
    wanted += [port["port"] for port in spec.get("podMetricsEndpoints", ())]
    for port in wanted:
        if any(workload.port(port) is None for workload in selected):
            yield f"{name}: no port {port} in its pods"
    for endpoint in spec.get("podMetricsEndpoints", ()):
        known = [workload for workload in selected if workload.is_known]
        if any((endpoint.get("scheme") == "https") != bool(it.settings.ssl_certfile) for it in known):
            yield f"{name}: asks for metrics by the wrong scheme"
        if any(("authorization" in endpoint) != bool(it.settings.api_key_file) for it in known):
            yield f"{name}: metrics and an API key do not fit"
    for port in spec.get("targetPorts", ()):
        if any(workload.port("http") != port["number"] for workload in selected):
            yield f"{name}: pods do not serve HTTP at {port['number']}"


def _ports(workload: Workload, _: object, __: object) -> Iterator[str]:
    for port in workload.container["ports"]:
        if getattr(workload.settings, PORTS[port["name"]]) not in (port["containerPort"], str(port["containerPort"])):
            yield f"port {port['name']} is not {port['containerPort']} in the arguments"


def _probes(workload: Workload, _: object, __: object) -> Iterator[str]:
    for name in PROBES:
        if name not in workload.container:
            yield f"no {name}"
            continue
        get = workload.container[name]["httpGet"]
        if get["path"] not in ("/health", "/ready"):
            yield f"{name} asks for {get['path']}"
        if workload.port(get["port"]) is None or get["port"] == "control":
            yield f"{name} asks at port {get['port']}"
        scheme = "HTTPS" if workload.settings.ssl_certfile else "HTTP"
        if get.get("scheme", "HTTP") != scheme:
            yield f"{name} does not ask by {scheme}"
    startup = workload.container.get("startupProbe", {})
    patience = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
    if workload.settings.role != "frontend" and patience <= float(workload.settings.start_timeout):
        yield "the startup probe gives up before the process does"


def _grace(workload: Workload, _: object, __: object) -> Iterator[str]:
    before = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if workload.pod["terminationGracePeriodSeconds"] <= before + float(workload.settings.drain_timeout):
        yield "killed while it drains"


def _joins(workload: Workload, documents: Sequence[Document], _: object) -> Iterator[str]:
    frontends = {one.name: one for one in workloads(documents) if one.kind == "StatefulSet"}
    if workload.settings.role == "frontend":
        return
    expected = set()
    for name, one in frontends.items():
        expected |= {f"{name}-{number}" for number in range(one.replicas or 0)}
    joined = set()
    for address in workload.settings.join.split(","):
        host, _, port = address.rpartition(":")
        pod, _, service = host.partition(".")
        found = _named(documents, "Service").get(service)
        frontend = frontends.get(pod.rpartition("-")[0])
        if found is None or frontend is None or found["spec"].get("clusterIP") != "None":
            yield f"joins {address}, which is no frontend's name"
        elif int(port) != frontend.port("control"):
            yield f"joins {address}, which is not the control port"
        joined.add(pod)
    if joined != expected:
        yield f"joins {sorted(joined)}, but the frontends are {sorted(expected)}"


def _volumes(workload: Workload, documents: Sequence[Document], given: Sequence[str]) -> Iterator[str]:
    volumes = {one["name"]: one for one in workload.pod["volumes"]}
    mounted = {mount["name"] for container in workload.pod["containers"] for mount in container["volumeMounts"]}
    yield from (f"no volume {name}" for name in mounted - volumes.keys())
    yield from (f"volume {name} is not mounted" for name in volumes.keys() - mounted)
    known = {*given, *_named(documents, "Secret")}
    for volume in volumes.values():
        names = [source["secret"]["name"] for source in volume.get("projected", {}).get("sources", ())]
        if claim := volume.get("persistentVolumeClaim"):
            names.append(claim["claimName"])
        yield from (f"there is no {name}" for name in names if name not in known)
    where = [mount["mountPath"] for mount in workload.container["volumeMounts"]]
    settings = workload.settings
    files = [settings.cluster_secret_file, settings.api_key_file, settings.ssl_certfile, settings.ssl_keyfile]
    for path in [*files, *([workload.settings.model] if workload.settings.model != "demo" else [])]:
        if path and not any(Path(path).is_relative_to(mount) for mount in where):
            yield f"nothing is mounted for {path}"


def _rights(workload: Workload, documents: Sequence[Document], _: object) -> Iterator[str]:
    pod = workload.pod
    security = pod["securityContext"]
    if not (security["runAsNonRoot"] and security["runAsUser"] and security["seccompProfile"]["type"]):
        yield "runs as root, or without seccomp"
    if pod["automountServiceAccountToken"] is not False or pod["enableServiceLinks"] is not False:
        yield "has a token, or variables of other services"
    if pod["serviceAccountName"] not in _named(documents, "ServiceAccount"):
        yield f"there is no service account {pod['serviceAccountName']}"
    for container in pod["containers"]:
        own = container["securityContext"]
        if (
            not own["readOnlyRootFilesystem"]
            or own["allowPrivilegeEscalation"]
            or own["capabilities"]["drop"] != ["ALL"]
        ):
            yield f"{container['name']} has more rights than it needs"


_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def amount(text: str | float) -> float:
    """A quantity as a number, such as bytes for ``1Gi``."""
    match = re.fullmatch(r"([0-9.]+)(\D*)", str(text))
    assert match is not None, text
    return float(match[1]) * _UNITS.get(match[2], 1)


def _sizes(workload: Workload, _: object, __: object) -> Iterator[str]:
    resources = workload.container["resources"]
    limits = resources.get("limits", {})
    for name, asked in resources.get("requests", {}).items():
        if name in limits and amount(asked) > amount(limits[name]):
            yield f"requests more {name} than its limit"
    kept = str(workload.settings.kv_cache_memory or "").removesuffix("B")
    has_amount = kept and not kept.endswith("%") and "memory" in limits and not _has_accelerator(limits)
    if has_amount and amount(kept) >= amount(limits["memory"]):
        yield "the KV cache is larger than the memory"
    cores = resources.get("requests", {}).get("cpu")
    if workload.settings.threads and cores and int(workload.settings.threads) > max(1.0, amount(cores)):
        yield "more threads than cores"


def _has_accelerator(limits: Mapping[str, Any]) -> bool:
    return bool(limits.keys() - {"cpu", "memory", "ephemeral-storage"})


def _scaling(documents: Sequence[Document]) -> Iterator[str]:
    known = {(one["apiVersion"], one["kind"], one["metadata"]["name"]): one for one in documents}
    for name, one in _named(documents, "ScaledObject").items():
        target = one["spec"]["scaleTargetRef"]
        scaled = known.get((target["apiVersion"], target["kind"], target["name"]))
        if scaled is None:
            yield f"ScaledObject/{name} scales nothing"
        elif "replicas" in scaled["spec"]:
            yield f"ScaledObject/{name}: the number of replicas is set, too"
        if one["spec"]["minReplicaCount"] > one["spec"]["maxReplicaCount"]:
            yield f"ScaledObject/{name}: the minimum is larger than the maximum"


def _metrics(documents: Sequence[Document]) -> Iterator[str]:
    exported = set(METRIC.findall((ROOT / "docs" / "observability.md").read_text()))
    for name, one in _named(documents, "ScaledObject").items():
        for trigger in one["spec"]["triggers"]:
            for metric in set(METRIC.findall(trigger["metadata"]["query"])) - exported:
                yield f"ScaledObject/{name}: there is no metric {metric}"
