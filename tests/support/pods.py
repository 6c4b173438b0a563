"""Pods as processes: what rendered manifests say, run in network namespaces, with probes, volumes and ends as a kubelet
has them. There is no cluster: no scheduler, no API server, no admission, no real Services.

Each pod has an address of its own on a bridge, and a hosts file for the names that a cluster's name server would know.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from tests.support.manifests import Document
from tests.support.namespaces import Host, Switch, switch
from tests.support.pod import Pod

NETWORK = "10.78.0"


@dataclass(eq=False)
class Pods:
    """All pods of a release, with what controllers do for them."""

    folder: Path
    cache: Path
    switch: Switch
    client: Host
    """Where clients are."""
    stack: ExitStack
    secrets: dict[str, str] = field(default_factory=lambda: {"secret": token_hex(24)})
    """What Secrets have under each of their keys."""
    running: dict[str, Pod] = field(default_factory=dict)
    ended: list[Pod] = field(default_factory=list)
    _services: dict[str, str] = field(default_factory=dict)
    """The headless Services by which pods have names."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10))

    def start(self, name: str, template: Document, service: str = "") -> Pod:
        """Start a pod, which is known by its name in ``service``."""
        number = next(self._numbers)
        host = self.stack.enter_context(self.switch.host(f"p{number}", f"{NETWORK}.{number}"))
        folder = self.folder / f"{name}-{number}"
        folder.mkdir()
        pod = Pod(name, template, host, folder, self.secrets, self.cache)
        self.running[name] = pod
        self._write_hosts(service)
        pod.start()
        return pod

    def _write_hosts(self, service: str) -> None:
        """Tell all pods the names. Files are written in place, since those that run have them mounted."""
        self._services.update({name: service for name in self.running if service and name not in self._services})
        lines = ["127.0.0.1 localhost"]
        for name, pod in self.running.items():
            if name in self._services:
                lines.append(f"{pod.host.address} {name}.{self._services[name]}")
        for pod in self.running.values():
            Path(f"/etc/netns/{pod.host.namespace}/hosts").write_text("\n".join(lines) + "\n")

    def of(self, component: str) -> list[Pod]:
        """The pods of a component that aren't terminating."""
        key = "app.kubernetes.io/component"
        everything = list(self.running.values())
        return [p for p in everything if p.template["metadata"]["labels"][key] == component and p.terminating is None]

    def endpoints(self) -> list[str]:
        """URLs of the frontends that a Service would choose among."""
        pods = [pod for pod in list(self.running.values()) if pod.container["name"] == "frontend"]
        return [f"{pod.scheme}://{pod.host.address}:8000" for pod in pods if pod.receives]

    def wait_until_ready(self, *names: str, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while waiting := [name for name in names or list(self.running) if not self.running[name].ready]:
            logs = {name: self.running[name].log[-1500:] for name in waiting}
            assert time.monotonic() < deadline, "\n".join(f"{name} isn't ready:\n{log}" for name, log in logs.items())
            time.sleep(0.1)

    def delete(self, name: str) -> Pod:
        pod = self.running[name]
        pod.delete()
        self.ended.append(self.running.pop(name))
        return pod

    def apply(self, documents: list[Document]) -> None:
        """Bring about what the manifests say, one workload after the other, each pod as soon as the last is ready."""
        for one in documents:
            spec = one.get("spec", {})
            if one["kind"] == "StatefulSet":
                self._apply_stateful(one["metadata"]["name"], spec)
        for one in documents:
            if one["kind"] == "Deployment":
                self._apply_deployment(one["metadata"]["name"], one["spec"])

    def _apply_stateful(self, name: str, spec: Mapping[str, Any]) -> None:
        wanted = [f"{name}-{number}" for number in range(spec["replicas"])]
        for pod in reversed(wanted):
            if pod in self.running and self.running[pod].template != spec["template"]:
                self.delete(pod)
                self.start(pod, spec["template"], spec["serviceName"])
                self.wait_until_ready(pod)
            elif pod not in self.running:
                self.start(pod, spec["template"], spec["serviceName"])

    def _apply_deployment(self, name: str, spec: Mapping[str, Any]) -> None:
        old = [pod for pod in self.running if pod.startswith(f"{name}-") and self._component(pod) == self._label(spec)]
        current = [pod for pod in old if self.running[pod].template == spec["template"]]
        stale = [pod for pod in old if pod not in current]
        for _ in range(spec["replicas"] - len(current)):
            new = f"{name}-{token_hex(3)}"
            self.start(new, spec["template"])
            if stale:
                self.wait_until_ready(new)
                self.delete(stale.pop())
        for pod in [*stale, *current[spec["replicas"] :]]:
            self.delete(pod)

    def _component(self, pod: str) -> str:
        return str(self.running[pod].template["metadata"]["labels"]["app.kubernetes.io/component"])

    @staticmethod
    def _label(spec: Mapping[str, Any]) -> str:
        return str(spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"])

    def close(self) -> None:
        for pod in list(self.running.values()):
            pod.kill()


@contextmanager
def pods(folder: Path, cache: Path) -> Iterator[Pods]:
    """A network for pods. Skips the test where namespaces can't be made."""
    with ExitStack() as stack:
        joined = stack.enter_context(switch())
        made = Pods(folder, cache, joined, stack.enter_context(joined.host("client", f"{NETWORK}.2")), stack)
        try:
            yield made
        finally:
            made.close()
