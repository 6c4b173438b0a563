"""Pods as processes: what rendered manifests say, run in network namespaces, with probes, volumes and ends as a kubelet
has them. There is no cluster: no scheduler, no API server, no admission, no real Services.

Each pod has an address of its own on a bridge, and a hosts file for the names that a cluster's name server would know.
Its root file system is read-only, and it has no capabilities; it runs as root, for want of an image.
"""

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.manifests import Document
from tests.support.namespaces import Host, ip_command, run_command

NETWORK = "10.78.0"
SPEED = 5.0
"""How much faster probes are repeated than the manifests say."""
ENDPOINT_DELAY = 1.0
"""Seconds after which clients learn that a pod is terminating."""
VOLUMES = "/mnt"
"""Where a pod's volumes are: mount points can't be made in the root folder, which is the machine's."""
_SET_UP = f"""
set -e
mount -t tmpfs tmpfs {VOLUMES}
for one in "$POD"/volumes/*; do
    mkdir {VOLUMES}/$(basename $one)
    mount --bind $one {VOLUMES}/$(basename $one)
done
mount -t tmpfs tmpfs /dev/shm
mount --bind {VOLUMES}/tmp /tmp
mount -o remount,bind,ro /
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


@dataclass(eq=False)
class Pod:
    """One pod, from its start to its end."""

    name: str
    template: Document
    host: Host
    folder: Path
    """Its volumes, its hosts file and its log."""
    secret: str
    cache: Path
    process: subprocess.Popen[bytes] = field(init=False)
    ready: bool = False
    terminating: float | None = None
    """When its deletion began."""
    restarts: int = 0
    exit_codes: list[int] = field(default_factory=list)
    _started: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def container(self) -> Any:
        (container,) = self.template["spec"]["containers"]
        return container

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def receives(self) -> bool:
        """Whether a Service sends it connections."""
        return self.ready and (self.terminating is None or time.monotonic() < self.terminating + ENDPOINT_DELAY)

    def start(self) -> None:
        for volume in self.template["spec"]["volumes"]:
            path = self.folder / "volumes" / volume["name"]
            if volume["name"] == "cache":
                path.symlink_to(self.cache)  # as a claim that all share
            else:
                path.mkdir(parents=True)
        mounted = self.folder / "volumes" / "mounted" / "secret"
        mounted.write_text(self.secret)
        mounted.chmod(0o444)
        (init,) = self.template["spec"]["initContainers"]
        run_command(self._words(init), timeout=20)
        self._run()
        threading.Thread(target=self._watch, daemon=True).start()

    def path(self, volume: str) -> Path:
        return self.folder / "volumes" / volume

    def _run(self) -> None:
        container = self.container
        words = self._words(container)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _words(self, container: Document) -> list[str]:
        """The command of a container, within the pod."""
        command = [*container["command"], *container.get("args", ())]
        if command[0] == "triptych":
            command[:1] = [sys.executable, "-m", "triptych"]
        known = {"POD_IP": self.host.address, "POD_NAME": self.name}
        variables = {one["name"]: one.get("value", known.get(one["name"], "")) for one in container.get("env", ())}
        for name, value in known.items():
            command = [word.replace(f"$({name})", value) for word in command]
        for mount in container["volumeMounts"]:
            where, volume = mount["mountPath"], mount["name"]
            if where not in ("/tmp", "/dev/shm"):
                command = [word.replace(f"{where}/", f"{VOLUMES}/{volume}/") for word in command]
                variables = {
                    name: f"{VOLUMES}/{volume}" if value == where else value for name, value in variables.items()
                }
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
        given = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), f"POD={self.folder}"]
        return [ip_command(), "netns", "exec", self.host.namespace, *given, "sh", "-c", _SET_UP, "sh", *command]

    # ── probes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Act on the probes' results, and start the container again when it has ended."""
        self.host.enter()  # a kubelet asks from the pod's machine
        failures = 0
        while not self._ended.wait(self._period() / SPEED):
            if self.terminating is not None:
                continue
            if self.process.poll() is not None:
                self._restart()
                failures = 0
                continue
            if not self._started:
                startup = self.container["startupProbe"]
                self._started = self._passes(startup)
                failures = 0 if self._started else failures + 1
                limit = startup.get("failureThreshold", 3) * SPEED  # counted in the manifest's own periods
                if failures >= limit:
                    self._restart()
                    failures = 0
                continue
            self.ready = self._passes(self.container["readinessProbe"])
            alive = self._passes(self.container["livenessProbe"])
            failures = 0 if alive else failures + 1
            if failures >= self.container["livenessProbe"].get("failureThreshold", 3):
                self._restart()
                failures = 0

    def _period(self) -> float:
        name = "readinessProbe" if self._started else "startupProbe"
        return float(self.container[name].get("periodSeconds", 10))

    def _passes(self, probe: Document) -> bool:
        ports = {one["name"]: one["containerPort"] for one in self.container["ports"]}
        get = probe["httpGet"]
        url = f"http://{self.host.address}:{ports[get['port']]}{get['path']}"
        with suppress(httpx.HTTPError):
            return httpx.get(url, trust_env=False, timeout=probe.get("timeoutSeconds", 1)).status_code < 400
        return False

    def _restart(self) -> None:
        self.ready = self._started = False
        if self.process.poll() is None:
            self.process.kill()
        self.exit_codes.append(self.process.wait(10))
        self.restarts += 1
        self._run()

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────

    def delete(self) -> None:
        """End it as a kubelet does: the preStop hook, SIGTERM, and SIGKILL after the grace period."""
        self.terminating = time.monotonic()
        grace = self.template["spec"]["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        time.sleep(hook)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_codes.append(self.process.wait(grace - hook))
        except subprocess.TimeoutExpired:
            self.kill()
        self._end()

    def kill(self) -> None:
        """End it as when its machine is lost."""
        self.terminating = self.terminating or time.monotonic()
        self.ready = False
        self.process.kill()
        self.exit_codes.append(self.process.wait(10))
        self._end()

    def _end(self) -> None:
        self.ready = False
        self._ended.set()


@dataclass(eq=False)
class Pods:
    """All pods of a release, with what controllers do for them."""

    folder: Path
    cache: Path
    names: str
    client: Host
    """Where clients are."""
    stack: ExitStack
    secret: str = field(default_factory=lambda: secrets.token_hex(24))
    running: dict[str, Pod] = field(default_factory=dict)
    ended: list[Pod] = field(default_factory=list)
    _services: dict[str, str] = field(default_factory=dict)
    """The headless Services by which pods have names."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10))

    def start(self, name: str, template: Document, service: str = "") -> Pod:
        """Start a pod, which is known by its name in ``service``."""
        number = next(self._numbers)
        host = self.stack.enter_context(_host(self.names, f"p{number}", f"{NETWORK}.{number}"))
        folder = self.folder / f"{name}-{number}"
        folder.mkdir()
        pod = Pod(name, template, host, folder, self.secret, self.cache)
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
        return [f"http://{pod.host.address}:8000" for pod in pods if pod.receives]

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
            new = f"{name}-{secrets.token_hex(3)}"
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
    names = f"triptych-{secrets.token_hex(3)}"
    with ExitStack() as stack:
        switch = f"{names}-switch"
        try:
            run_command([ip_command(), "netns", "add", switch])
            stack.callback(run_command, [ip_command(), "netns", "del", switch])
            run_command([ip_command(), "-n", switch, "link", "add", "br0", "type", "bridge"])
            run_command([ip_command(), "-n", switch, "link", "set", "br0", "up"])
            client = stack.enter_context(_host(names, "client", f"{NETWORK}.2"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here, which take root: {error.stderr.strip()}")
        made = Pods(folder, cache, names, client, stack)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def _host(names: str, name: str, address: str) -> Iterator[Host]:
    """A namespace on the bridge, with a hosts file of its own."""
    namespace, cable = f"{names}-{name}", f"v{os.urandom(4).hex()}"
    ip = ip_command()
    with ExitStack() as stack:
        run_command([ip, "netns", "add", namespace])
        stack.callback(run_command, [ip, "netns", "del", namespace])
        etc = Path("/etc/netns") / namespace
        etc.mkdir(parents=True)
        stack.callback(shutil.rmtree, etc)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        ends = ["netns", namespace, "type", "veth", "peer", "name", cable, "netns", f"{names}-switch"]
        run_command([ip, "link", "add", "eth0", *ends])
        run_command([ip, "-n", f"{names}-switch", "link", "set", cable, "master", "br0", "up"])
        run_command([ip, "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0"])
        run_command([ip, "-n", namespace, "link", "set", "eth0", "up"])
        run_command([ip, "-n", namespace, "link", "set", "lo", "up"])
        yield Host(namespace, address)
