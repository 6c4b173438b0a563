"""An instance's turns in virtual time, with a frontend that is the test's, and a loop that records."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from tests.support.disorder import LossyChannel
from tests.support.turns import Mailbox, Wire
from triptych.clock import SystemClock
from triptych.config import LeaseConfig
from triptych.errors import BlockError, InstanceBroken, StartError
from triptych.executor import StartExecutor, started_executor
from triptych.messages import channel as channels
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout, TransferSide
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    Cancel,
    Capacity,
    ChangeRole,
    ChangingRole,
    Deregister,
    Draining,
    FrontendEnding,
    Generate,
    HandBack,
    Heartbeat,
    MessagesLost,
    PeerLost,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    RoleKept,
    SamplingParams,
    Stop,
)
from triptych.server import instance as instances
from triptych.server.instance import InstanceProcess, RoleLoops
from triptych.server.life import LifeState
from triptych.stage_loop import Handlers
from triptych.topology import Role
from triptych.types import Address, RequestId, TransferId

LAYOUT = RowLayout("model", "float32", 4, 16)
OTHER_LAYOUT = RowLayout("model", "float32", 8, 32)
FAST = LeaseConfig(heartbeat=0.02, lease_expiry=30.0, start_timeout=30.0)


@dataclass
class Recorder:
    """Records what it receives; ``on_advance`` and ``on_cancel`` may be set to fail or to dawdle."""

    received: list[Any] = field(default_factory=list)
    on_advance: Callable[[], object] = lambda: None
    on_cancel: Callable[[], object] = lambda: None
    on_idle: Callable[[], object] = lambda: None
    num_advances: int = 0
    next_advance: float = float("inf")
    context_length: int = 0
    idle: bool = True

    @property
    def handlers(self) -> Handlers:
        return {Cancel: self._on_cancel, Generate: self.received.append}

    def _on_cancel(self, message: Cancel) -> None:
        self.received.append(message)
        self.on_cancel()

    def advance(self) -> None:
        self.num_advances += 1
        self.on_advance()

    def peer_lost(self, lost: PeerLost) -> None:
        self.received.append(lost)

    def frontend_lost(self, frontend: Address) -> None:
        self.received.append(frontend)

    def on_lease_lost(self) -> None:
        self.received.append("on_lease_lost")

    def check_idle(self) -> None:
        self.on_idle()

    def add_stats(self, stats: InstanceStats) -> None:
        stats.resident_bytes = 1

    def close(self) -> None:
        self.received.append("close")


@dataclass
class RecorderBuilder:
    """A loop builder whose loops are recorders."""

    refusal: BaseException | None = None
    """What building raises, if anything."""
    built: list[Recorder] = field(default_factory=list)

    def check_role(self, role: Role) -> None:
        if role.encodes:
            raise StartError("no tower")

    def build_loops(self, role: Role) -> RoleLoops:
        if self.refusal is not None:
            raise self.refusal
        self.built.append(Recorder())
        return RoleLoops([(self.built[-1], TransferSide.CONSUMER)], [OTHER_LAYOUT])


class InstanceHarness:
    """A frontend's mailbox, and an instance in virtual time."""

    def __init__(
        self,
        wire: Wire,
        lease: LeaseConfig,
        loop: Recorder,
        others: Sequence[Mailbox],
        start_executor: StartExecutor,
    ) -> None:
        """``others`` are further frontends, which the test answers for."""
        self.channel, self.loop, self.clock = Mailbox(wire), loop, wire.clock
        self.turns = wire.instance()
        self.instance = InstanceProcess(
            name="pd0",
            role=Role.PD,
            model=ModelIdentity(),
            layouts=[LAYOUT],
            capacity=Capacity(),
            channel=self.turns,
            join=[one.address.removeprefix("tcp://") for one in (self.channel, *others)],
            lease=lease,
            clock=wire.clock,
            start_executor=start_executor,
        )
        self.instance.add_loop(loop, peer=TransferSide.PRODUCER)
        self.received: list[Message] = []
        self.turns.drive(self.instance)

    @property
    def error(self) -> StartError | None:
        """What it has ended by."""
        return self.turns.error

    def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Let time pass until something is so."""
        deadline = self.clock.monotonic() + seconds
        while not condition():
            assert self.clock.monotonic() < deadline, f"not within {seconds} s"
            assert self.clock.step()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.channel.send(self.instance.channel.address, message)

    def count(self, kind: type, seconds: float = 0.0) -> int:
        """How many have come, of one kind."""
        self.received += self.channel.receive(seconds)
        return sum(isinstance(message, kind) for message in self.received)

    def await_count(self, kind: type, count: int) -> None:
        self.until(lambda: self.count(kind) >= count)
        assert self.count(kind) == count

    def join(self, expiry: float = 30.0) -> None:
        """Takes the registration and welcomes the instance."""
        self.await_count(Register, 1)
        self.send(self.registered(expiry))
        self.until(lambda: self.instance.frontends.registered)

    def registered(self, expiry: float = 30.0) -> Registered:
        """The answer to its last registration."""
        register = self.received[_last(self.received, Register)]
        assert isinstance(register, Register)
        return Registered(expiry, self.channel.address, register.join, register.resets)

    @property
    def register_again(self) -> RegisterAgain:
        return RegisterAgain(self.channel.address)

    def change_role(self, role: Role, timeout: float = 30.0) -> ChangeRole:
        return ChangeRole(role, timeout, self.channel.address)

    def end(self) -> None:
        self.until(lambda: self.instance.life.state is LifeState.ENDED)

    def close(self) -> None:
        if self.instance.life.state is not LifeState.ENDED:
            self.instance.stop()
            self.end()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def start(wire: Wire) -> Iterator[Callable[..., InstanceHarness]]:
    harnesses: list[InstanceHarness] = []

    def start_one(
        lease: LeaseConfig = FAST,
        loop: Recorder | None = None,
        others: Sequence[Mailbox] = (),
        start_executor: StartExecutor = wire.clock.start_executor,
    ) -> InstanceHarness:
        harnesses.append(InstanceHarness(wire, lease, loop or Recorder(), others, start_executor))
        return harnesses[-1]

    yield start_one
    for harness in harnesses:
        harness.close()


def cancel(name: str) -> Cancel:
    return Cancel(RequestId(name))


def work(name: str, owner: Address) -> Generate:
    return Generate(RequestId(name), [1], b"", 1, [], SamplingParams(max_tokens=1), [], owner)


def once(work: Callable[[], object]) -> Callable[[], object]:
    """The work, the first time only."""
    left = [work]
    return lambda: left.pop()() if left else None


def fail() -> None:
    raise RuntimeError("a bug")


def test_it_registers_sends_heartbeats_and_deregisters_on_stop(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    (register,) = [message for message in harness.received if isinstance(message, Register)]
    address = harness.instance.channel.address
    assert (register.name, register.role, register.address, register.layouts) == ("pd0", Role.PD, address, [LAYOUT])
    harness.until(lambda: harness.count(Heartbeat) >= 3)
    beat = next(message for message in harness.received if isinstance(message, Heartbeat))
    assert (beat.address, beat.stats.resident_bytes) == (address, 1), "its loops have reported"
    harness.send(Stop())
    harness.end()
    harness.await_count(Deregister, 1)
    assert harness.received[-1] == Deregister(address, suspect=False)
    assert harness.error is None
    assert harness.loop.received == ["close"]


def test_rejection_ends_it(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.await_count(Register, 1)
    harness.send(RegistrationRefused("pd0", os.getpid(), "it serves another model", harness.registered().join))
    harness.end()
    assert isinstance(harness.error, StartError)
    assert "it serves another model" in str(harness.error)
    assert harness.loop.received == ["close"]


def test_a_frontend_that_does_not_answer_ends_it(start: Callable[..., InstanceHarness]) -> None:
    harness = start(LeaseConfig(heartbeat=0.02, lease_expiry=30.0, start_timeout=0.1))
    harness.end()
    assert isinstance(harness.error, StartError)
    assert harness.channel.address.removeprefix("tcp://") in str(harness.error)


def test_it_starts_over_once_however_often_it_is_asked_to_register(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    harness.send(harness.register_again, harness.register_again, harness.register_again, cancel("last"))
    harness.until(lambda: cancel("last") in harness.loop.received)
    assert harness.loop.received == [harness.channel.address, cancel("last")]
    harness.await_count(Register, 2)
    harness.send(harness.registered(), harness.register_again, cancel("very last"))
    harness.until(lambda: cancel("very last") in harness.loop.received)
    assert harness.loop.received.count(harness.channel.address) == 2, "a new lease that is lost is another matter"


def test_work_of_a_lease_that_was_lost_is_dropped(start: Callable[..., InstanceHarness]) -> None:
    """A process that was stopped may read it only after it has given up all that it worked on."""
    harness = start()
    harness.join()
    frontend = harness.channel.address
    before, other, after = work("before", frontend), work("other", Address("tcp://another")), work("after", frontend)
    harness.send(harness.register_again, before)
    harness.await_count(Register, 2)
    harness.send(harness.registered(), other, after)
    harness.until(lambda: after in harness.loop.received)
    assert harness.loop.received == [harness.channel.address, after]


def test_a_registration_that_is_not_answered_is_repeated(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.await_count(Register, 1)
    harness.until(lambda: harness.count(Register) >= 3)
    assert harness.count(Heartbeat) == 0, "without a lease there is nothing to keep"
    harness.send(harness.registered(), cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)
    assert harness.loop.received == [cancel("after")]


def test_an_answer_that_names_another_frontend_does_not_end_a_lease(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    harness.send(structs.replace(harness.registered(), frontend=Address("tcp://127.66.0.1:9")), cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)
    assert harness.instance.frontends.holds(harness.channel.address)


def test_it_may_be_asked_to_register_long_after_its_start(start: Callable[..., InstanceHarness]) -> None:
    harness = start(LeaseConfig(heartbeat=0.02, lease_expiry=30.0, start_timeout=0.3))
    harness.join()
    harness.clock.advance(0.4)
    harness.send(harness.register_again)
    harness.await_count(Register, 2)
    harness.send(harness.registered(), cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)
    assert harness.error is None


def test_standing_still_for_as_long_as_the_lease_gives_everything_up(start: Callable[..., InstanceHarness]) -> None:
    harness = start(LeaseConfig(heartbeat=0.05, lease_expiry=0.5))
    harness.join(expiry=0.5)
    assert harness.channel.address not in harness.loop.received
    harness.loop.on_advance = once(lambda: harness.clock.stand_still(0.6))
    harness.instance.channel.wake()
    harness.until(lambda: harness.channel.address in harness.loop.received)
    harness.await_count(Register, 2)
    leave, register = (
        harness.received.index(Deregister(harness.instance.channel.address, suspect=False)),
        _last(harness.received, Register),
    )
    assert leave < register, "the frontend is to fail what was under way, even if it noticed nothing"
    assert harness.loop.received.count(harness.channel.address) == 1


def test_being_a_little_late_gives_nothing_up(start: Callable[..., InstanceHarness]) -> None:
    harness = start(LeaseConfig(heartbeat=0.05, lease_expiry=30.0))
    harness.join()
    harness.loop.on_advance = once(lambda: harness.clock.stand_still(0.3))
    harness.send(cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)
    beats = harness.count(Heartbeat)
    harness.until(lambda: harness.count(Heartbeat) > beats)
    assert harness.loop.received == [cancel("after")]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BlockError("freed twice")])
def test_a_message_that_cannot_be_handled_harms_nothing_else(
    start: Callable[..., InstanceHarness], error: Exception
) -> None:
    def refuse() -> None:
        raise error

    harness = start(loop=Recorder(on_cancel=once(refuse)))
    harness.join()
    harness.send(cancel("bad"), harness.registered(), Deregister(Address("not for an instance")), cancel("good"))
    harness.until(lambda: cancel("good") in harness.loop.received)
    assert harness.loop.received == [cancel("bad"), cancel("good")]
    assert harness.error is None


def test_every_stage_loop_receives_peer_lost(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    lost = PeerLost(Address("tcp://127.0.0.1:1"), [TransferId("t")], harness.channel.address)
    harness.send(lost)
    harness.until(lambda: lost in harness.loop.received)


def test_work_of_a_frontend_whose_messages_were_lost_is_given_up(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    harness.send(MessagesLost(harness.channel.address))
    harness.await_count(Register, 2)
    assert harness.registered().resets == 1
    assert harness.loop.received == [harness.channel.address]
    deregister = harness.received[_last(harness.received, Deregister)]
    assert deregister == Deregister(harness.instance.channel.address, suspect=False, resets=0)


def test_one_that_runs_by_itself_serves_over_a_real_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It registers, tells another instance that the last message was lost, and ends when told to."""
    monkeypatch.setattr(channels, "PING_PAUSE", 0.0)
    clock, loop, received = SystemClock(), Recorder(), list[Message]()
    frontend, peer, own = (Channel(clock) for _ in range(3))
    instance = InstanceProcess(
        name="pd0",
        role=Role.PD,
        model=ModelIdentity(),
        layouts=[LAYOUT],
        capacity=Capacity(),
        channel=own,
        join=[frontend.address.removeprefix("tcp://")],
        lease=FAST,
        clock=clock,
        start_executor=started_executor,
    )
    instance.add_loop(loop, peer=TransferSide.PRODUCER)
    LossyChannel(peer, share=1.0, seed=0)
    loop.on_advance = lambda: own.send(peer.address, Heartbeat(own.address))
    thread = threading.Thread(target=instance.run, daemon=True)
    thread.start()
    try:
        (register,) = frontend.receive(10.0)
        assert isinstance(register, Register)
        frontend.send(own.address, Registered(30.0, frontend.address, register.join, register.resets))
        while not received:
            received = peer.receive(10.0)
            assert received, "no ping came"
        assert received[0] == MessagesLost(own.address)
        frontend.send(own.address, Stop())
        thread.join(10)
        assert not thread.is_alive()
        heard = list[Message]()
        while not any(isinstance(message, Deregister) for message in heard):  # after its last heartbeats
            heard = frontend.receive(10.0)
            assert heard, "it left without a word"
    finally:
        instance.stop()
        for channel in (frontend, peer, own):
            channel.close(linger=0)


def test_frontends_hear_that_messages_of_another_instance_were_lost(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    lost = MessagesLost(Address("tcp://127.0.0.1:1"))
    harness.send(lost)
    harness.await_count(MessagesLost, 1)
    assert harness.received[_last(harness.received, MessagesLost)] == lost
    assert harness.loop.received == []
    assert harness.count(Register) == 1


def test_a_leak_is_logged_and_no_reason_to_end(
    start: Callable[..., InstanceHarness], caplog: pytest.LogCaptureFixture
) -> None:
    def leak() -> None:
        raise BlockError("two pages are missing")

    harness = start(loop=Recorder(on_idle=once(leak)))
    harness.join()
    harness.until(lambda: "two pages are missing" in caplog.text)
    harness.send(cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)


def test_a_host_that_fails_starts_over(start: Callable[..., InstanceHarness], caplog: pytest.LogCaptureFixture) -> None:
    harness = start()
    harness.join()
    harness.loop.on_advance = once(fail)
    harness.instance.channel.wake()
    harness.await_count(Register, 2)
    assert [type(message) for message in harness.received if not isinstance(message, Heartbeat)] == [
        Register,
        Deregister,
        Register,
    ]
    harness.send(harness.registered(), cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)
    assert harness.loop.received == ["on_lease_lost", cancel("after")]
    assert "RuntimeError: a bug" in caplog.text, "the traceback"


def test_a_host_that_keeps_failing_ends_the_instance(
    start: Callable[..., InstanceHarness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = start()
    harness.join()
    before = harness.loop.num_advances
    harness.loop.on_advance = fail
    harness.instance.channel.wake()
    harness.end()
    assert isinstance(harness.error, InstanceBroken)
    assert "RuntimeError('a bug')" in str(harness.error)
    assert harness.loop.num_advances - before <= instances.MAX_FAILURES + 1, "it doesn't spin"
    assert any("exiting" in record.message for record in caplog.records if record.levelno == logging.ERROR)
    harness.until(lambda: harness.count(Deregister) == instances.MAX_FAILURES)
    last = harness.received[-1]
    assert isinstance(last, Deregister), "the frontend need not wait for the lease"
    assert last.suspect


@dataclass
class BrokenDevice:
    """Doesn't compute, and if it ``hangs`` doesn't even say so."""

    hangs: threading.Event | None = None
    asked: threading.Event = field(default_factory=threading.Event)

    def begin_job(self) -> None: ...

    def ask(self) -> None:
        self.asked.set()
        if self.hangs is not None:
            self.hangs.wait()
        raise RuntimeError("CUDA error")


@pytest.mark.parametrize("hangs", [False, True])
def test_an_instance_whose_device_breaks_hands_back_leaves_and_ends(
    start: Callable[..., InstanceHarness], hangs: bool
) -> None:
    loop = Giving()
    harness = start(loop=loop, **({"start_executor": started_executor} if hangs else {}))
    harness.join()
    loop.given[harness.channel.address] = HandBack(harness.instance.channel.address, [RequestId("waiting")], [])
    closed: list[bool] = []
    harness.instance.on_broken = lambda _: closed.append("close" in loop.received)
    answers = threading.Event()
    device = harness.instance.compute.device = BrokenDevice(answers if hangs else None)
    harness.instance.compute.submit(fail)
    assert device.asked.wait(10)
    harness.end()
    answers.set()
    assert isinstance(harness.error, InstanceBroken)
    assert "device" in str(harness.error)
    harness.await_count(Deregister, 1)
    kinds = [type(message) for message in harness.received if not isinstance(message, Heartbeat)]
    assert kinds == [Register, Draining, HandBack, Deregister]
    assert harness.received[-1] == Deregister(harness.instance.channel.address, suspect=True)
    assert loop.received == ["hand_back", "close"]
    assert closed == [False], "its process can end before anything is closed"


@pytest.mark.parametrize("suspect", [True, False])
def test_a_broken_instance_blames_its_work_only_if_that_may_be_why(
    start: Callable[..., InstanceHarness], suspect: bool
) -> None:
    harness = start()
    harness.join()
    harness.instance.fail(InstanceBroken("three jobs have failed", suspect=suspect))
    harness.end()
    harness.await_count(Deregister, 1)
    assert harness.received[-1] == Deregister(harness.instance.channel.address, suspect=suspect)


def test_a_broken_instance_that_cannot_hand_back_ends_all_the_same(start: Callable[..., InstanceHarness]) -> None:
    harness = start(loop=Giving(on_hand_back=fail), start_executor=started_executor)
    harness.join()
    broken: list[InstanceBroken] = []
    harness.instance.on_broken = broken.append
    answers = threading.Event()
    device = harness.instance.compute.device = BrokenDevice(answers)
    harness.instance.compute.submit(fail)
    assert device.asked.wait(10)
    with pytest.raises(RuntimeError, match="a bug"):
        harness.end()
    answers.set()
    assert ["didn't answer" in str(one) for one in broken] == [True]
    harness.await_count(Deregister, 1)


def test_an_error_of_the_loop_is_asked_about_at_the_device(start: Callable[..., InstanceHarness]) -> None:
    """As those of streams and events are, which have no job."""
    harness = start(start_executor=started_executor)
    harness.join()
    harness.instance.compute.device = BrokenDevice()
    harness.loop.on_advance = once(fail)
    harness.instance.channel.wake()
    harness.end()
    assert isinstance(harness.error, InstanceBroken)
    assert harness.count(Register, 0.1) == 1, "it doesn't start over"


def test_failures_far_apart_end_nothing(start: Callable[..., InstanceHarness], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "FAILURE_WINDOW", 0.0)
    harness = start()
    harness.join()
    for number in range(instances.MAX_FAILURES + 2):
        harness.loop.on_advance = once(fail)
        harness.instance.channel.wake()
        harness.await_count(Register, number + 2)
        harness.send(harness.registered())
    assert harness.error is None


def test_it_changes_its_role_once_all_is_done(start: Callable[..., InstanceHarness]) -> None:
    harness, builder = start(loop=Recorder(idle=False)), RecorderBuilder()
    harness.instance.loop_builder = builder
    harness.join()
    harness.send(harness.change_role(Role.P), cancel("still here"))
    harness.until(lambda: cancel("still here") in harness.loop.received)
    assert builder.built == []
    harness.loop.idle = True
    harness.instance.channel.wake()
    harness.await_count(Register, 2)
    register = harness.received[_last(harness.received, Register)]
    assert isinstance(register, Register)
    assert (register.role, register.layouts) == (Role.P, [OTHER_LAYOUT])
    assert harness.count(Deregister) == 0, "the frontend tells the others when it hears of the role"
    assert harness.loop.received == [cancel("still here"), "close"]
    harness.send(harness.registered(), cancel("for the new loop"))
    (loop,) = builder.built
    harness.until(lambda: loop.received == [cancel("for the new loop")])


@pytest.mark.parametrize(
    ("role", "refusal", "reason"),
    [
        (Role.EP, None, "no tower"),
        (Role.P, OSError("no memory"), "no memory"),
        (Role.P, BlockError("a bug"), "a bug"),
    ],
)
def test_a_change_that_cannot_be_leaves_all_as_it_was(
    start: Callable[..., InstanceHarness], role: Role, refusal: BaseException | None, reason: str
) -> None:
    harness = start()
    harness.instance.loop_builder = RecorderBuilder(refusal)
    harness.join()
    harness.send(harness.change_role(role))
    harness.await_count(RoleKept, 1)
    assert RoleKept(harness.instance.channel.address, reason) in harness.received
    harness.send(cancel("after"))
    harness.until(lambda: harness.loop.received == [cancel("after")])
    assert harness.count(Register) == 1


def test_it_reports_that_it_keeps_its_role_when_it_cannot_drain_in_time(start: Callable[..., InstanceHarness]) -> None:
    harness = start(loop=Recorder(idle=False))
    harness.instance.loop_builder = RecorderBuilder()
    harness.join()
    harness.send(harness.change_role(Role.P, 0.1))
    harness.await_count(RoleKept, 1)
    harness.loop.idle = True
    harness.send(cancel("after"))
    harness.until(lambda: harness.loop.received == [cancel("after")])
    assert harness.count(Register) == 1


def test_starting_over_forgets_the_change(start: Callable[..., InstanceHarness]) -> None:
    harness, builder = start(loop=Recorder(idle=False)), RecorderBuilder()
    harness.instance.loop_builder = builder
    harness.join()
    harness.send(harness.change_role(Role.P), harness.register_again)
    harness.await_count(Register, 2)
    harness.loop.idle = True
    harness.send(harness.registered(), cancel("after"))
    harness.until(lambda: cancel("after") in harness.loop.received)
    assert builder.built == []
    assert harness.instance.role is Role.PD


def test_one_without_other_hosts_keeps_its_role(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    harness.send(harness.change_role(Role.P))
    harness.await_count(RoleKept, 1)


@dataclass
class OtherFrontend:
    """A second frontend of an instance."""

    channel: Mailbox
    heard: list[Message] = field(default_factory=list)
    """What it was told of roles."""

    def hear(self) -> list[Message]:
        for message in self.channel.receive(0.0):
            if isinstance(message, Register):
                answer = Registered(30.0, self.channel.address, message.join, message.resets)
                self.channel.send(message.address, answer)
            if isinstance(message, Register | ChangingRole | RoleKept):
                self.heard.append(message)
        return self.heard


@pytest.fixture
def other(wire: Wire) -> OtherFrontend:
    return OtherFrontend(Mailbox(wire))


def two_frontends(start: Callable[..., InstanceHarness], other: OtherFrontend) -> InstanceHarness:
    """An instance that works, and that both frontends have."""
    harness = start(loop=Recorder(idle=False), others=[other.channel])
    harness.instance.loop_builder = RecorderBuilder()
    harness.join()
    harness.until(lambda: other.hear() and harness.instance.frontends.holds(other.channel.address))
    other.heard.clear()
    return harness


def test_every_frontend_hears_of_a_change_and_a_second_one_is_refused(
    start: Callable[..., InstanceHarness], other: OtherFrontend
) -> None:
    harness = two_frontends(start, other)
    address = harness.instance.channel.address
    changing = ChangingRole(address, Role.P)
    harness.send(harness.change_role(Role.P))
    harness.until(lambda: other.hear() == [changing])
    harness.send(ChangeRole(Role.D, 30.0, other.channel.address))
    kept = RoleKept(address, "it is changing to P, as another frontend has asked")
    harness.until(lambda: other.hear() == [changing, kept, changing])
    harness.loop.idle = True
    harness.instance.channel.wake()
    harness.until(lambda: any(isinstance(one, Register) and one.role is Role.P for one in other.hear()))
    harness.await_count(Register, 2)
    assert harness.count(ChangingRole) == 2
    assert harness.count(RoleKept) == 0, "the first change goes on"


@pytest.mark.parametrize("asks", ["the one that ends", "the one that stays"])
def test_a_change_ends_with_the_frontend_that_asked_for_it(
    start: Callable[..., InstanceHarness], other: OtherFrontend, asks: str
) -> None:
    harness = two_frontends(start, other)
    ending = asks == "the one that ends"
    asking = other.channel.address if ending else harness.channel.address
    harness.send(ChangeRole(Role.P, 30.0, asking), FrontendEnding(other.channel.address))
    harness.await_count(ChangingRole, 1)
    harness.until(lambda: other.channel.address in harness.loop.received)
    harness.loop.idle = True
    harness.instance.channel.wake()
    if ending:
        harness.await_count(RoleKept, 1)
        lost = "the frontend that asked for the change is lost"
        assert RoleKept(harness.instance.channel.address, lost) in harness.received
    else:
        harness.await_count(Register, 2)
    assert harness.instance.role is (Role.PD if ending else Role.P)


@dataclass
class Giving(Recorder):
    """A loop that gives up what hasn't begun."""

    given: dict[Address, HandBack] = field(default_factory=dict)
    on_hand_back: Callable[[], object] = lambda: None

    def hand_back(self) -> dict[Address, HandBack]:
        self.received.append("hand_back")
        self.on_hand_back()
        return self.given


def test_work_that_a_drain_leaves_is_not_blamed_for_its_end(start: Callable[..., InstanceHarness]) -> None:
    """Or an answer that is longer than several drains would be given up as what ends instances."""
    lease = LeaseConfig(heartbeat=0.02, lease_expiry=30.0, start_timeout=30.0, drain_timeout=0.05)
    harness = start(lease, loop=Recorder(idle=False))
    harness.join()
    harness.instance.drain()
    harness.end()
    harness.await_count(Deregister, 1)
    assert harness.received[-1] == Deregister(harness.instance.channel.address, suspect=False)


def test_work_that_fails_a_draining_instance_is_blamed(start: Callable[..., InstanceHarness]) -> None:
    loop = Recorder(idle=False)
    harness = start(loop=loop)
    harness.join()
    harness.instance.drain()
    harness.await_count(Draining, 1)
    loop.on_advance = once(fail)
    harness.send(cancel("wakes it"))
    harness.end()
    harness.until(lambda: harness.count(Deregister) == 2)
    left = [message for message in harness.received if isinstance(message, Deregister)]
    assert [message.suspect for message in left] == [True, False]


def test_a_drain_finishes_the_work_and_hands_back_what_has_not_begun(start: Callable[..., InstanceHarness]) -> None:
    loop = Giving(idle=False)
    harness = start(loop=loop)
    harness.join()
    address = harness.instance.channel.address
    loop.given[harness.channel.address] = HandBack(address, [RequestId("waiting")], [TransferId("t")])
    assert harness.instance.pulse.why_not_ready() == ""
    harness.instance.drain()
    harness.await_count(HandBack, 1)
    drains = [message for message in harness.received if isinstance(message, Draining | HandBack)]
    assert drains == [Draining(address), loop.given[harness.channel.address]]
    harness.until(lambda: harness.instance.pulse.why_not_ready() == "draining")
    harness.send(cancel("still here"), harness.change_role(Role.P))
    harness.await_count(RoleKept, 1)
    assert RoleKept(address, "it is draining") in harness.received
    assert harness.count(Deregister) == 0
    loop.idle = True
    harness.end()
    harness.await_count(Deregister, 1)
    assert loop.received == ["hand_back", cancel("still here"), "close"]
    assert harness.error is None


def test_a_drain_ends_in_time_and_a_second_one_at_once(start: Callable[..., InstanceHarness]) -> None:
    lease = LeaseConfig(heartbeat=0.02, lease_expiry=30.0, start_timeout=30.0, drain_timeout=0.2)
    harness = start(lease, Recorder(idle=False))
    harness.join()
    harness.instance.drain()
    harness.end()
    other = start(loop=Recorder(idle=False))
    other.join()
    other.instance.drain()
    other.await_count(Draining, 1)
    other.instance.drain()
    other.end()
    other.await_count(Deregister, 1)


def test_a_drain_that_loses_its_lease_has_nothing_left_to_do(start: Callable[..., InstanceHarness]) -> None:
    harness = start(loop=Recorder(idle=False))
    harness.join()
    harness.instance.drain()
    harness.await_count(Draining, 1)
    harness.send(harness.register_again)
    harness.end()
    assert harness.count(Register) == 1
    assert harness.loop.received == [harness.channel.address, "close"]


def test_its_incarnation_is_its_supervisors_or_the_time_of_its_start(start: Callable[..., InstanceHarness]) -> None:
    harness = start()
    harness.join()
    (register,) = [message for message in harness.received if isinstance(message, Register)]
    assert register.incarnation == 100_000, "in milliseconds"


def _last(messages: list[Message], kind: type) -> int:
    return max(index for index, message in enumerate(messages) if isinstance(message, kind))
