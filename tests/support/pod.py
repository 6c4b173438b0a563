"""One pod of rendered manifests as a process in a network namespace, with probes, volumes and its end as a kubelet has
them. Its root file system is read-only, and it has no capabilities; it runs as root, for want of an image."""

import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts.kubernetes_manifests import ROOT
from tests.support.manifests import Document
from tests.support.namespaces import Host, ip_command, run_command

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
_UNCHECKED = ssl.create_default_context()
"""A kubelet doesn't check certificates."""
_UNCHECKED.check_hostname = False
_UNCHECKED.verify_mode = ssl.CERT_NONE


@dataclass(eq=False)
class Pod:
    """One pod, from its start to its end."""

    name: str
    template: Document
    host: Host
    folder: Path
    """Its volumes, its hosts file and its log."""
    secrets: Mapping[str, str]
    """What its Secrets have under each of their keys."""
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
    def scheme(self) -> str:
        """By which its port for clients is asked."""
        return str(self.container["readinessProbe"]["httpGet"].get("scheme", "HTTP")).lower()

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
            if "projected" in volume:
                for source in volume["projected"]["sources"]:
                    for item in source["secret"]["items"]:
                        (path / item["path"]).write_text(self.secrets[item["key"]])
                        (path / item["path"]).chmod(volume["projected"]["defaultMode"])
        for init in self.template["spec"]["initContainers"]:
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
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **variables}
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
        url = f"{self.scheme}://{self.host.address}:{ports[get['port']]}{get['path']}"
        with suppress(httpx.HTTPError):
            reply = httpx.get(url, trust_env=False, timeout=probe.get("timeoutSeconds", 1), verify=_UNCHECKED)
            return reply.status_code < 400
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
