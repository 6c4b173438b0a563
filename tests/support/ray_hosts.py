"""A Ray cluster whose nodes are hosts: each has a network, processes, shared memory and Ray's folder of its own."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.commands import ROOT
from tests.support.namespaces import Host, Switch, ip_command, switch
from tests.support.ray_cluster import MEMORY

NETWORK = "10.79.0"
HEAD = f"{NETWORK}.10"
PORT = 6379
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""What the documentation has for small, quiet clusters."""
SHORT_HEALTH_CHECKS = HEALTH_CHECKS | {
    "RAY_health_check_period_ms": "250",
    "RAY_health_check_timeout_ms": "500",
}
"""What it has for links that never fail for a moment."""
NICENESS = {"RAY_worker_niceness": "0"}
"""Ray's default is 15, which instances would have, too."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
UP_SECONDS = 150.0
_BOOT = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$RAY_TMPDIR"
sleep infinity &
wait
"""
"""The first process of a host, which takes the exit codes of those whose parents are gone."""


@dataclass(eq=False)
class RayHost:
    """One host, which is on until it is killed."""

    host: Host
    folder: str
    variables: Mapping[str, str]
    resources: Mapping[str, float]
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _outer: subprocess.Popen[bytes] = field(init=False)
    _first: int = field(init=False)

    def boot(self) -> None:
        """Start the host, without Ray."""
        apart = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--mount-proc", "--fork", "--kill-child"]
        with_test = ["setpriv", "--pdeathsig", "KILL"]
        words = [*with_test, ip_command(), "netns", "exec", self.host.namespace, *apart, "sh", "-c", _BOOT]
        self._outer = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._environment
        )
        deadline = time.monotonic() + UP_SECONDS
        while not (inner := [one for one in psutil.Process(self._outer.pid).children() if one.children()]):
            assert self._outer.poll() is None, "the host can't be started"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self._first = inner[0].pid

    @property
    def _environment(self) -> dict[str, str]:
        own = {"RAY_TMPDIR": self.folder, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        return (
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HF_HUB_OFFLINE": "1"}
            | own
            | TOKEN
            | NICENESS
            | dict(self.variables)
        )

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs there."""
        given = [f"{name}={value}" for name, value in self._environment.items()]
        return ["nsenter", "--target", str(self._first), "--net", "--pid", "--ipc", "--uts", "--mount", "env", *given]

    def start_ray(self) -> None:
        """Start its node, which is the cluster's head if the host has the head's address."""
        resources = dict(self.resources)
        words = ["--num-cpus", f"{resources.pop('CPU', 0):g}", "--object-store-memory", str(MEMORY), "--block"]
        words += ["--node-ip-address", self.host.address, "--disable-usage-stats", "--include-log-monitor", "false"]
        if resources:
            words += ["--resources", "{" + ",".join(f'"{name}": {amount}' for name, amount in resources.items()) + "}"]
        if self.host.address == HEAD:
            words += ["--head", "--port", str(PORT), "--include-dashboard", "false"]
        else:
            words += ["--address", f"{HEAD}:{PORT}"]
        ray = [*self.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *words]
        with open(f"{self.folder}.log", "ab") as log:
            self._started.append(subprocess.Popen(ray, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def processes(self) -> list[psutil.Process]:
        """All of them, but for the first."""
        namespace, found = os.readlink(f"/proc/{self._first}/ns/pid"), []
        for one in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if one.pid != self._first and os.readlink(f"/proc/{one.pid}/ns/pid") == namespace:
                    found.append(one)
        return found

    def process(self, *words: str) -> psutil.Process:
        """The process whose command line has all of these words."""
        found = []
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                line = " ".join(one.cmdline())
                if all(word in line for word in words):
                    found.append(one)
        assert len(found) == 1, (words, found)
        return found[0]

    def kill(self) -> None:
        """Kill all of its processes at once."""
        with suppress(ProcessLookupError):
            os.kill(self._first, 9)
        for one in (self._outer, *self._started):
            one.wait(10)
        self._started.clear()


@dataclass(eq=False)
class RayHosts:
    """The first host has the head, and no room for instances; the others have what they were asked to have. The
    operator is on the second one."""

    joined: Switch
    hosts: list[RayHost]

    @property
    def head(self) -> RayHost:
        return self.hosts[0]

    @property
    def operator(self) -> RayHost:
        return self.hosts[1]

    @property
    def address(self) -> str:
        return f"{HEAD}:{PORT}"

    def of(self, name: str) -> RayHost:
        """The host on which the instance of that name runs."""
        for one in self.hosts:
            with suppress(AssertionError):
                one.process(*_instance_words(name))
                return one
        raise AssertionError(f"{name} runs nowhere")

    def instance(self, name: str) -> psutil.Process:
        """The process of the instance of that name."""
        return self.of(name).process(*_instance_words(name))

    def wait_for_nodes(self) -> None:
        """Wait until every host is a node."""
        wait_for_nodes(self.head, len(self.hosts))

    def cut(self, host: RayHost) -> None:
        """Pull the cable of a host out."""
        self.joined.set_cable(host.host, plugged=False)

    def heal(self, host: RayHost) -> None:
        self.joined.set_cable(host.host, plugged=True)


def _instance_words(name: str) -> tuple[str, str]:
    return ("triptych.server.instance_main", f"--name {name}")


@contextmanager
def ray_hosts(nodes: Sequence[Mapping[str, float]], variables: Mapping[str, str] = HEALTH_CHECKS) -> Iterator[RayHosts]:
    """A head with these variables, and a host for each dictionary of resources. No process of them survives. Skips the
    test where namespaces can't be made."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets' paths must be short
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        joined = stack.enter_context(switch())
        hosts = []
        for number, resources in enumerate([{}, *nodes]):
            host = stack.enter_context(joined.host(f"h{number}", f"{NETWORK}.{10 + number}"))
            hosts.append(RayHost(host, folder, variables if number == 0 else {}, resources))
            hosts[-1].boot()
            stack.callback(hosts[-1].kill)
        stack.callback(Path(f"{folder}.log").unlink)
        for number, one in enumerate(hosts, 1):  # one after the other: Ray gives a node thirty seconds to start
            one.start_ray()
            wait_for_nodes(hosts[0], number)
        yield RayHosts(joined, hosts)


def wait_for_nodes(host: RayHost, number: int) -> None:
    """Wait until the cluster has that number of living nodes."""
    script = (
        "import sys, time, ray\n"
        "from ray._raylet import GcsClient\n"
        f"address, number, deadline = '{HEAD}:{PORT}', {number}, time.monotonic() + {UP_SECONDS}\n"
        "while time.monotonic() < deadline:\n"
        "    try:\n"
        "        nodes = GcsClient(address=address).get_all_node_info().values()\n"
        "    except Exception: nodes = ()\n"
        "    if sum(one.state == 0 for one in nodes) >= number: sys.exit()\n"
        "    time.sleep(0.2)\n"
        "sys.exit('not all nodes are there')\n"
    )
    done = subprocess.run([*host.prefix, sys.executable, "-c", script], check=False, capture_output=True, text=True)
    log = Path(f"{host.folder}.log")
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{log.read_text()[-3000:]}"
