"""What KubeRay's operator makes of a RayCluster: pods with the commands, variables and init containers of release 1.6
(``ray-operator/controllers/ray/common/pod.go``), so far as our manifests use them. No operator runs."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tests.support.manifests import Document, amount

HEAD_PORT = 6379
BASH = ["/bin/bash", "-c", "--"]
_VALUED_FLAGS = ("log-color", "include-dashboard", "include-log-monitor")
"""Those that are given their value even if that is true or false."""


def head_names(cluster: Document, namespace: str) -> tuple[str, str]:
    """The names of the head's Service, the second one with its domain."""
    service = f"{cluster['metadata']['name']}-head-svc"
    return service, f"{service}.{namespace}.svc.cluster.local"


def head_of(cluster: Document) -> dict[str, Any]:
    """The template of the head's pod."""
    group = cluster["spec"]["headGroupSpec"]
    address = f"127.0.0.1:{HEAD_PORT}"
    return _pod(cluster, group, "--head ", {"dashboard-host": "0.0.0.0"}, {"RAY_ADDRESS": address})


def workers_of(cluster: Document, namespace: str) -> dict[str, dict[str, Any]]:
    """The templates of the workers' pods, by pods' names."""
    made: dict[str, dict[str, Any]] = {}
    for group in cluster["spec"]["workerGroupSpecs"]:
        short, long = head_names(cluster, namespace)
        address = f"{long}:{HEAD_PORT}"
        names = {"FQ_RAY_IP": long, "RAY_IP": short}
        pod = _pod(cluster, group, "", {"address": address}, names | {"RAY_ADDRESS": address})
        (container,) = pod["spec"]["containers"]
        wait = f"until ray health-check --address {address}; do sleep 5; done"
        pod["spec"]["initContainers"] = [{**container, "name": "wait-gcs-ready", "command": BASH, "args": [wait]}]
        made |= {f"{group['groupName']}-{number}": pod for number in range(group["replicas"])}
    return made


def _pod(
    cluster: Document, group: Document, flags: str, added: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, Any]:
    pod: dict[str, Any] = deepcopy(group["template"])
    (container,) = pod["spec"]["containers"]
    memory = amount(container["resources"]["limits"]["memory"])
    given = {
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        "block": "true",
        "memory": f"{memory:.0f}",
        **added,
        **group["rayStartParams"],
    }
    start = f"ray start {flags}" + " ".join(_flag(name, given[name]) for name in sorted(given))
    container["command"], container["args"] = BASH, [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"]
    own = {
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_PORT": str(HEAD_PORT),
        "KUBERAY_GEN_RAY_START_CMD": start,
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
        **variables,
    }
    container["env"] += [{"name": name, "value": value} for name, value in own.items()]
    container["env"].append(
        {"name": "RAY_CLOUD_INSTANCE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    )
    if cluster["spec"]["authOptions"]["mode"] == "token":
        secret = {"secretKeyRef": {"name": cluster["metadata"]["name"], "key": "auth_token"}}
        container["env"] += [
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": secret},
        ]
    return pod


def _flag(name: str, value: str) -> str:
    if value in ("true", "false") and name not in _VALUED_FLAGS:
        return f"--{name}" if value == "true" else ""
    return f"--{name}={value}"
