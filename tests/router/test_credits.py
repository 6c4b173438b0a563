"""Credits that change, and queues that wait for one: nothing waits longer than it must, and looking costs little."""

from collections.abc import Callable, Container

import pytest

from tests.support.router_harness import E0, PD0, RouterHarness
from triptych.messages.work import Credit, Encode, Generate, Heartbeat, RoleKept
from triptych.router.request_state import RequestState


def test_what_waits_is_dispatched_once_a_credit_grows() -> None:
    harness = RouterHarness(E0, PD0)
    for address in (E0, PD0):
        harness.router.handle(Heartbeat(address, harness.stats, Credit(1, 1, 1)))  # another frontend has the rest
    pictures = [harness.submit(1.0)]
    harness.need(pictures[0], 0)
    texts = [harness.submit() for _ in range(4)]
    pictures += [harness.submit(1.0) for _ in range(3)]
    assert len(harness.of(Generate)) == 2
    harness.wait(0.25, E0, PD0)
    assert len(harness.of(Generate)) == len(texts + pictures), "though nothing has ended"
    for stream in pictures[1:]:
        harness.need(stream, 0)
    assert len(harness.of(Encode)) == len(pictures)


def test_what_waits_is_dispatched_to_an_instance_that_keeps_its_role() -> None:
    harness = RouterHarness(PD0, restart_hold=60.0)
    harness.wait(0.25, PD0)
    harness.lease(PD0).next_role = harness.lease(PD0).role
    harness.submit()
    assert not harness.of(Generate)
    harness.router.handle(RoleKept(PD0, "it was not done in time"))
    harness.wait(0.25, PD0)
    assert len(harness.of(Generate)) == 1


def test_queued_media_requests_are_not_looked_through_while_none_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RouterHarness(E0, PD0, max_queue=1000, max_num_seqs=4)
    for number in range(500):
        harness.submit(1.0, client=f"client {number}")
    admission = harness.router.lifecycle.admission
    looked, take_next = list[RequestState](), admission.next

    def count(may_start: Callable[[RequestState], bool], kinds: Container[str]) -> RequestState | None:
        def noted(state: RequestState) -> bool:
            looked.append(state)
            return may_start(state)

        return take_next(noted, kinds)

    monkeypatch.setattr(admission, "next", count)
    text = harness.submit()
    assert [state.id for state in looked] == [text.request]
