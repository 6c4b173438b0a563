"""Instances that change their role: who may, what the others do meanwhile, and what their operator hears."""

import itertools
from typing import Any

import pytest

from tests.support.router_harness import FRONTEND, prompt, request_of, tokens_of
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.errors import InstanceLost, TopologyError, Unavailable
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import GetStatus, InstanceStatus, RoleRefused, RoleSet, SetRole, Status
from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats, LanguageStats, Load, PageUsage, PoolUsage
from triptych.messages.work import (
    Capacity,
    ChangeRole,
    ChangingRole,
    Deregister,
    Generate,
    Heartbeat,
    PeerLost,
    Prefill,
    PrefillNeeded,
    Register,
    Registered,
    RoleKept,
    SamplingParams,
    Tokens,
)
from triptych.router.role_changes import role_change_impact
from triptych.router.router import Router
from triptych.router.stream import TokenStream
from triptych.topology import Role, Topology
from triptych.types import Address, RequestId, TransferId
from triptych.virtual_time import VirtualClock

ME = Address("operator")
LAYOUT = RowLayout(ModelIdentity().digest, "float32", 4, 16)


class RouterHarness:
    """A router and instances that are named by their roles: ``p0``, ``d0``."""

    def __init__(self, *names: str) -> None:
        self.clock = VirtualClock()
        self.sent: list[tuple[Address, Message]] = []
        self.router = Router(
            address=Address("frontend"),
            send=lambda to, message: self.sent.append((to, message)),
            disconnect=lambda _: None,
            identity=ModelIdentity(),
            admission=AdmissionConfig(request_timeout=60.0, restart_hold=0.0),
            lease=LeaseConfig(heartbeat=1.0, lease_expiry=10.0),
            expects_encoders=any(name.startswith("e") for name in names),
            clock=self.clock,
        )
        for name in names:
            self.register(name, Role(name.rstrip("0123456789").upper()))

    def register(self, name: str, role: Role) -> None:
        self.router.handle(Register(name, role, Address(name), [LAYOUT], 1, 1, Capacity(32, 1024), 100))

    def set_role(self, name: str, role: Role, *, force: bool = False) -> list[Message]:
        """What the operator and the instance hear of it."""
        before = len(self.sent)
        self.router.handle(SetRole(ME, name, role, 30.0, force))
        return [message for _, message in self.sent[before:]]

    def answers(self) -> list[Message]:
        return [message for to, message in self.sent if to == ME]

    def of(self, kind: type) -> list[tuple[Address, Message]]:
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]

    def submit(self) -> TokenStream:
        return self.router.lifecycle.submit(request_of(), prompt(), SamplingParams(max_tokens=4), [])

    def need_prefill(self, stream: TokenStream, name: str = "d0", generated: tuple[int, ...] = ()) -> None:
        transfer = TransferId(f"{stream.request}/{len(self.sent)}")
        self.router.handle(PrefillNeeded(stream.request, Address(name), transfer, 0, list(generated)))


def test_an_idle_instance_gets_its_role_and_the_operator_an_answer() -> None:
    harness = RouterHarness("p0", "p1", "d0")
    assert harness.set_role("p0", Role.D) == [ChangeRole(Role.D, 30.0, FRONTEND)]
    assert harness.answers() == []
    harness.register("p0", Role.D)
    assert harness.answers() == [RoleSet("p0", Role.D)]
    lost = PeerLost(Address("p0"), [], FRONTEND, suspect=False)
    assert {to for to, message in harness.of(PeerLost) if message == lost} == {"p1", "d0"}
    assert harness.of(Registered)[-1][0] == "p0"
    assert {lease.name for lease in harness.router.membership.decode_instances()} == {"p0", "d0"}
    assert [lease.name for lease in harness.router.membership.prefill_instances()] == ["p1"]


def test_what_has_the_role_already_is_not_asked() -> None:
    harness = RouterHarness("pd0")
    assert harness.set_role("pd0", Role.PD) == [RoleSet("pd0", Role.PD)]


def test_a_draining_instance_gets_nothing_new_but_ends_what_it_has() -> None:
    harness = RouterHarness("pd0", "pd1", "p0", "d0")
    first = harness.submit()
    assert harness.of(Generate)[-1][0] == "pd0"
    harness.set_role("pd0", Role.P)
    others = {harness.of(Generate)[-1][0] for _ in range(5) if harness.submit()}
    assert others == {"pd1", "d0"}
    harness.router.handle(Tokens(first.request, [1], 0, finish_reason="stop"))
    assert harness.router.membership.get(Address("pd0")).outstanding == 0  # type: ignore[union-attr]


def test_a_draining_prefill_instance_still_serves_requests_in_flight() -> None:
    """With --force: no new request is admitted, and no admitted one is lost."""
    harness = RouterHarness("p0", "d0")
    stream = harness.submit()
    harness.set_role("p0", Role.PD, force=True)
    assert not harness.router.availability.can_serve
    with pytest.raises(Unavailable, match="prefill"):
        harness.submit()
    harness.need_prefill(stream)
    assert harness.of(Prefill)[-1][0] == "p0"
    harness.register("p0", Role.PD)
    assert harness.router.availability.can_serve
    harness.router.handle(Tokens(stream.request, [3], 0))
    harness.need_prefill(stream, generated=(3,))  # it lost its pages, and no prefill instance is left
    to, again = harness.of(Generate)[-1]
    assert (to, again.generated) == ("p0", [3])


def test_an_instance_that_keeps_its_role_is_given_work_again() -> None:
    harness = RouterHarness("pd0", "pd1")
    harness.set_role("pd0", Role.P, force=True)
    harness.submit()
    assert harness.of(Generate)[-1][0] == "pd1"
    harness.router.handle(RoleKept(Address("pd0"), "it was busy"))
    assert harness.answers() == [RoleRefused("pd0", Role.P, "it was busy")]
    harness.submit()
    assert harness.of(Generate)[-1][0] == "pd0"
    assert harness.set_role("pd0", Role.P, force=True) == [ChangeRole(Role.P, 30.0, FRONTEND)]


@pytest.mark.parametrize("how", ["leaves", "stops its heartbeats"])
def test_an_instance_that_is_lost_while_it_drains_is_named(how: str) -> None:
    harness = RouterHarness("pd0", "pd1", "pd2")
    stream = harness.submit()
    harness.set_role("pd0", Role.P, force=True)
    if how == "leaves":
        harness.router.handle(Deregister(Address("pd0")))
    else:
        for _ in range(44):
            harness.clock.advance(0.25)
            for name in ("pd1", "pd2"):
                harness.router.handle(Heartbeat(Address(name)))
            harness.router.tick()
    (answer,) = harness.answers()
    assert isinstance(answer, RoleRefused)
    assert "has left" in answer.reason or "no heartbeat" in answer.reason
    assert harness.of(Generate)[-1][0] == "pd1", "its request continues"
    harness.register("pd0", Role.PD)
    harness.router.lifecycle.cancel(stream.request)
    assert harness.set_role("pd0", Role.P, force=True)[-1] == ChangeRole(Role.P, 30.0, FRONTEND)


def test_a_request_left_at_a_role_change_continues_elsewhere() -> None:
    """It can't have any; but if it does, the request isn't lost."""
    harness = RouterHarness("pd0", "pd1")
    stream = harness.submit()
    harness.set_role("pd0", Role.P, force=True)
    harness.register("pd0", Role.P)
    assert harness.of(Generate)[-1] == (
        "pd1",
        Generate(RequestId(f"{stream.request}.1"), **_rest(harness.of(Generate)[0][1])),
    )


def _rest(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "request"}


def test_without_another_generator_it_fails() -> None:
    harness = RouterHarness("pd0")
    stream = harness.submit()
    harness.set_role("pd0", Role.P, force=True)
    harness.register("pd0", Role.P)
    with pytest.raises(InstanceLost):
        tokens_of(stream)


@pytest.mark.parametrize(
    ("names", "change", "reason"),
    [
        (["pd0"], ("absent", Role.P), "no instance of that name"),
        (
            ["p0", "d0"],
            ("p0", Role.D),
            "no other instance prefills, so requests would be rejected until it has changed",
        ),
        (["p0", "d0"], ("d0", Role.P), "no other instance decodes"),
        (["pd0"], ("pd0", Role.P), "no other instance prefills or decodes"),
        (["pd0", "pd1"], ("pd0", Role.D), "afterwards no instance would prefill for instances that only decode"),
        (
            ["pd0", "pd1"],
            ("pd0", Role.P),
            "afterwards instances that only prefill would have no instance to prefill for",
        ),
        (["epd0", "p0", "d0"], ("epd0", Role.PD), "no other instance encodes"),
    ],
)
def test_refusals(names: list[str], change: tuple[str, Role], reason: str) -> None:
    harness = RouterHarness(*names)
    (answer,) = harness.set_role(*change)
    assert isinstance(answer, RoleRefused)
    assert answer.reason.startswith(reason)
    assert harness.of(ChangeRole) == []
    if "instance of that name" not in reason:
        assert "--force" in answer.reason
        assert harness.set_role(*change, force=True) == [ChangeRole(change[1], 30.0, FRONTEND)]


def test_a_second_change_waits_for_the_first() -> None:
    harness = RouterHarness("pd0", "pd1", "pd2")
    harness.set_role("pd0", Role.P, force=True)
    (answer,) = harness.set_role("pd0", Role.D, force=True)
    assert answer == RoleRefused("pd0", Role.D, "it is already changing to P")
    (other,) = harness.set_role("pd1", Role.D)
    assert isinstance(other, RoleRefused), "what one is about to become doesn't count before it is"


def test_an_instance_that_another_frontend_changes_gets_nothing_new() -> None:
    harness = RouterHarness("p0", "p1", "d0")
    harness.router.handle(ChangingRole(Address("p0"), Role.D))
    harness.need_prefill(harness.submit())
    assert [to for to, _ in harness.of(Prefill)] == ["p1"]
    (refused,) = harness.set_role("p0", Role.PD)
    assert refused == RoleRefused("p0", Role.PD, "it is already changing to D")
    harness.router.handle(RoleKept(Address("p0"), "the frontend that asked for the change is lost"))
    assert harness.answers() == [refused], "no operator of this frontend waits"
    harness.need_prefill(harness.submit())
    assert [to for to, _ in harness.of(Prefill)] == ["p1", "p0"]
    harness.router.handle(ChangingRole(Address("gone"), Role.D))  # perhaps it has just left


def test_an_ambiguous_instance_name_is_refused() -> None:
    harness = RouterHarness("pd0")
    harness.router.handle(Register("pd0", Role.PD, Address("another"), [LAYOUT], 2, 1, Capacity(32, 1024), 100))
    (answer,) = harness.set_role("pd0", Role.P)
    assert answer == RoleRefused("pd0", Role.P, "2 instances of that name")


def test_role_changes_are_refused_during_shutdown() -> None:
    harness = RouterHarness("p0", "p1", "d0")
    harness.router.draining = True
    assert harness.set_role("p0", Role.D) == [RoleRefused("p0", Role.D, "the service is shutting down")]


def test_status_lists_instances_and_what_they_have_in_flight() -> None:
    harness = RouterHarness("p0", "d0", "d1", "epd0")
    language = LanguageStats(
        waiting=1, prefilling=0, decoding=2, kv_cache=[PageUsage("full", 6, 2, 1), PageUsage("window 16", 2, 1, 0)],
        prefix_queries=0, prefix_hits=0, preemptions=0, steps=0, computed_tokens=0,
    )  # fmt: skip
    load = Load(2, 1, [PoolUsage("kv_pages", 8, 3, 1)])
    harness.router.handle(Heartbeat(Address("d0"), InstanceStats(language=language)))
    harness.submit()
    harness.set_role("d1", Role.P)
    harness.clock.advance(1.5)
    harness.router.handle(GetStatus(ME))
    (status,) = harness.answers()
    assert isinstance(status, Status)
    assert (status.ready, status.draining, status.requests) == (True, False, 1)
    assert status.instances[1] == InstanceStatus("d0", Role.D, Address("d0"), 1, 5.0, 1.5, load)
    assert [(one.name, one.next_role) for one in status.instances if one.next_role] == [("d1", Role.P)]


def test_a_change_does_no_harm_exactly_where_the_topologies_on_the_way_can_be_served() -> None:
    """Of services that could be started as they are: those of up to three instances that prefill and decode."""
    roles = (Role.P, Role.D, Role.PD)
    for count in (1, 2, 3):
        for others in itertools.product(roles, repeat=count - 1):
            for now, then in itertools.permutations(roles, 2):
                if not _is_whole([*others, now]):
                    continue
                harmless = _is_whole([*others, then]) and _can_serve([*others])
                assert (role_change_impact(others, now, then) == "") == harmless, (others, now, then)


def _can_serve(roles: list[Role]) -> bool:
    return Role.PD in roles or {Role.P, Role.D} <= set(roles)


def _is_whole(roles: list[Role]) -> bool:
    try:
        Topology.parse("".join(f"{roles.count(role)}{role}" for role in dict.fromkeys(roles)))
    except TopologyError:
        return False
    return True
