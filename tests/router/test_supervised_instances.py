"""What the router does with a supervisor's reports, and with an instance that drains."""

import os

from tests.support.router_harness import E0, E1, PD0, RouterHarness
from triptych.messages.work import (
    Draining,
    Encode,
    GetStatus,
    JoinedInstance,
    LaunchedInstance,
    LauncherReport,
    LauncherStatus,
    LaunchState,
    Register,
    Status,
)
from triptych.topology import Role
from triptych.types import Address

SUPERVISOR = Address("supervisor")


def report(harness: RouterHarness, *instances: LaunchedInstance) -> None:
    harness.router.handle(LauncherReport(SUPERVISOR, list(instances)))


def join(harness: RouterHarness, name: Address, role: Role, incarnation: int) -> None:
    peer = harness.lease(PD0)
    harness.router.handle(Register(str(name), role, name, peer.layouts, 1, incarnation, peer.capacity, 100))


def test_a_report_is_answered_with_who_has_joined() -> None:
    harness = RouterHarness(PD0)
    join(harness, E0, Role.E, 7)
    report(harness)
    joined = [JoinedInstance(PD0, 1), JoinedInstance(E0, 7)]
    assert harness.of(LauncherStatus) == [(SUPERVISOR, LauncherStatus(os.getpid(), joined))]


def test_an_instance_that_has_ended_is_lost_before_its_lease_expires() -> None:
    harness = RouterHarness(PD0)
    join(harness, E0, Role.E, 7)
    report(harness, LaunchedInstance(E0, Role.E, LaunchState.RESTARTING, restart_in=1.0, incarnation=6))
    assert harness.router.can_serve, "that was an earlier process"
    report(harness, LaunchedInstance(E0, Role.E, LaunchState.RESTARTING, 1, 1.5, {"SIGKILL": 1}, incarnation=7))
    assert not harness.router.can_serve
    assert harness.router.missing_stages() == "no encode instance: e0 restarts in 2 s"
    harness.router.handle(GetStatus(Address("operator")))
    ((_, status),) = harness.of(Status)
    assert [(one.name, one.restarts) for one in status.launched] == [(E0, 1)]
    restarts = harness.router.metrics.registry.get_sample_value(
        "triptych:instance_restarts_total", {"instance": "e0", "reason": "SIGKILL"}
    )
    assert restarts == 1


def test_a_draining_instance_gets_nothing_new() -> None:
    harness = RouterHarness(PD0, E0, E1)
    harness.router.handle(Draining(E0))
    harness.router.handle(Draining(Address("unknown")))
    for _ in range(4):
        harness.need(harness.submit(1.0), 0)
    assert {to for to, _ in harness.of(Encode)} == {E1}
