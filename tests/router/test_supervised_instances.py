"""What the router does with a supervisor's reports, and with an instance that drains."""

import os
import re

import pytest
from prometheus_client import generate_latest

from tests.support.router_harness import E0, E1, EPD0, PD0, PD1, ROLES, RouterHarness
from triptych.errors import Unavailable
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import (
    ChangeRefused,
    GetStatus,
    JoinedInstance,
    LaunchedInstance,
    LauncherReport,
    LauncherStatus,
    LaunchState,
    StartRollout,
    StartScale,
    Status,
)
from triptych.messages.work import (
    Draining,
    Encode,
    HandingOver,
    Heartbeat,
    Register,
    Registered,
    RegistrationRefused,
    Stop,
)
from triptych.topology import Role
from triptych.types import Address

SUPERVISOR = Address("supervisor")


def report(harness: RouterHarness, *instances: LaunchedInstance) -> None:
    harness.router.handle(LauncherReport(SUPERVISOR, list(instances)))


def join(harness: RouterHarness, name: Address, role: Role, incarnation: int) -> None:
    peer = harness.lease(PD0)
    harness.router.handle(Register(str(name), role, name, peer.layouts, 1, incarnation, peer.capacity, 100))


def test_instances_hear_of_replaced_frontends_when_they_register_and_with_each_heartbeat() -> None:
    """So that what such a frontend has to finish gets instances that start meanwhile, also those of its own model."""
    old, harness = Address("old"), RouterHarness(PD0)
    peer = harness.lease(PD0)
    harness.router.handle(LauncherReport(SUPERVISOR, [], finishing=[old]))
    of_another_model = ModelIdentity(weights="another")
    refused = Register("e0", Role.E, E0, peer.layouts, 1, 1, peer.capacity, 100, model=of_another_model)
    harness.sent.clear()
    for message in (refused, Heartbeat(PD0)):
        harness.router.handle(message)
        assert (message.address, HandingOver(old)) in harness.sent
    assert [type(message) for to, message in harness.sent if to == E0] == [HandingOver, RegistrationRefused]
    harness.register(
        PD1
    )  # in this order, since this frontend may be one of them: a lease after that says that it stays
    assert [type(message) for to, message in harness.sent if to == PD1] == [Registered, HandingOver]
    harness.router.handle(LauncherReport(SUPERVISOR, []))
    harness.sent.clear()
    harness.router.handle(Heartbeat(PD0))
    assert not harness.of(HandingOver)


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
    assert harness.router.availability.can_serve, "that was an earlier process"
    report(harness, LaunchedInstance(E0, Role.E, LaunchState.RESTARTING, 1, 1.5, {"SIGKILL": 1}, incarnation=7))
    assert not harness.router.availability.can_serve
    assert harness.router.availability.missing_stages() == "no encode instance: e0 restarts in 2 s"
    harness.router.handle(GetStatus(Address("operator")))
    ((_, status),) = harness.of(Status)
    assert [(one.name, one.restarts) for one in status.launched] == [(E0, 1)]
    restarts = harness.router.metrics.registry.get_sample_value(
        "triptych:instance_restarts_total", {"process": "e0", "reason": "SIGKILL"}
    )
    assert restarts == 1


@pytest.mark.parametrize("lost", [True, False])
def test_the_end_of_what_started_instances_blames_no_request(lost: bool) -> None:
    """A request is moved from one to the other, while all of them have already ended."""
    harness = RouterHarness(restart_hold=60.0)
    names = [PD0, PD1, EPD0]
    for name in names:
        harness.register(name, incarnation=7)
    stream = harness.submit()
    for number in range(1, len(names) + 1):
        report(harness, *(LaunchedInstance(one, ROLES[one], LaunchState.RESTARTING, incarnation=7, lost=lost)
                          for one in names[:number]))  # fmt: skip
    assert (stream.request in harness.router.debug_state().requests) == lost


def test_a_draining_instance_gets_nothing_new() -> None:
    harness = RouterHarness(PD0, E0, E1)
    harness.router.handle(Draining(E0))
    harness.router.handle(Draining(Address("unknown")))
    for _ in range(4):
        harness.need(harness.submit(1.0), 0)
    assert {to for to, _ in harness.of(Encode)} == {E1}


def launched(name: Address, state: LaunchState, incarnation: int) -> LaunchedInstance:
    return LaunchedInstance(str(name), Role.E, state, incarnation=incarnation)


def test_an_instance_that_is_being_replaced_works_on_beside_its_replacement() -> None:
    harness = RouterHarness(PD0)
    join(harness, E0, Role.E, 7)
    report(harness, launched(E0, LaunchState.READY, 7), launched(E0, LaunchState.STARTING, 8))
    newer = Address("newer")
    peer = harness.lease(PD0)
    harness.router.handle(Register("e0", Role.E, newer, peer.layouts, 2, 8, peer.capacity, 100))
    assert harness.of(Stop) == []
    assert {lease.incarnation for lease in harness.router.membership.named("e0")} == {7, 8}
    samples = [
        sample
        for metric in harness.router.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "triptych:instance_outstanding" and sample.labels["instance_name"] == "e0"
    ]
    assert len(samples) == 1, "a series has one sample"
    report(harness, launched(E0, LaunchState.READY, 8), launched(E0, LaunchState.DRAINING, 7))
    harness.router.handle(Draining(E0))
    for _ in range(4):
        harness.need(harness.submit(1.0), 0)
    assert {to for to, _ in harness.of(Encode)} == {newer}
    join(harness, E0, Role.E, 7)
    assert harness.of(Stop) == [], "its supervisor ends it"


def test_an_older_instance_that_no_supervisor_runs_is_stopped() -> None:
    harness = RouterHarness(PD0)
    join(harness, E0, Role.E, 7)
    report(harness, launched(E0, LaunchState.STARTING, 8))
    peer = harness.lease(PD0)
    harness.router.handle(Register("e0", Role.E, Address("newer"), peer.layouts, 2, 8, peer.capacity, 100))
    assert harness.of(Stop) == [(E0, Stop())]
    join(harness, E0, Role.E, 7)
    assert len(harness.of(Stop)) == 2, "also when it wakes up later"


def test_a_rollout_is_passed_on_to_the_one_supervisor() -> None:
    harness = RouterHarness(PD0, E0)
    request = StartRollout(Address("operator"), {"max_num_seqs": "3"})
    harness.router.handle(request)
    ((to, refused),) = harness.of(ChangeRefused)
    assert to == "operator"
    assert "0 report to this frontend" in refused.reason
    harness.router.handle(LauncherReport(SUPERVISOR, [], change="starting the new e0"))
    harness.router.handle(request)
    assert harness.of(StartRollout) == [(SUPERVISOR, request)]
    harness.router.handle(GetStatus(Address("operator")))
    assert harness.of(Status)[0][1].change == "starting the new e0"
    harness.router.handle(LauncherReport(Address("another"), []))
    harness.router.handle(request)
    assert "2 report to this frontend" in harness.of(ChangeRefused)[-1][1].reason
    harness.clock.advance(10.0)
    harness.router.handle(LauncherReport(SUPERVISOR, []))
    harness.router.draining = True
    harness.router.handle(request)
    assert harness.of(ChangeRefused)[-1][1].reason == "the service is shutting down"
    assert len(harness.of(StartRollout)) == 1


def test_scale_operations_wait_until_roles_are_those_of_the_start() -> None:
    harness = RouterHarness(PD0, E0)
    request = StartScale(Address("operator"), {Role.PD: 2})
    pd0 = LaunchedInstance("pd0", Role.PD, LaunchState.READY, incarnation=1)
    report(harness, pd0, LaunchedInstance("e0", Role.EPD, LaunchState.READY))
    harness.router.handle(request)
    assert harness.of(ChangeRefused)[-1][1].reason == "e0 has been changed to E: set the role back first"
    report(harness, pd0, LaunchedInstance("e0", Role.E, LaunchState.READY))
    harness.router.handle(request)
    assert harness.of(StartScale) == [(SUPERVISOR, request)]


def test_instances_are_counted_by_role_and_state_and_status_shows_a_drain() -> None:
    harness = RouterHarness(PD0, PD1, E0)
    report(
        harness,
        launched(E0, LaunchState.READY, 1),
        launched(E1, LaunchState.STARTING, 1),
        LaunchedInstance("pd0", Role.PD, LaunchState.READY, incarnation=1),
    )
    harness.router.handle(Draining(PD1))
    text = generate_latest(harness.router.metrics.registry).decode()
    counts = re.findall(r'^triptych:num_instances\{role="(\w+)",state="(\w+)"\} (\S+)$', text, re.MULTILINE)
    assert sorted(counts) == [
        ("E", "serving", "1.0"), ("E", "starting", "1.0"), ("PD", "draining", "1.0"), ("PD", "serving", "1.0")
    ]  # fmt: skip
    harness.router.handle(GetStatus(Address("operator")))
    assert [one.name for one in harness.of(Status)[0][1].instances if one.draining] == ["pd1"]


def test_a_frontend_that_is_started_again_holds_requests_for_instances_that_are_too() -> None:
    """It has never seen them, but their supervisor has: both have ended at one time."""
    harness = RouterHarness(PD0)
    report(harness, LaunchedInstance(E0, Role.E, LaunchState.STARTING))
    with pytest.raises(Unavailable):
        harness.submit(1.0)
    report(harness, LaunchedInstance(E0, Role.E, LaunchState.RESTARTING, 1, 1.5, {"SIGKILL": 1}))
    stream = harness.submit(1.0)
    harness.wait(1.0, PD0)
    [transfer] = harness.need(stream, 0)
    join(harness, E0, Role.E, 8)
    assert [message.transfer for _, message in harness.of(Encode)] == [transfer]
    harness.wait(30.0, PD0)
    with pytest.raises(Unavailable):
        harness.submit(1.0)
