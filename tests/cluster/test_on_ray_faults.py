"""``triptych serve --on ray`` on hosts of their own, under load: instances and nodes end, links are cut.

Each test prints what it measures (``pytest -s``)."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import Command, triptych, wait_for
from tests.support.fault_load import FaultLoad, asking
from tests.support.namespaces import on_host
from tests.support.on_ray import NODE, control_flags
from tests.support.ray_hosts import HEALTH_CHECKS, SHORT_HEALTH_CHECKS, RayHost, RayHosts, ray_hosts
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import FrontendSilent
from triptych.measure.chaos.questions import Kind
from triptych.messages.operations import LaunchedInstance, LaunchState, Status
from triptych.transfer.fabrics.opening import is_installed

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")
pytestmark = pytest.mark.slow

WHOLE_SECONDS = 120.0
AGAIN = 4.0
"""Seconds until questions are answered again that another instance can answer, or the next one in a spare place."""
LOOK_SECONDS = 0.3
"""Seconds between two looks at the service's status."""
SAID = 10.0
"""Seconds within which it is said that an instance has no room."""
AWAY = 5.0
"""Seconds between the end of the head and the start of the next one."""
AFTER = 3.0
"""Seconds for which questions are asked once all is well again."""
IMPORT_SECONDS = 10.0
"""Seconds in which a spare place has imported all."""
FLAGS = ("--port", "0", "--threads", "1", "--kv-cache-tokens", "8192")


@dataclass
class Service:
    """A service whose supervisor and frontend are on the operator's host."""

    hosts: RayHosts
    command: Command
    url: str
    control: ControlClient
    has_spare: bool

    def wait_for(self, condition: Callable[[Status], object]) -> Status:
        """Wait until the service's status is as wanted, and return it."""
        deadline = time.monotonic() + WHOLE_SECONDS
        while time.monotonic() < deadline:
            with suppress(FrontendSilent):
                if condition(found := self.control.status()):
                    return found
            time.sleep(LOOK_SECONDS)  # what is measured needs the cores
        raise AssertionError(f"not within {WHOLE_SECONDS:g} s:\n{self.command.text}")

    def wait_until_whole(self) -> Status:
        return self.wait_for(lambda found: all(one.state is LaunchState.READY for one in found.launched))

    def launched(self, name: str) -> LaunchedInstance:
        return next(one for one in self.wait_for(lambda _: True).launched if one.name == name)

    def says(self, pattern: str, since: int, seconds: float = WHOLE_SECONDS) -> None:
        """Wait for a line after the first ``since``."""
        lines = self.command.lines
        wait_for(lambda: any(re.search(pattern, line) for line in lines[since:]), seconds, self.command)

    def restore(self, host: RayHost) -> None:
        """Start a host that was lost again."""
        line = len(self.command.lines)
        host.kill()
        host.boot()
        host.start_ray()
        self.hosts.wait_for_nodes()
        if self.has_spare:
            self.wait_for_spare(line)

    def wait_for_spare(self, since: int) -> None:
        """Wait until a place is kept, and has imported all."""
        self.says("a spare place waits on", since)
        time.sleep(IMPORT_SECONDS)


@contextmanager
def serving(
    topology: str, nodes: int, fabric: str, variables: Mapping[str, str] = HEALTH_CHECKS, spares: int = 0
) -> Iterator[Service]:
    """A service with that number of nodes, each for one instance. ``variables`` are the head's."""
    if not is_installed(fabric):
        pytest.skip(f"{fabric} isn't installed")
    with ray_hosts([{}, *[NODE] * nodes], variables) as hosts, on_host(hosts.operator.host):
        flags = (*FLAGS, "--topology", topology, "--fabric", fabric, "--ray-spares", str(spares))
        words = ("serve", "demo", "--on", f"ray://{hosts.address}", *flags)
        with triptych(*words, prefix=hosts.operator.prefix) as command:
            url = command.wait_for_line(r"^ready: .* on (https?://\S+)/v1$", WHOLE_SECONDS)[1]
            _, control, _, host, _, secret = control_flags(command)
            with ControlClient(control, ClusterConfig(cluster_host=host, cluster_secret_file=secret)) as client:
                service = Service(hosts, command, url, client, has_spare=spares > 0)
                if spares:
                    service.wait_for_spare(0)
                yield service
            assert "Traceback" not in command.text, command.text


@dataclass
class Fault:
    """What follows from a fault, in seconds since it happened."""

    service: Service
    load: FaultLoad
    what: str
    name: str
    """The instance that is lost."""
    moment: float
    line: int
    """Lines that the service had written before."""
    incarnation: int
    """The instance's before."""
    noticed: float = 0.0
    placed: float = 0.0
    joined: float = 0.0

    def wait_until_noticed(self, how: str) -> None:
        self.service.says(rf"instance {self.name} \(.* {how}; starting again", self.line)
        self.noticed = self.load.now - self.moment

    def wait_until_whole(self, *, restarted: bool = True) -> None:
        self.service.wait_for(lambda found: self._has_started(found) or not restarted)
        self.placed = self.load.now - self.moment
        self.service.wait_until_whole()
        self.joined = self.load.now - self.moment
        time.sleep(AFTER)

    def _has_started(self, status: Status) -> bool:
        """Whether Ray has a place for the next instance of that name, and its process runs."""
        return any(
            one.name == self.name and one.node and one.incarnation != self.incarnation for one in status.launched
        )

    def judge(self, *, alone: bool) -> None:
        """End the load: nothing is lost or wrong, and questions are answered again in time. Those that need the lost
        instance may take longer if it is ``alone``, and there is no spare place."""
        result = self.load.end()
        again = {kind: self.load.served_after(self.moment, kind) for kind in Kind}
        times = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in again.items())
        print(
            f"\n{self.what}: noticed {self.noticed:.1f} s, started {self.placed:.1f} s, joined {self.joined:.1f} s, "
            f"served again {times}; {len(result.outcomes)} requests, {len(result.lost)} lost, {len(result.wrong)} wrong"
        )
        assert result.failures == []
        waiting = set(Kind) if self.name.startswith("pd") else {Kind.PICTURE}
        may_wait = alone and not self.service.has_spare
        for kind in set(Kind) - waiting if may_wait else set(Kind):
            assert again[kind] <= AGAIN, kind


@contextmanager
def fault(service: Service, name: str, what: str) -> Iterator[Fault]:
    """Requests all the time, during what the test does to the instance of that name."""
    service.wait_until_whole()
    incarnation = service.launched(name).incarnation
    with asking(service.url, service.hosts.operator.host) as load:
        yield Fault(service, load, f"{name}: {what}", name, load.now, len(service.command.lines), incarnation)


def kill_instance(service: Service, name: str, what: str, *, alone: bool) -> None:
    with fault(service, name, what) as seen:
        service.hosts.instance(name).kill()
        seen.wait_until_noticed("was killed by SIGKILL")
        seen.wait_until_whole()
        seen.judge(alone=alone)


def kill_node(service: Service, name: str, what: str, *, alone: bool) -> None:
    with fault(service, name, what) as seen:
        host = service.hosts.of(name)
        host.kill()
        seen.wait_until_noticed("was lost with its machine")
        seen.wait_until_whole()
        seen.judge(alone=alone)
    service.restore(host)


def cut_link(service: Service, name: str, what: str, *, alone: bool) -> None:
    """Longer than it takes Ray to give up the node. Heals once another instance has taken the place."""
    hosts = service.hosts
    with fault(service, name, what) as seen:
        host = hosts.of(name)
        old = hosts.instance(name)
        hosts.cut(host)
        seen.wait_until_noticed("was lost with its machine")
        seen.wait_until_whole()
        hosts.heal(host)
        healed = time.monotonic()
        wait_for(lambda: not old.is_running(), 30, service.command)
        print(f"\n{name}: the old process ended {time.monotonic() - healed:.1f} s after the link was back")
        time.sleep(AFTER)
        joined = [one.name for one in service.wait_until_whole().instances]
        assert len(joined) == len(set(joined)), "two of one name"
        seen.judge(alone=alone)
    service.restore(host)


def blink(service: Service, name: str, what: str, *, alone: bool) -> None:
    """The link is cut for longer than the lease lasts. Ray gives the node up only if its health checks are short."""
    with fault(service, name, what) as seen:
        host, old = service.hosts.of(name), service.hosts.instance(name)
        service.hosts.cut(host)
        service.says(rf"\[frontend\] .*{name} sent no heartbeat", seen.line)
        seen.noticed = seen.load.now - seen.moment
        service.hosts.heal(host)
        time.sleep(AFTER)  # so that the supervisor has heard of it
        is_lost = service.launched(name).incarnation != seen.incarnation
        assert not is_lost or service.has_spare, "Ray gave the node up too early"
        seen.wait_until_whole(restarted=is_lost)
        if is_lost:
            wait_for(lambda: not old.is_running(), 30, service.command)
            print(f"\n{name}: Ray gave its node up")
        seen.judge(alone=alone)
    if is_lost:
        service.restore(host)


def lose_all_room(service: Service, name: str, what: str) -> None:
    """No node is left for an instance: this is said, the other stages go on, and its requests wait for a node."""
    with fault(service, name, what) as seen:
        host = service.hosts.of(name)
        host.kill()
        service.says(rf"instance {name} has no place yet: it asks for 1 CPU; free on all nodes: nothing", seen.line)
        said = seen.noticed = seen.load.now - seen.moment
        assert said <= SAID
        time.sleep(AFTER)
        if name.startswith("e"):
            asked = [
                one for one in seen.load.outcomes if one.question.kind is Kind.TEXT and one.sent > seen.moment + said
            ]
            assert asked, "texts don't go on"
        service.restore(host)
        seen.wait_until_whole()
        seen.judge(alone=True)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("fabric", ["nixl", "mooncake"])
def test_the_only_instance_of_a_stage(fabric: str, spares: int) -> None:
    """Its next one has a node, which waits for it with all imported if there is a spare place.

    With one, Ray's health checks are short, and the service must answer again in time: the machine must have cores for
    it."""
    checks = SHORT_HEALTH_CHECKS if spares else HEALTH_CHECKS
    with serving("1E1PD", 3, fabric, checks, spares) as service:
        for name in ("e0", "pd0"):
            kill_instance(service, name, f"the only one is killed ({fabric})", alone=True)
            kill_node(service, name, f"the node of the only one is killed, with a spare ({fabric})", alone=True)
            cut_link(service, name, f"the link to the only one is cut, and heals ({fabric})", alone=True)
            blink(service, name, f"the link to the only one is cut for a moment ({fabric})", alone=True)


@pytest.mark.parametrize("fabric", ["nixl", "mooncake"])
def test_no_node_is_left_for_the_only_instance_of_a_stage(fabric: str) -> None:
    with serving("1E1PD", 2, fabric) as service:
        for name in ("e0", "pd0"):
            lose_all_room(service, name, f"no node is left ({fabric})")


@pytest.mark.parametrize("fabric", ["nixl", "mooncake"])
def test_one_of_two_instances_of_a_stage(fabric: str) -> None:
    with serving("2E2PD", 5, fabric) as service:
        for name in ("e0", "pd0"):
            kill_instance(service, name, f"one of two is killed ({fabric})", alone=False)
            kill_node(service, name, f"the node of one of two is killed, with a spare ({fabric})", alone=False)
            cut_link(service, name, f"the link to one of two is cut, and heals ({fabric})", alone=False)


def test_a_head_that_comes_back(tmp_path: Path) -> None:
    """With Ray's state on a disk, nothing ends: the next head takes restarts again."""
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    with serving("1E1PD", 2, "nixl", HEALTH_CHECKS | storage) as service:
        hosts = service.hosts
        before = {name: hosts.instance(name) for name in ("e0", "pd0")}
        with fault(service, "e0", "killed after the head was away") as seen:
            hosts.head.kill()
            time.sleep(AWAY)
            hosts.head.boot()
            hosts.head.start_ray()
            hosts.wait_for_nodes()
            print(f"\nthe cluster was whole {seen.load.now - seen.moment:.1f} s after its head was killed")
            time.sleep(AFTER)
            assert {name: hosts.instance(name) for name in before} == before, "an instance ended with the head"
            assert seen.load.served_after(seen.moment, Kind.PICTURE) <= AGAIN
            seen.moment = seen.load.now
            before["e0"].kill()
            seen.wait_until_noticed("was killed by SIGKILL")
            seen.wait_until_whole()
            seen.judge(alone=True)
