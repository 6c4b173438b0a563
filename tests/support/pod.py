"""One pod of rendered manifests as processes in namespaces of their own, with probes, volumes, hooks and its end as a
kubelet has them. Its root file system is read-only, and it has no capabilities. It runs as the manifests' user, who has
no name and no home. For want of an image, its files are the machine's."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import httpx
import psutil

from scripts.kubernetes_manifests import ROOT
from tests.support.manifests import Document, amount
from tests.support.namespaces import Host, run_command

SPEED = 5.0
"""How much faster probes are repeated than the manifests say."""
ENDPOINT_DELAY = 1.0
"""Seconds after which clients learn that a pod is terminating."""
VOLUMES = "/mnt"
"""Where a pod's volumes are: mount points can't be made in the root folder, which is the machine's."""
INIT_SECONDS = 120.0
"""How long an init container may take."""
KERNELS = f"{VOLUMES}/kernels"
"""The cache folder of processes that are given none: compiled kernels, which an image has."""
_PROGRAMS = (ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix))
"""What an image would have, which may be where a pod's user can't look, or where a pod has a volume."""
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
    claims: Mapping[str, Path]
    """Folders of volumes that pods share, by the volumes' names; that of compiled kernels is the cache."""
    names: Sequence[str] = ()
    """Those by which a cluster's name server knows it."""
    process: subprocess.Popen[bytes] = field(init=False)
    """What waits for the first process of the pod, and ends as that one does."""
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
        return str(self.container["readinessProbe"].get("httpGet", {}).get("scheme", "HTTP")).lower()

    @property
    def ports(self) -> Mapping[str, int]:
        return {one["name"]: one["containerPort"] for one in self.container["ports"]}

    @property
    def pid(self) -> int:
        """The first process of the container, as the machine sees it."""
        (first,) = psutil.Process(self.process.pid).children()
        return int(first.pid)

    @property
    def receives(self) -> bool:
        """Whether a Service sends it connections."""
        return self.ready and (self.terminating is None or time.monotonic() < self.terminating + ENDPOINT_DELAY)

    def start(self) -> None:
        (self.folder / "volumes").mkdir()
        self.path(Path(KERNELS).name).symlink_to(self.claims["cache"])
        for volume in self.template["spec"]["volumes"]:
            path = self.path(volume["name"])
            if volume["name"] in self.claims:
                path.symlink_to(self.claims[volume["name"]])
                continue
            path.mkdir()
            path.chmod(0o777)
            sources = volume["projected"]["sources"] if "projected" in volume else [volume]
            mode = volume.get("projected", volume.get("secret", {})).get("defaultMode", 0o644)
            for item in [item for source in sources for item in source.get("secret", {}).get("items", ())]:
                (path / item["path"]).write_text(self.secrets[item["key"]])
                if (group := self.template["spec"]["securityContext"].get("fsGroup")) is not None:
                    os.chown(path / item["path"], 0, group)
                    mode |= 0o440  # as the kubelet does at each mount
                (path / item["path"]).chmod(mode)
        for init in self.template["spec"].get("initContainers", ()):
            run_command(self._words(init), timeout=INIT_SECONDS)
        self._run()
        threading.Thread(target=self._watch, daemon=True).start()

    def path(self, volume: str) -> Path:
        return self.folder / "volumes" / volume

    def _run(self) -> None:
        with (self.folder / "log").open("ab") as log:
            words = self._words(self.container)
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        """Send the container's first process a signal."""
        psutil.Process(self.pid).send_signal(number)

    def exec(self, *command: str, timeout: float = 30.0) -> str:
        """What a command writes that is run in the container. Raises CalledProcessError when it fails."""
        there = ["nsenter", "--target", str(self.pid), "--net", "--pid", "--ipc", "--uts", "--mount"]
        return run_command([*there, *self._within(self.container, command)], timeout=timeout)

    def _words(self, container: Document) -> list[str]:
        """The command of a container, in new namespaces."""
        command = [*container["command"], *container.get("args", ())]
        return [*self.host.prefix, "sh", "-c", self._set_up(), "sh", *self._within(container, command)]

    def _set_up(self) -> str:
        """What is done before a container's command, by root."""
        hidden = {p for path in _PROGRAMS for p in path.parents if not p.stat().st_mode & 0o001}
        shared: Document = next(
            (one for one in self.template["spec"]["volumes"] if one["name"] == "shm"), {"emptyDir": {}}
        )
        lines = ["set -e", f"mount -t tmpfs -o mode=755 tmpfs {VOLUMES}", f"mkdir {VOLUMES}/.programs"]
        for number, path in enumerate(_PROGRAMS):
            kept = f"{VOLUMES}/.programs/{number}"
            lines += [f"mkdir {kept}", f"mount --bind {quote(str(path))} {kept}"]
        for path in (self.folder / "volumes").iterdir():
            lines += [f"mkdir {VOLUMES}/{path.name}", f"mount --bind {quote(str(path))} {VOLUMES}/{path.name}"]
        size = amount(shared["emptyDir"].get("sizeLimit", "64Mi"))
        lines += [f"mount -t tmpfs -o size={size:.0f} tmpfs /dev/shm", f"mount --bind {VOLUMES}/tmp /tmp"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {quote(str(path))}" for path in sorted(hidden)]
        for number, path in enumerate(_PROGRAMS):
            there = quote(str(path))
            kept = f"{VOLUMES}/.programs/{number}"
            # an earlier container may have left an empty folder in a volume
            lines.append(f"[ {there} -ef {kept} ] || {{ mkdir -p {there}; mount --bind {kept} {there}; }}")
        lines += [f"echo {quote(self.name)} > /proc/sys/kernel/hostname", "mount -o remount,bind,ro /"]
        return "\n".join([*lines, 'exec "$@"'])

    def _within(self, container: Document, command: Sequence[str]) -> list[str]:
        """A command in the pod's namespaces, with a container's rights and variables."""
        known = {"status.podIP": self.host.address, "metadata.name": self.name}
        variables = {}
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            variables[one["name"]] = (
                self.secrets[source["secretKeyRef"]["key"]]
                if "secretKeyRef" in source
                else known[source["fieldRef"]["fieldPath"]]
                if source
                else one["value"]
            )
        for name, value in variables.items():
            command = [word.replace(f"$({name})", value) for word in command]
        for mount in container["volumeMounts"]:
            where, there = mount["mountPath"], f"{VOLUMES}/{mount['name']}"
            if where not in ("/tmp", "/dev/shm"):
                command = [word.replace(f"{where}/", f"{there}/") for word in command]
                variables = {
                    name: value.replace(where, there, 1) if f"{value}/".startswith(f"{where}/") else value
                    for name, value in variables.items()
                }
        path = f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": KERNELS, **variables}
        given = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        user = self.template["spec"]["securityContext"]
        groups = f"--groups={user['fsGroup']}" if "fsGroup" in user else "--clear-groups"
        rights = [f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", groups]
        rights += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        rights += ["--pdeathsig=KILL"]  # which another user doesn't inherit
        return ["setpriv", *rights, *given, *command]

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
        seconds = probe.get("timeoutSeconds", 1)
        if "tcpSocket" in probe:
            address = (self.host.address, self.ports[probe["tcpSocket"]["port"]])
            with suppress(OSError), socket.create_connection(address, seconds):
                return True
            return False
        get = probe["httpGet"]
        url = f"{self.scheme}://{self.host.address}:{self.ports[get['port']]}{get['path']}"
        with suppress(httpx.HTTPError):
            return httpx.get(url, trust_env=False, timeout=seconds, verify=_UNCHECKED).status_code < 400
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
        end = self.terminating + self.template["spec"].get("terminationGracePeriodSeconds", 30)
        hook = self.container.get("lifecycle", {}).get("preStop", {})
        time.sleep(hook.get("sleep", {}).get("seconds", 0))
        if "exec" in hook:
            self.exec(*hook["exec"]["command"], timeout=end - time.monotonic())
        with suppress(psutil.NoSuchProcess, ValueError):  # the hook may have ended it
            self.signal(signal.SIGTERM)
        try:
            self.exit_codes.append(self.process.wait(end - time.monotonic()))
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
