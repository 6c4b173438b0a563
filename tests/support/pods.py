"""Pods as processes: what rendered manifests say, run in network namespaces, with probes, volumes and ends as a kubelet
has them. There is no cluster: no scheduler, no API server, no admission, no real Services.

Each pod has an address of its own on a bridge, and a hosts file for the names that a cluster's name server would know.
"""

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from tests.support.manifests import Document
from tests.support.namespaces import Host, Switch, ip_command, run_command, switch
from tests.support.network_policies import NFT, enforce
from tests.support.pod import Pod

NETWORK = "10.78.0"
CONNECT_SECONDS = 1.0
"""How long ports are tried."""
ESTABLISHED = 1
"""The state of a connection, in the first byte of TCP_INFO."""
T = TypeVar("T")


@dataclass(eq=False)
class Pods:
    """All pods of a release, with what controllers do for them."""

    folder: Path
    claims: dict[str, Path]
    """Folders of volumes that pods share, by the volumes' names."""
    switch: Switch
    client: Host
    """Where clients are."""
    stack: ExitStack
    secrets: dict[str, str] = field(default_factory=lambda: {"secret": token_hex(24)})
    """What Secrets have under each of their keys."""
    policies: list[Document] = field(default_factory=list)
    """Network policies, which are enforced where nftables are installed."""
    running: dict[str, Pod] = field(default_factory=dict)
    ended: list[Pod] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10))

    def start(self, name: str, template: Document, *names: str) -> Pod:
        """Start a pod, which others know by these names."""
        number = next(self._numbers)
        host = self.stack.enter_context(self.switch.host(f"p{number}", f"{NETWORK}.{number}"))
        # nothing is behind it, but programs find their own address by it
        run_command([ip_command(), "-n", host.namespace, "route", "add", "default", "dev", "eth0"])
        # a name server that knows nothing says so at once
        Path(f"/etc/netns/{host.namespace}/resolv.conf").write_text("nameserver 127.0.0.1\n")
        folder = self.folder / f"{name}-{number}"
        folder.mkdir()
        pod = Pod(name, template, host, folder, self.secrets, self.claims, names)
        self.running[name] = pod
        self._tell()
        try:
            pod.start()
        except BaseException:
            del self.running[name]  # nothing of it runs
            raise
        return pod

    def _tell(self) -> None:
        """Tell all pods the names, and whom they may reach. Files are written in place, since those that run have them
        mounted."""
        pods = list(self.running.values())
        known = [f"{pod.host.address} {name}" for pod in pods for name in pod.names]
        for pod in pods:
            lines = ["127.0.0.1 localhost", f"{pod.host.address} {pod.name}", *known]
            Path(f"/etc/netns/{pod.host.namespace}/hosts").write_text("\n".join(lines) + "\n")
        if NFT:
            enforce(self.policies, pods)

    def of(self, component: str) -> list[Pod]:
        """The pods of a component that aren't terminating."""
        key = "app.kubernetes.io/component"
        everything = list(self.running.values())
        return [p for p in everything if p.template["metadata"]["labels"][key] == component and p.terminating is None]

    def endpoints(self) -> list[str]:
        """URLs of the frontends that a Service would choose among."""
        pods = [pod for pod in list(self.running.values()) if "http" in pod.ports]
        return [f"{pod.scheme}://{pod.host.address}:{pod.ports['http']}" for pod in pods if pod.receives]

    def reached(self, source: Host) -> dict[str, set[int]]:
        """By pod, the ports at which it listens for others and takes connections from there."""
        return {name: on(source, partial(_reached, pod.host)) for name, pod in self.running.items()}

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
        self.policies = [one for one in documents if one["kind"] == "NetworkPolicy"]
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
                self.start(pod, spec["template"], f"{pod}.{spec['serviceName']}")
                self.wait_until_ready(pod)
            elif pod not in self.running:
                self.start(pod, spec["template"], f"{pod}.{spec['serviceName']}")

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


def on(host: Host, work: Callable[[], T]) -> T:
    """Do it on that host: the sockets that it opens are the host's."""
    with ThreadPoolExecutor(1, initializer=host.enter) as there:
        return there.submit(work).result()


def _reached(host: Host) -> set[int]:
    listening = run_command([ip_command(), "netns", "exec", host.namespace, "ss", "--no-header", "-ltn"])
    places = {line.split()[3].rpartition(":")[::2] for line in listening.splitlines()}
    tried = {int(port): socket.socket() for address, port in places if not address.startswith(("127.", "[::1"))}
    with ExitStack() as stack:
        for port, one in tried.items():
            stack.enter_context(one)
            one.setblocking(False)
            one.connect_ex((host.address, port))
        time.sleep(CONNECT_SECONDS)
        states = {port: one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for port, one in tried.items()}
        return {port for port, state in states.items() if state == ESTABLISHED}


@contextmanager
def pods(folder: Path, cache: Path) -> Iterator[Pods]:
    """A network for pods. Skips the test where namespaces can't be made."""
    with ExitStack() as stack:
        joined = stack.enter_context(switch())
        client = stack.enter_context(joined.host("client", f"{NETWORK}.2"))
        made = Pods(folder, {"cache": cache}, joined, client, stack)
        try:
            yield made
        finally:
            made.close()
