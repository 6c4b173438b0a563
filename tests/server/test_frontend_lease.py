"""The lease of one frontend, with a clock that is the test's; and all leases of an instance."""

from dataclasses import dataclass, field

import pytest

from triptych.config import LeaseConfig
from triptych.errors import FrontendSilent, InstanceRefused, Unavailable
from triptych.messages.codec import Message
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    Capacity,
    Demand,
    Deregister,
    FrontendEnding,
    HandingOver,
    Heartbeat,
    HeartbeatReceived,
    PeerLost,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
)
from triptych.server.frontend_lease import REFUSED_INTERVAL, RETRY_INTERVAL, FrontendLease
from triptych.server.frontends import FINISHING_SECONDS, MAX_FINISHING, Frontends
from triptych.topology import Role
from triptych.types import Address
from triptych.virtual_time import VirtualClock

OWN, PEER = Address("tcp://127.0.0.1:9"), Address("tcp://127.0.0.1:8")
A, B = Address("tcp://127.0.0.1:1"), Address("tcp://127.0.0.1:2")
OLD = Address("tcp://127.0.0.1:11")
EXPIRY, BEAT = 2.0, 0.5
CAPACITY = Capacity(32, 1024)


def test_a_lease_is_kept_by_answers_and_lost_by_silence() -> None:
    lease = FrontendLease("a:1")
    assert lease.should_register(0.0)
    lease.tried(0.0)
    assert not lease.should_register(RETRY_INTERVAL / 2)
    assert lease.should_register(RETRY_INTERVAL)
    assert lease.accepted(Registered(EXPIRY, A, "a:1", 0), 1.0) is None
    assert not lease.should_register(99.0)
    assert not lease.is_silent(1.0 + EXPIRY)
    lease.answered(HeartbeatReceived(A, Demand(3, 4)), 2.0)
    assert lease.demand == Demand(3, 4)
    assert not lease.is_silent(2.0 + EXPIRY)
    assert lease.is_silent(2.01 + EXPIRY)
    lease.lose(suspect=True)
    assert not lease.is_silent(99.0)
    assert lease.should_register(2.0)
    assert (lease.resets, lease.demand) == (1, Demand())


def test_an_answer_to_an_earlier_registration_counts_for_nothing() -> None:
    lease = FrontendLease("a:1")
    lease.lose(suspect=True)
    assert not lease.accepts(Registered(EXPIRY, A, "a:1", 0))
    assert not lease.accepts(Registered(EXPIRY, A, "b:1", 1))
    assert lease.accepts(Registered(EXPIRY, A, "a:1", 1))


def test_a_frontend_with_another_address_is_another_one() -> None:
    lease = FrontendLease("a:1")
    lease.accepted(Registered(EXPIRY, A, "a:1", 0), 0.0)
    assert lease.accepted(Registered(EXPIRY, A, "a:1", 0), 0.0) is None
    assert lease.accepted(Registered(EXPIRY, B, "a:1", 0), 0.0) == A


def test_a_refusal_is_not_asked_for_again_at_once() -> None:
    lease = FrontendLease("a:1")
    lease.refused("another model", 0.0)
    assert not lease.should_register(REFUSED_INTERVAL - 1)
    assert lease.should_register(REFUSED_INTERVAL)
    lease.accepted(Registered(EXPIRY, A, "a:1", 0), 0.0)
    assert not lease.refusal


@dataclass
class Wire:
    """What an instance has sent, in place of a channel."""

    address: Address = OWN
    sent: list[tuple[Address, Message]] = field(default_factory=list)
    disconnected: list[Address] = field(default_factory=list)
    unreachable: set[Address] = field(default_factory=set)

    def send(self, to: Address, message: Message) -> None:
        if to in self.unreachable:
            raise Unavailable("a peer has stopped reading its messages")
        self.sent.append((to, message))

    def disconnect(self, peer: Address) -> None:
        self.disconnected.append(peer)

    def take(self, kind: type) -> list[tuple[Address, Message]]:
        """The messages of a type since the last call."""
        found = [(to, message) for to, message in self.sent if isinstance(message, kind)]
        self.sent = [(to, message) for to, message in self.sent if not isinstance(message, kind)]
        return found


class Instance:
    """An instance's leases with frontends A and B, and the clock."""

    def __init__(self, *frontends: Address) -> None:
        self.clock = VirtualClock()
        self.wire = Wire()
        self.given_up: list[Address] = []
        self.frontends = Frontends(
            [one.removeprefix("tcp://") for one in frontends or (A, B)],
            self.wire,
            LeaseConfig(heartbeat=BEAT, lease_expiry=EXPIRY, start_timeout=30.0),
            CAPACITY,
            registration=lambda: Register("pd0", Role.PD, OWN, [], 7, 1, CAPACITY, 100),
            give_up=self.given_up.append,
            clock=self.clock,
        )
        self.frontends.register()

    def get(self, *messages: Message) -> None:
        for message in messages:
            self.frontends.handlers[type(message)](message)

    def registered(self, *frontends: Address) -> None:
        """These frontends answer the last registration."""
        last = {to: message for to, message in self.wire.take(Register) if isinstance(message, Register)}
        self.get(*(Registered(EXPIRY, one, last[one].join, last[one].resets) for one in frontends))

    def wait(self, seconds: float, *alive: Address, **demand: Demand) -> None:
        """Time passes, and these frontends answer heartbeats."""
        for _ in range(round(seconds / BEAT)):
            self.clock.advance(BEAT)
            self.frontends.beat(InstanceStats())
            self.get(*(HeartbeatReceived(one, demand.get(one[-1:], Demand())) for one in alive))
            self.frontends.step()


def test_a_silent_frontend_loses_its_work_alone_and_is_asked_again_and_again() -> None:
    instance = Instance()
    instance.registered(A, B)
    instance.wait(EXPIRY + BEAT, B)
    assert instance.given_up == [A]
    assert instance.wire.take(Deregister) == [(A, Deregister(OWN, suspect=False))]
    assert instance.frontends.registered
    instance.wait(5.0, B)
    again = instance.wire.take(Register)
    assert 5 <= len(again) <= 5.0 / RETRY_INTERVAL + 1
    assert {(to, message.resets) for to, message in again if isinstance(message, Register)} == {(A, 1)}
    assert len(instance.wire.disconnected) >= len(again) - 1, "or they would all be delivered in the end"
    assert instance.given_up == [A]
    instance.wait(BEAT, B)
    instance.registered(A)
    instance.wait(10.0, A, B)
    assert instance.given_up == [A]
    assert not instance.wire.take(Register)


def test_a_pause_of_its_own_is_not_the_frontends_silence() -> None:
    instance = Instance()
    instance.registered(A, B)
    instance.clock.advance(EXPIRY - BEAT)
    instance.frontends.lose_after(EXPIRY - BEAT)
    instance.frontends.step()
    assert not instance.given_up
    instance.clock.advance(EXPIRY)
    instance.frontends.lose_after(EXPIRY)
    assert instance.given_up == [A, B], "frontends have given it up"


def test_a_frontend_that_was_restarted_asks_for_a_registration_and_gets_it_at_once() -> None:
    instance = Instance()
    instance.registered(A, B)
    instance.get(RegisterAgain(A), RegisterAgain(A), RegisterAgain(Address("tcp://127.0.0.1:3")))
    assert instance.given_up == [A]
    instance.frontends.step()
    (register,) = instance.wire.take(Register)
    assert register[0] == A
    assert instance.frontends.registered


def test_heartbeats_go_to_those_that_hold_a_lease_with_their_credits() -> None:
    instance = Instance()
    first = instance.wire.take(Register)
    assert [message.credit for _, message in first if isinstance(message, Register)] == [CAPACITY.whole] * 2
    instance.get(Registered(EXPIRY, A, "127.0.0.1:1", 0))
    instance.wire.take(Heartbeat)
    instance.wait(BEAT, A)
    assert instance.wire.take(Heartbeat) == [(A, Heartbeat(OWN, InstanceStats(), CAPACITY.whole))]
    instance.get(Registered(EXPIRY, B, "127.0.0.1:2", 0))
    demands = {"1": Demand(30, 0), "2": Demand(90, 0)}
    instance.wait(2 * BEAT, A, B, **demands)
    beats = instance.wire.take(Heartbeat)[-2:]
    credits = [message.credit.requests for _, message in beats if isinstance(message, Heartbeat) and message.credit]
    assert credits == [10, 30]


def test_without_any_answer_it_ends_and_with_one_it_does_not() -> None:
    instance = Instance()
    with pytest.raises(FrontendSilent, match=r"no answer from the frontend at 127\.0\.0\.1:1"):
        instance.wait(31.0)
    instance = Instance()
    instance.registered(B)
    instance.wait(60.0, B)
    instance.wait(28.0)
    with pytest.raises(FrontendSilent):
        instance.wait(10.0)


def test_a_refusal_by_all_ends_it_and_by_one_does_not() -> None:
    instance = Instance()
    instance.get(RegistrationRefused("pd0", 7, "another model", "127.0.0.1:1"))
    instance.frontends.step()
    instance.registered(B)
    instance.wait(60.0, B)
    again = [to for to, _ in instance.wire.take(Register)]
    assert 0 < again.count(A) <= 60 / REFUSED_INTERVAL + 60 / RETRY_INTERVAL
    instance = Instance()
    refusals = [RegistrationRefused("pd0", 7, "another model", f"127.0.0.1:{port}") for port in (1, 2)]
    instance.get(RegistrationRefused("pd0", 8, "for another process", "127.0.0.1:1"), refusals[1])
    instance.frontends.step()
    instance.get(refusals[0])
    with pytest.raises(InstanceRefused, match="another model"):
        instance.frontends.step()


def test_a_refusal_that_lasts_is_why_it_ends() -> None:
    instance = Instance()
    instance.get(RegistrationRefused("pd0", 7, "another model", "127.0.0.1:2"))
    with pytest.raises(InstanceRefused, match="another model"):
        instance.wait(31.0)


def test_frontends_that_end_are_given_up_and_it_ends_with_the_last() -> None:
    instance = Instance()
    instance.registered(A, B)
    instance.get(FrontendEnding(A))
    assert instance.given_up == [A]
    assert not instance.frontends.ended
    instance.wait(BEAT, B)
    instance.registered(A)
    instance.get(FrontendEnding(B))
    assert not instance.frontends.ended, "the first is back"
    instance.get(FrontendEnding(A))
    assert instance.frontends.ended


def test_one_that_hands_over_keeps_its_lease_until_its_requests_have_ended() -> None:
    old, new, instance = Address("tcp://127.0.0.1:11"), Address("tcp://127.0.0.1:12"), Instance()
    instance.get(Registered(EXPIRY, old, "127.0.0.1:1", 0))
    instance.registered(B)
    instance.get(HandingOver(old), HandingOver(PEER))
    instance.wait(RETRY_INTERVAL, B)
    assert A in [to for to, _ in instance.wire.take(Register)], "where the next one takes over"
    instance.get(Registered(EXPIRY, new, "127.0.0.1:1", 0))
    instance.frontends.beat(InstanceStats())
    assert {to for to, _ in instance.wire.take(Heartbeat)} == {A, old, B}
    assert all(map(instance.frontends.holds, (old, new, B)))
    instance.get(FrontendEnding(old))
    assert (instance.given_up, instance.frontends.holds(new), instance.frontends.ended) == ([old], True, False)
    assert old in instance.wire.disconnected


def test_a_successor_of_another_model_does_not_end_it_while_its_work_is_to_finish() -> None:
    old, instance = Address("tcp://127.0.0.1:11"), Instance()
    instance.get(Registered(EXPIRY, old, "127.0.0.1:1", 0))
    instance.registered(B)
    instance.get(HandingOver(old), FrontendEnding(B))
    for port in (1, 2):
        instance.get(RegistrationRefused("pd0", 7, "another model", f"127.0.0.1:{port}"))
    instance.wait(3 * RETRY_INTERVAL, old)
    assert instance.frontends.holds(old)
    for port in (1, 2):
        instance.get(RegistrationRefused("pd0", 7, "another model", f"127.0.0.1:{port}"))
    instance.get(FrontendEnding(old))
    with pytest.raises(InstanceRefused, match="another model"):
        instance.frontends.step()


def test_one_whose_messages_were_lost_gives_its_work_again() -> None:
    instance = Instance()
    instance.registered(A, B)
    assert instance.frontends.messages_lost(A)
    assert (instance.given_up, instance.frontends.holds(A), instance.frontends.holds(B)) == ([A], False, True)
    instance.wait(BEAT, B)
    registers = [message for to, message in instance.wire.take(Register) if to == A]
    assert [(message.resets, message.suspect) for message in registers if isinstance(message, Register)] == [(1, False)]
    assert not instance.frontends.messages_lost(PEER)


def test_what_was_lost_may_be_the_answer_to_a_registration_and_work() -> None:
    """The frontend would keep the lease, and the work, at the next registration of the same number of resets."""
    own, instance = Address("tcp://127.0.0.1:11"), Instance()
    instance.registered(B)
    assert not instance.frontends.messages_lost(own), "it may be another instance"
    assert not instance.frontends.messages_lost(PEER), "and this one is"
    instance.get(Registered(EXPIRY, own, "127.0.0.1:1", 0))
    assert not instance.frontends.holds(own)
    assert (A, Deregister(OWN, suspect=False, resets=0)) in instance.wire.take(Deregister)
    instance.get(Registered(EXPIRY, own, "127.0.0.1:1", 1))
    assert instance.frontends.holds(own)
    instance.get(RegisterAgain(own), Registered(EXPIRY, PEER, "127.0.0.1:1", 2))
    assert instance.frontends.holds(PEER), "what was lost before all held leases is of no account"


def test_a_frontend_that_was_restarted_is_reached_by_new_connections_alone() -> None:
    """It has the ports of the former one, and would miss what came before by the old ones."""
    own, instance = Address("tcp://127.0.0.1:11"), Instance()
    instance.get(Registered(EXPIRY, own, "127.0.0.1:1", 0))
    instance.get(RegisterAgain(own))
    instance.wire.disconnected.clear()
    instance.wait(RETRY_INTERVAL)
    assert {A, own} <= set(instance.wire.disconnected)


@pytest.mark.parametrize("how", ["messages_lost", "again", "silence", "register", "start_over"])
def test_a_lease_with_one_that_finishes_is_taken_again_at_its_own_address(how: str) -> None:
    instance = Instance(A)
    instance.get(Registered(EXPIRY, OLD, "127.0.0.1:1", 0), HandingOver(OLD))
    instance.get(Registered(EXPIRY, B, "127.0.0.1:1", 0))
    instance.wire.take(Register)
    match how:
        case "messages_lost":
            assert instance.frontends.messages_lost(OLD)
        case "again":
            instance.get(RegisterAgain(OLD))
        case "silence":
            instance.wait(EXPIRY + BEAT, B)
        case _:
            getattr(instance.frontends, how)()
    assert not instance.frontends.holds(OLD)
    instance.wait(BEAT, B)
    [last, *_] = [message for to, message in reversed(instance.wire.take(Register)) if to == OLD]
    assert isinstance(last, Register) and last.join == "127.0.0.1:11"
    instance.get(Registered(EXPIRY, OLD, last.join, last.resets))
    assert instance.frontends.holds(OLD)


def test_one_that_says_so_and_stays_keeps_its_work() -> None:
    instance = Instance()
    instance.registered(A)
    instance.get(HandingOver(A))
    instance.registered(A)
    instance.frontends.beat(InstanceStats())
    assert [to for to, _ in instance.wire.take(Heartbeat)] == [A]
    assert instance.frontends.holds(A)
    assert not instance.given_up


def test_an_instance_that_starts_gets_leases_with_those_that_finish() -> None:
    instance = Instance(A)
    instance.registered(A)
    instance.get(HandingOver(OLD))
    instance.registered(OLD)
    instance.frontends.beat(InstanceStats())
    assert OLD in [to for to, _ in instance.wire.take(Heartbeat)]
    instance.get(FrontendEnding(OLD))
    assert instance.given_up == [OLD]
    instance.wait(1.0)
    assert OLD not in [to for to, _ in instance.wire.take(Register)]


def test_one_that_finishes_and_is_named_no_more_is_forgotten() -> None:
    instance = Instance(A)
    instance.registered(A)
    for _ in range(3):
        instance.get(HandingOver(OLD))
        instance.wait(FINISHING_SECONDS / 2, A)
    assert OLD in [to for to, _ in instance.wire.take(Register)]
    instance.wait(FINISHING_SECONDS, A)
    instance.wire.take(Register)
    instance.wait(5.0, A)
    assert not instance.wire.take(Register)
    assert OLD in instance.wire.disconnected


def test_the_next_one_at_a_place_does_not_end_the_work_of_one_that_finishes() -> None:
    """The place's lease was lost before its frontend said that it hands over."""
    instance = Instance(A)
    instance.get(Registered(EXPIRY, OLD, "127.0.0.1:1", 0))
    instance.frontends.start_over()
    instance.get(HandingOver(OLD))
    instance.registered(OLD)
    instance.get(Registered(EXPIRY, B, "127.0.0.1:1", 1))
    assert all(map(instance.frontends.holds, (OLD, B)))
    assert not instance.given_up


def test_a_lease_of_which_only_one_that_finishes_knows_ends() -> None:
    """Its answer was lost, with the work that it gave."""
    instance = Instance(A)
    instance.registered(A)
    instance.wire.take(Register)
    instance.get(HandingOver(OLD))
    [(_, register)] = instance.wire.take(Register)
    assert isinstance(register, Register) and (register.resets, register.suspect) == (1, False)


def test_no_more_than_some_are_asked_whatever_messages_name() -> None:
    instance = Instance(A)
    instance.registered(A)
    instance.get(*(HandingOver(Address(f"tcp://127.0.0.1:{port}")) for port in range(100, 200)))
    assert len({to for to, _ in instance.wire.take(Register)}) == MAX_FINISHING


def test_an_instance_of_the_model_before_gets_a_lease_with_the_one_that_finishes_alone() -> None:
    refusal, instance = RegistrationRefused("pd0", 7, "another model", "127.0.0.1:1"), Instance(A)
    instance.get(HandingOver(OLD), refusal)
    instance.frontends.step()
    instance.registered(OLD)
    instance.wait(40.0, OLD)
    instance.get(refusal, FrontendEnding(OLD))
    with pytest.raises(InstanceRefused, match="another model"):
        instance.frontends.step()


def test_the_end_of_the_service_waits_for_one_that_finishes() -> None:
    instance = Instance(A)
    instance.get(Registered(EXPIRY, OLD, "127.0.0.1:1", 0), HandingOver(OLD))
    instance.get(Registered(EXPIRY, B, "127.0.0.1:1", 0), FrontendEnding(B))
    assert not instance.frontends.ended
    instance.get(FrontendEnding(OLD))
    assert instance.frontends.ended


def test_an_earlier_lease_with_one_that_finishes_does_not_hide_the_next() -> None:
    """A frontend ignores registrations that are older than the lease that it has."""
    instance = Instance(A)
    instance.get(Registered(EXPIRY, OLD, "127.0.0.1:1", 0), RegisterAgain(OLD))
    instance.wait(BEAT)
    instance.get(HandingOver(OLD))
    [last] = [message for to, message in instance.wire.take(Register) if to == OLD]
    assert isinstance(last, Register) and last.resets == 1


def test_a_lost_peer_is_disconnected_once_all_have_lost_it() -> None:
    instance = Instance()
    instance.registered(A, B)
    assert not instance.frontends.peer_lost(PeerLost(PEER, [], A))
    assert not instance.frontends.peer_lost(PeerLost(PEER, [], A))
    assert instance.frontends.peer_lost(PeerLost(PEER, [], B))
    assert not instance.frontends.peer_lost(PeerLost(PEER, [], B)), "that is another loss"
    for frontend in (A, B):
        assert not instance.frontends.peer_lost(PeerLost(PEER, [], frontend, is_alive=True))


def test_two_names_of_one_frontend_are_one_lease() -> None:
    instance = Instance()
    instance.get(Registered(EXPIRY, A, "127.0.0.1:1", 0), Registered(EXPIRY, A, "127.0.0.1:2", 0))
    instance.frontends.beat(InstanceStats())
    assert [to for to, _ in instance.wire.take(Heartbeat)] == [A]


def test_one_that_leaves_deregisters_everywhere_and_registers_no_more() -> None:
    instance = Instance()
    instance.registered(A)
    instance.wire.unreachable.add(A)
    instance.frontends.leave(suspect=False)
    assert instance.wire.take(Deregister) == [(B, Deregister(OWN, suspect=False))]
    instance.wait(40.0)
    assert not instance.wire.take(Register)


def test_the_end_of_a_lease_names_it() -> None:
    """So that it ends no later one, whose registration may overtake it on a new connection."""
    instance = Instance(A)
    for number in range(3):
        instance.registered(A)
        instance.get(RegisterAgain(A))
        assert instance.wire.take(Deregister) == [(A, Deregister(OWN, suspect=False, resets=number))]
        instance.wait(RETRY_INTERVAL)


def test_a_lease_that_is_granted_to_one_that_drains_is_given_back() -> None:
    """That frontend hasn't heard of the drain, and would give it work until the drain times out."""
    instance = Instance()
    instance.registered(A)
    instance.frontends.leaving = True
    instance.get(Registered(EXPIRY, B, "127.0.0.1:2", 0))
    assert not instance.frontends.holds(B)
    assert instance.wire.take(Deregister) == [(B, Deregister(OWN, suspect=False))]
    instance.wait(2.0, A)
    assert instance.frontends.holds(A), "whose work it finishes"


def test_names_are_looked_up_again_for_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [A]
    monkeypatch.setattr("triptych.server.name_lookup.endpoint", lambda host, port: found[-1])
    instance = Instance(Address("tcp://frontend.example:1"))

    def registered_at() -> list[Address]:
        for _ in range(200):
            instance.clock.advance(RETRY_INTERVAL / 10)
            instance.frontends.step()
            if taken := instance.wire.take(Register):
                return [to for to, _ in taken]
        return []

    assert registered_at() == [A]
    found.append(B)
    assert registered_at() == [B]
    assert instance.wire.disconnected == [A]
