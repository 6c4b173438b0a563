"""Hosts on one machine: network namespaces, two joined by a virtual cable or many by a switch."""

import ctypes
import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Other processes can't see them, so they may be the same in every run."""
CABLE = "cable0"
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that neither end of the cable has."""
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


@dataclass(frozen=True)
class Host:
    """A namespace and the address that the other one reaches it at."""

    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs there. Its processes see none of another machine's."""
        apart = ["--pid", "--ipc", "--uts", "--mount-proc", "--fork", "--kill-child"]
        return [ip_command(), "netns", "exec", self.namespace, "unshare", *apart]

    def run(self, command: Sequence[str], stdin: str = "", timeout: float = 60.0) -> str:
        """What the command writes. Raises CalledProcessError when it fails."""
        return run_command([*self.prefix, *command], stdin, timeout)

    def enter(self) -> None:
        """Put the calling thread on this host: the sockets that it opens from now on are the host's."""
        with open(f"/var/run/netns/{self.namespace}", "rb") as namespace:
            _enter(namespace.fileno())

    def lose_packets_to(self, other: "Host") -> None:
        """From now on nothing that is sent to the other host arrives, without a sign of that."""
        there = [other.address, "lladdr", NOWHERE, "nud", "permanent", "dev", CABLE]
        run_command([ip_command(), "-n", self.namespace, "neighbour", "replace", *there])

    def reach(self, other: "Host") -> None:
        """End that."""
        run_command([ip_command(), "-n", self.namespace, "neighbour", "del", other.address, "dev", CABLE])

    def num_sent(self) -> int:
        """Bytes that have left the host over the cable."""
        (link,) = json.loads(
            run_command([ip_command(), "-n", self.namespace, "-json", "-stats", "link", "show", CABLE])
        )
        return int(link["stats64"]["tx"]["bytes"])


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where namespaces can't be made."""
    run = secrets.token_hex(4)
    one, other = (Host(f"triptych-{run}-{number}", address) for number, address in enumerate(ADDRESSES))
    with ExitStack() as stack:
        try:
            for host in (one, other):
                run_command([ip_command(), "netns", "add", host.namespace])
                stack.callback(run_command, [ip_command(), "netns", "del", host.namespace])
            ends = ["netns", one.namespace, "type", "veth", "peer", "name", CABLE, "netns", other.namespace]
            run_command([ip_command(), "link", "add", CABLE, *ends])
            for host in (one, other):
                there = [ip_command(), "-n", host.namespace]
                run_command([*there, "address", "add", f"{host.address}/24", "dev", CABLE])
                run_command([*there, "link", "set", CABLE, "up"])
                run_command([*there, "link", "set", "lo", "up"])
            one.run(["true"])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here, which take root: {error.stderr.strip()}")
        yield one, other


@dataclass(frozen=True)
class Switch:
    """What joins any number of hosts: a bridge in a namespace of its own."""

    namespace: str

    def set_cable(self, host: Host, *, plugged: bool) -> None:
        """Pull the cable of a host out of the switch, or plug it in again. Neither end is told what is lost."""
        state = "up" if plugged else "down"
        run_command([ip_command(), "-n", self.namespace, "link", "set", _cable_of(host), state])

    @contextmanager
    def host(self, name: str, address: str) -> Iterator[Host]:
        """A host at the switch, with a hosts file of its own. ``name`` is of at most eight letters."""
        host, ip = Host(f"{self.namespace}-{name}", address), ip_command()
        with ExitStack() as stack:
            run_command([ip, "netns", "add", host.namespace])
            stack.callback(run_command, [ip, "netns", "del", host.namespace])
            etc = Path("/etc/netns") / host.namespace
            etc.mkdir(parents=True)
            stack.callback(shutil.rmtree, etc)
            (etc / "hosts").write_text("127.0.0.1 localhost\n")
            ends = ["netns", host.namespace, "type", "veth", "peer", "name", _cable_of(host), "netns", self.namespace]
            run_command([ip, "link", "add", "eth0", *ends])
            run_command([ip, "-n", self.namespace, "link", "set", _cable_of(host), "master", "br0", "up"])
            run_command([ip, "-n", host.namespace, "address", "add", f"{address}/24", "dev", "eth0"])
            run_command([ip, "-n", host.namespace, "link", "set", "eth0", "up"])
            run_command([ip, "-n", host.namespace, "link", "set", "lo", "up"])
            yield host


def _cable_of(host: Host) -> str:
    """The name of the cable's end at the switch."""
    return f"to-{host.namespace.rpartition('-')[2]}"


@contextmanager
def switch() -> Iterator[Switch]:
    """Skips the test where namespaces can't be made."""
    ip, made = ip_command(), Switch(f"triptych-{secrets.token_hex(3)}")
    with ExitStack() as stack:
        try:
            run_command([ip, "netns", "add", made.namespace])
            stack.callback(run_command, [ip, "netns", "del", made.namespace])
            run_command([ip, "-n", made.namespace, "link", "add", "br0", "type", "bridge"])
            run_command([ip, "-n", made.namespace, "link", "set", "br0", "up"])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here, which take root: {error.stderr.strip()}")
        yield made


@contextmanager
def on_host(host: Host) -> Iterator[None]:
    """The calling thread, and what it starts, is on that host until the end."""
    before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        host.enter()
        yield
    finally:
        _enter(before)
        os.close(before)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def ip_command() -> str:
    if (path := shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")) is None:
        pytest.skip("no network namespaces without ip: apt-get install iproute2")
    return path


def run_command(command: Sequence[str], stdin: str = "", timeout: float = 60.0) -> str:
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=timeout).stdout
