"""What becomes of requests when instances are lost, drain, or are replaced: a router without sockets."""

from dataclasses import replace

import pytest
from msgspec import structs

from tests.support.plans import plan_of
from tests.support.router_harness import (
    D0,
    D1,
    E0,
    E1,
    EPD0,
    EXPIRY,
    FRONTEND,
    P0,
    P1,
    PD0,
    PD1,
    RouterHarness,
    prompt,
    request_of,
    tokens_of,
)
from triptych.errors import ErrorKind, InstanceLost, InternalError, Unavailable
from triptych.job_faults import Culprit
from triptych.messages.work import (
    Cancel,
    Deregister,
    Draining,
    Encode,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    Generate,
    HandBack,
    MessagesLost,
    MissingItem,
    PeerLost,
    Prefill,
    PrefillNeeded,
    Register,
    RegisterAgain,
    SamplingParams,
    Stop,
    Tokens,
)
from triptych.router.instance import WorkKind
from triptych.router.instance_messages import RESET_PAUSE
from triptych.router.membership import AVOIDED_SECONDS
from triptych.router.quarantine import MAX_FORGIVEN, MAX_LOSSES
from triptych.router.request_state import MAX_FAILURES
from triptych.router.stream import TokenStream
from triptych.topology import Role
from triptych.types import Address, TransferId


def encode_targets(harness: RouterHarness) -> list[tuple[Address, TransferId, list[int]]]:
    """Encode instances that were sent an item, its transfer, and the parts."""
    return [(to, message.transfer, message.parts) for to, message in harness.of(Encode)]


def ask_again(harness: RouterHarness, stream: TokenStream, transfer: TransferId, first_row: int) -> None:
    missing = MissingItem(0, transfer, first_row, attempt=1)
    harness.router.handle(EncodeNeeded(stream.request, PD0, [missing], asked=1))


def ask_for(harness: RouterHarness, stream: TokenStream, at: Address, attempt: int) -> None:
    """Ask for a request's only item."""
    missing = MissingItem(0, TransferId(f"{stream.request}/0"), attempt=attempt)
    request = harness.router.debug_state().requests[stream.request].generate.request
    harness.router.handle(EncodeNeeded(request, at, [missing], asked=attempt))


def finish(harness: RouterHarness, stream: TokenStream) -> list[int]:
    state = harness.router.debug_state().requests[stream.request]
    harness.router.handle(Tokens(state.generate.request, [7], len(state.generated), finish_reason="stop"))
    return tokens_of(stream)


def test_items_of_a_lost_encode_instance_go_to_another_under_the_same_name() -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    lost = encode_targets(harness)[0][0]
    harness.router.handle(Deregister(lost))
    assert harness.of(PeerLost)[-1] == (PD0, PeerLost(lost, [transfer], FRONTEND))
    ask_again(harness, stream, transfer, first_row=1)
    other = E1 if lost == E0 else E0
    assert encode_targets(harness)[1:] == [(other, transfer, [0])]
    harness.router.handle(Encoded(transfer, False, [], attempt=1))
    assert finish(harness, stream) == [7]
    assert harness.outstanding() == 0


@pytest.mark.parametrize(("first_row", "parts"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [1, 2]), (4, [1]), (5, None)])
def test_parts_whose_rows_have_landed_are_not_encoded_again(first_row: int, parts: list[int] | None) -> None:
    """The second part's rows are around the third's. A consumer that needs no row of an item gets none."""
    plan = plan_of(2, 2, 1, cost=30.0)
    runs = ((0, 2),), ((2, 1), (4, 1)), ((3, 1),)
    made = tuple(structs.replace(part, runs=where) for part, where in zip(plan.parts, runs, strict=True))
    one = replace(prompt(1.0).items[0], plan=structs.replace(plan, parts=made))
    harness = RouterHarness(E0, PD0)
    planned = replace(prompt(1.0), items=(one,))
    stream = harness.router.lifecycle.submit(request_of(), planned, SamplingParams(max_tokens=4), [])
    before = harness.outstanding()
    ask_again(harness, stream, TransferId("t"), first_row)
    assert encode_targets(harness) == ([] if parts is None else [(E0, "t", parts)])
    assert harness.outstanding() == before + 10 * len(parts or [])


def test_what_a_former_encode_instance_says_of_an_item_is_ignored() -> None:
    """It may have been stopped, and report what became of the item after another one has it."""
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    failed = EncodeFailed(transfer, ErrorKind.INTERNAL_ERROR, "it was stopped")
    harness.router.handle(Deregister(encode_targets(harness)[0][0]))
    harness.router.handle(failed)
    ask_again(harness, stream, transfer, first_row=0)
    busy = harness.outstanding()
    harness.router.handle(failed)
    harness.router.handle(Encoded(transfer, False, []))
    assert harness.outstanding() == busy, "the other one still works on it"
    harness.router.handle(structs.replace(failed, attempt=1))
    with pytest.raises(InternalError, match="it was stopped"):
        tokens_of(stream)
    assert harness.outstanding() == 0


def test_rows_that_were_reported_but_have_not_landed_are_asked_for_again() -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    lost = encode_targets(harness)[0][0]
    harness.router.handle(Encoded(transfer, False, []))
    harness.router.handle(Deregister(lost))
    assert harness.of(PeerLost)[-1][1].transfers == [transfer]
    ask_again(harness, stream, transfer, first_row=1)
    assert len(encode_targets(harness)) == 2


def test_items_wait_for_the_last_encode_instance_and_texts_go_on() -> None:
    harness = RouterHarness(E0, PD0, restart_hold=5.0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    harness.router.handle(Deregister(E0))
    ask_again(harness, stream, transfer, first_row=0)
    assert finish(harness, harness.submit()) == [7]
    later = harness.submit(1.0)
    harness.wait(2, PD0)
    harness.register(E0, pid=2)
    harness.need(later, 0)
    assert {name for _, name, _ in encode_targets(harness)} >= {transfer}
    assert finish(harness, stream) == [7]
    assert finish(harness, later) == [7]


def test_items_are_given_up_when_no_encode_instance_returns() -> None:
    harness = RouterHarness(E0, PD0, restart_hold=5.0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    harness.router.handle(Deregister(E0))
    ask_again(harness, stream, transfer, first_row=0)
    harness.wait(6, PD0)
    with pytest.raises(InstanceLost):
        tokens_of(stream)
    with pytest.raises(Unavailable):
        harness.submit(1.0)


def test_a_request_that_waits_for_a_stage_at_its_deadline_gets_503_not_504() -> None:
    harness = RouterHarness(E0, PD0, restart_hold=60.0)
    harness.router.handle(Deregister(E0))
    stream = harness.submit(1.0, timeout=2.0)
    harness.need(stream, 0)
    harness.wait(3, PD0)
    with pytest.raises(Unavailable):
        tokens_of(stream)


def test_requests_wait_in_the_queue_while_the_only_language_instance_restarts() -> None:
    harness = RouterHarness(PD0, restart_hold=5.0)
    begun = harness.submit()
    harness.router.handle(Tokens(begun.request, [5], 0))
    harness.router.handle(Deregister(PD0))
    queued = harness.submit()
    assert harness.router.debug_state().queued == {begun.request, queued.request}
    harness.wait(1)
    harness.register(PD0, pid=2)
    first, second = (message for _, message in harness.of(Generate)[-2:])
    assert (first.generated, second.generated) == ([5], []), "the request that had begun goes first"
    assert finish(harness, begun) == [5, 7]
    assert finish(harness, queued) == [7]


def test_work_of_an_instance_of_which_messages_were_lost_is_done_again_and_not_blamed() -> None:
    harness = RouterHarness(PD0, restart_hold=60.0)
    stream = harness.submit()
    for resets in range(1, 5):
        harness.wait(RESET_PAUSE, PD0)
        harness.router.handle(MessagesLost(PD0))
        assert harness.of(RegisterAgain) == [(PD0, RegisterAgain(FRONTEND))] * resets
        assert harness.router.debug_state().queued == {stream.request}
        harness.register(PD0, resets=resets)
    assert len(harness.of(Generate)) == 5
    assert finish(harness, stream) == [7]


def test_work_that_an_instance_gives_up_for_other_reasons_is_not_blamed() -> None:
    """Also if the message that says so is overtaken by the registration after it."""
    harness = RouterHarness(PD0, restart_hold=60.0)
    stream = harness.submit()
    for resets in range(1, 5):
        harness.register(PD0, resets=resets, suspect=False)
    assert harness.router.debug_state().requests[stream.request].losses == 0
    assert finish(harness, stream) == [7]


def stand_still(harness: RouterHarness, *, resets: int, suspect: bool = False) -> None:
    """Let PD0 send nothing for as long as a lease lasts, and come back."""
    harness.wait(EXPIRY + 1)
    harness.register(PD0, resets=resets, suspect=suspect)


def test_an_instance_that_stood_still_and_is_back_was_not_ended_by_its_requests() -> None:
    harness = RouterHarness(PD0, restart_hold=60.0, request_timeout=600.0)
    stream = harness.submit()
    for resets in range(1, MAX_FORGIVEN + 1):
        stand_still(harness, resets=resets)
        assert harness.router.debug_state().requests[stream.request].losses == 0
    assert finish(harness, stream) == [7]


@pytest.mark.parametrize("suspect", [True, False])
def test_a_request_by_which_instances_stand_still_is_given_up(suspect: bool) -> None:
    harness = RouterHarness(PD0, restart_hold=60.0, request_timeout=600.0)
    stream = harness.submit()
    for resets in range(1, MAX_LOSSES + (0 if suspect else MAX_FORGIVEN) + 1):
        assert stream.request in harness.router.debug_state().requests
        stand_still(harness, resets=resets, suspect=suspect)
    with pytest.raises(InstanceLost, match="3 instances"):
        tokens_of(stream)


def test_another_process_in_place_of_a_silent_one_excuses_nothing() -> None:
    harness = RouterHarness(PD0, restart_hold=60.0, request_timeout=600.0)
    stream = harness.submit()
    harness.wait(EXPIRY + 1)
    harness.register(PD0, pid=2, suspect=False)
    assert harness.router.debug_state().requests[stream.request].losses == 1


def test_a_process_that_stood_still_is_known_again_after_others_of_its_name() -> None:
    harness = RouterHarness(PD0, restart_hold=60.0, request_timeout=600.0)
    stream = harness.submit()
    harness.wait(EXPIRY + 1)
    harness.register(PD0, pid=2, suspect=False)
    harness.router.handle(Deregister(PD0))
    openings = harness.router.lifecycle.requests.num_openings
    harness.register(PD0, suspect=False)
    assert harness.router.debug_state().requests[stream.request].losses == 1, "by the second alone"
    assert harness.router.lifecycle.requests.num_openings > openings


def test_others_drop_their_transfers_with_an_instance_of_which_messages_were_lost() -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    sender = encode_targets(harness)[0][0]
    harness.wait(RESET_PAUSE, E0, E1, PD0)
    harness.router.handle(MessagesLost(sender))  # PD0 says so
    assert harness.of(PeerLost)[-1] == (PD0, PeerLost(sender, [transfer], FRONTEND, is_alive=True, suspect=False))
    ask_again(harness, stream, transfer, first_row=1)
    assert encode_targets(harness)[-1] == (({E0, E1} - {sender}).pop(), transfer, [0])


def test_many_connections_that_break_at_once_reset_an_instance_once_more() -> None:
    harness = RouterHarness(PD0)
    harness.wait(RESET_PAUSE, PD0)
    for _ in range(3):
        harness.router.handle(MessagesLost(PD0))
    harness.register(PD0, resets=1)
    harness.wait(RESET_PAUSE / 3, PD0)
    for _ in range(3):
        harness.router.handle(MessagesLost(PD0))
    harness.wait(RESET_PAUSE / 2, PD0)
    assert len(harness.of(RegisterAgain)) == 1
    harness.wait(RESET_PAUSE / 2)
    assert len(harness.of(RegisterAgain)) == 2
    harness.register(PD0, resets=2)
    harness.wait(2 * RESET_PAUSE, PD0)
    harness.router.handle(MessagesLost(D0))  # one that isn't here
    assert len(harness.of(RegisterAgain)) == 2


def test_a_request_is_given_up_after_three_instances_were_lost_while_they_worked_on_it() -> None:
    harness = RouterHarness(PD0, restart_hold=60.0)
    harmful = harness.submit()
    for pid in (2, 3, 4):
        harness.router.handle(Deregister(PD0))
        harness.register(PD0, pid=pid)
    with pytest.raises(InstanceLost, match="3 instances"):
        tokens_of(harmful)
    assert finish(harness, harness.submit()) == [7]


def test_an_item_that_ends_its_encode_instances_is_given_up_and_others_are_not() -> None:
    harness = RouterHarness(E0, PD0, restart_hold=60.0)
    harmful, other = harness.submit(1.0), harness.submit(1.0)
    [transfer] = harness.need(harmful, 0)
    for pid in (2, 3, 4):
        harness.router.handle(Deregister(E0))
        harness.register(E0, pid=pid)
        if pid < 4:
            ask_again(harness, harmful, transfer, first_row=0)
    with pytest.raises(InstanceLost, match="3 instances"):
        tokens_of(harmful)
    [wanted] = harness.need(other, 0)
    harness.router.handle(Encoded(wanted, False, []))
    assert finish(harness, other) == [7]


def test_items_beside_one_that_ends_its_encode_instances_are_not_given_up_with_it() -> None:
    """Requests that may be the cause are tried one at a time; what isn't suspect goes on beside them."""
    harness = RouterHarness(E0, PD0, restart_hold=60.0)
    streams = [harness.submit(1.0) for _ in range(3)]
    transfers = [harness.need(stream, 0)[0] for stream in streams]
    for attempt in (1, 2):
        harness.router.handle(Deregister(E0))
        harness.register(E0, pid=1 + attempt)
        for stream, transfer in zip(streams, transfers, strict=True):
            missing = MissingItem(0, transfer, attempt=attempt)
            harness.router.handle(EncodeNeeded(stream.request, PD0, [missing], asked=attempt))
    assert len(encode_targets(harness)) == 3 + 3 + 1, "one of them is tried"
    later = harness.submit(1.0)
    harness.need(later, 0)
    assert len(encode_targets(harness)) == 8
    [harmful] = [number for number, transfer in enumerate(transfers) if encode_targets(harness)[6][1] == transfer]
    harness.router.handle(Deregister(E0))
    with pytest.raises(InstanceLost, match="3 instances"):
        tokens_of(streams.pop(harmful))
    transfers.pop(harmful)
    harness.register(E0, pid=4)
    for transfer in transfers:
        assert encode_targets(harness)[-1][1] == transfer, "the next one is tried"
        harness.router.handle(Encoded(transfer, False, [], attempt=2))
    assert [finish(harness, stream) for stream in (*streams, later)] == [[7]] * 3
    assert harness.outstanding() == 0


@pytest.mark.parametrize("ends", ["answered", "whole", "given up", "cancelled", "moved"])
def test_prompts_beside_one_that_ends_its_prefill_instances_are_not_given_up_with_it(ends: str) -> None:
    harness = RouterHarness(P0, D0, restart_hold=60.0)
    harmful, other = harness.submit(), harness.submit()

    def ask(stream: TokenStream, attempt: int) -> None:
        transfer = TransferId(f"{stream.request}/{attempt}")
        harness.router.handle(PrefillNeeded(stream.request, D0, transfer, 0, [], asked=attempt))

    for attempt in range(3):
        if attempt:
            harness.router.handle(Deregister(P0))
            harness.register(P0, pid=1 + attempt)
        ask(harmful, attempt)
        ask(other, attempt)
    assert [message.generate.request for _, message in harness.of(Prefill)][4:] == [harmful.request]
    if ends == "answered":
        harness.router.handle(Tokens(harmful.request, [5], 0))
    elif ends == "whole":  # with its first report
        assert finish(harness, harmful) == [7]
    elif ends == "given up":
        harness.router.handle(Deregister(P0))
        with pytest.raises(InstanceLost, match="3 instances"):
            tokens_of(harmful)
        harness.register(P0, pid=4)
    elif ends == "cancelled":
        harness.router.lifecycle.cancel(harmful.request)
    else:  # tokens were lost, so it begins again elsewhere
        harness.router.handle(Tokens(harmful.request, [5], 1))
    assert [message.generate.request for _, message in harness.of(Prefill)][5:] == [other.request]
    assert finish(harness, other) == [7]
    if ends in {"answered", "moved"}:
        assert finish(harness, harmful) == ([5, 7] if ends == "answered" else [7])
    assert harness.outstanding() == 0


def test_a_suspect_waits_for_a_draining_prefill_instance_that_tries_another() -> None:
    harness = RouterHarness(P0, D0, restart_hold=5.0)
    streams = [harness.submit(), harness.submit()]
    for attempt in range(3):
        if attempt:
            harness.router.handle(Deregister(P0))
            harness.register(P0, pid=1 + attempt)
        for stream in streams:
            transfer = TransferId(f"{stream.request}/{attempt}")
            harness.router.handle(PrefillNeeded(stream.request, D0, transfer, 0, [], asked=attempt))
    harness.router.handle(Draining(P0))
    harness.wait(6, P0, D0)
    harness.router.handle(Tokens(streams[0].request, [5], 0))
    assert harness.of(Prefill)[-1][1].generate.request == streams[1].request
    assert [finish(harness, stream) for stream in streams] == [[5, 7], [7]]


def test_a_suspect_waits_for_a_draining_encode_instance_that_tries_another() -> None:
    harness = RouterHarness(E0, PD0, restart_hold=5.0)
    streams = [harness.submit(1.0), harness.submit(1.0)]
    for attempt in range(3):
        if attempt:
            harness.router.handle(Deregister(E0))
            harness.register(E0, pid=1 + attempt)
        for stream in streams:
            ask_for(harness, stream, PD0, attempt)
    harness.router.handle(Draining(E0))
    harness.wait(6, E0, PD0)
    for stream in streams:
        assert encode_targets(harness)[-1][1] == TransferId(f"{stream.request}/0")
        harness.router.handle(Encoded(TransferId(f"{stream.request}/0"), False, [], attempt=2))
    assert [finish(harness, stream) for stream in streams] == [[7], [7]]


def test_prompts_that_wait_for_prefill_go_to_an_instance_that_needs_none() -> None:
    harness = RouterHarness(P0, D0, restart_hold=60.0)
    stream = harness.submit()
    harness.router.handle(Deregister(P0))
    harness.router.handle(PrefillNeeded(stream.request, D0, TransferId("t"), 0, []))
    harness.register(PD0)
    assert harness.of(Generate)[-1][0] == PD0
    assert finish(harness, stream) == [7]


def test_queued_items_of_a_suspect_block_no_other_item() -> None:
    """Those that were queued before it became suspect, too."""
    harness = RouterHarness(E0, PD0, restart_hold=60.0, encode_batch_patches=1)  # four items at a time
    first, second = harness.submit(*[1.0] * 6, client="a"), harness.submit(1.0, priority=-1)
    [tried] = harness.need(second, 0)
    transfers = harness.need(first, *range(6))

    def ask(stream: TokenStream, attempt: int, transfers: list[TransferId]) -> None:
        missing = [MissingItem(item, transfer, attempt=attempt) for item, transfer in enumerate(transfers)]
        harness.router.handle(EncodeNeeded(stream.request, PD0, missing, asked=attempt))

    harness.router.handle(Deregister(E0))
    harness.register(E0, pid=2)
    ask(second, 1, [tried])
    ask(first, 1, transfers[:3])
    harness.router.handle(Deregister(E0))
    ask(second, 2, [tried])
    harness.register(E0, pid=3)
    assert encode_targets(harness)[-1][1] == tried, "it has priority"
    [wanted] = harness.need(harness.submit(1.0, client="a"), 0)
    assert encode_targets(harness)[-1][1] == wanted


def test_a_suspect_that_waits_for_another_ones_trial_does_not_hold_that_ones_item_up() -> None:
    harness = RouterHarness(EPD0, restart_hold=60.0)
    streams = [harness.submit(1.0), harness.submit(1.0)]
    harness.router.handle(Deregister(EPD0))
    harness.register(EPD0, pid=2)
    harness.router.handle(Deregister(EPD0))
    harness.register(PD0)  # gets one of them
    harness.register(EPD0, pid=3)
    dispatches = harness.of(Generate)[-2:]
    assert [to for to, _ in dispatches] == [PD0, EPD0]
    now = [harness.router.debug_state().requests[stream.request].generate.request for stream in streams]
    other, tried = (streams[now.index(message.request)] for _, message in dispatches)
    ask_for(harness, other, PD0, 2)  # the instance that encodes has another suspect
    ask_for(harness, tried, EPD0, 2)
    assert encode_targets(harness)[-1][:2] == (EPD0, TransferId(f"{tried.request}/0"))
    harness.router.handle(Encoded(TransferId(f"{tried.request}/0"), False, [], attempt=2))
    harness.router.handle(Tokens(harness.router.debug_state().requests[tried.request].generate.request, [5], 0))
    assert encode_targets(harness)[-1][:2] == (EPD0, TransferId(f"{other.request}/0"))


def test_two_suspects_that_are_at_one_instance_have_their_items_encoded_there() -> None:
    """They were at it when an encode instance was lost for the second time."""
    harness = RouterHarness(EPD0, restart_hold=60.0)
    streams = [harness.submit(1.0), harness.submit(1.0)]
    harness.register(E0)
    for attempt in (0, 1, 2):
        if attempt:
            harness.router.handle(Deregister(E0))
            if attempt == 1:
                harness.register(E0, pid=2)
        for stream in streams:
            ask_for(harness, stream, EPD0, attempt)
    for _ in streams:
        to, transfer, _ = encode_targets(harness)[-1]
        assert to == EPD0
        harness.router.handle(Encoded(transfer, False, [], attempt=2))
    assert [finish(harness, stream) for stream in streams] == [[7], [7]]


def test_a_draining_instance_gets_nothing_new_and_its_work_that_has_not_begun_moves() -> None:
    harness = RouterHarness(PD0, PD1)
    streams = [harness.submit() for _ in range(4)]
    at = {stream.request: to for (to, _), stream in zip(harness.of(Generate), streams, strict=True)}
    mine = [stream for stream in streams if at[stream.request] == PD0]
    harness.router.handle(Draining(PD0))
    harness.router.handle(HandBack(PD0, [mine[1].request], []))
    assert [(to, message.request) for to, message in harness.of(Generate)[4:]] == [(PD1, f"{mine[1].request}.1")]
    assert harness.lease(PD0).account.num(WorkKind.READY) == 1
    harness.submit()
    assert harness.of(Generate)[-1][0] == PD1
    assert finish(harness, mine[0]) == [7], "what it has begun it finishes"
    harness.router.handle(Deregister(PD0))
    assert all(finish(harness, stream) == [7] for stream in streams if stream is not mine[0])
    assert all(state.losses == 0 for state in harness.router.debug_state().requests.values())


def test_an_attempt_that_is_handed_back_late_is_not_mistaken_for_the_next_one() -> None:
    """The consumer asks again before the frontend hears that the instance drains, and which attempt it gives up."""
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    again = MissingItem(0, transfer, attempt=1)
    harness.router.handle(EncodeNeeded(stream.request, PD0, [again], asked=1))
    harness.router.handle(Draining(E0))
    harness.router.handle(HandBack(E0, [], [transfer]))
    assert [message.attempt for _, message in harness.of(Encode)] == [0, 1]
    harness.register(E1)
    harness.router.handle(Deregister(E0, suspect=False))
    [lost] = [message for to, message in harness.of(PeerLost) if to == PD0]
    assert lost.transfers == [transfer], "its consumer must hear of it"
    harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, transfer, attempt=2)], asked=2))
    harness.router.handle(HandBack(E1, [], [transfer], {transfer: 2}))
    harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, transfer, attempt=3)], asked=3))
    harness.router.handle(Encoded(transfer, False, [], attempt=3))
    assert finish(harness, stream) == [7]


def test_items_that_a_draining_encode_instance_returns_go_to_another() -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0, 1.0)
    transfers = harness.need(stream, 0, 1)
    at_e0 = [name for to, name, _ in encode_targets(harness) if to == E0]
    harness.router.handle(Draining(E0))
    harness.router.handle(HandBack(E0, [], [*at_e0, TransferId("unknown")]))
    needed = MissingItem(transfers.index(at_e0[0]), at_e0[0], attempt=1)
    harness.router.handle(EncodeNeeded(stream.request, PD0, [needed]))  # the instance has told the consumer
    assert [(to, name) for to, name, _ in encode_targets(harness)[2:]] == [(E1, at_e0[0])]
    for transfer in transfers:
        harness.router.handle(Encoded(transfer, False, [], attempt=int(transfer in at_e0)))
    assert finish(harness, stream) == [7]
    assert harness.outstanding() == 0


def test_a_prompt_that_a_draining_prefill_instance_returns_goes_to_another() -> None:
    harness = RouterHarness(P0, P1, D0)
    stream = harness.submit()
    harness.router.handle(PrefillNeeded(stream.request, D0, TransferId("kv"), 0, []))
    first = harness.of(Prefill)[-1][0]
    harness.router.handle(Draining(first))
    harness.router.handle(HandBack(first, [stream.request], []))
    to, again = harness.of(Prefill)[-1]
    assert (to, again.transfer) == (P1 if first == P0 else P0, "kv")


def test_a_decode_instance_waits_for_the_prefill_instance_that_restarts() -> None:
    harness = RouterHarness(P0, D0, restart_hold=5.0)
    stream = harness.submit()
    harness.router.handle(PrefillNeeded(stream.request, D0, TransferId("kv1"), 0, []))
    harness.router.handle(Deregister(P0))
    harness.router.handle(PrefillNeeded(stream.request, D0, TransferId("kv2"), 0, []))
    assert len(harness.of(Prefill)) == 1
    harness.register(P0, pid=2)
    assert harness.of(Prefill)[-1][1].transfer == "kv2"
    assert finish(harness, stream) == [7]
    assert harness.outstanding() == 0


def test_of_two_instances_of_one_name_the_older_is_told_to_stop() -> None:
    harness = RouterHarness(D0, D1, P0)
    stream = harness.submit()
    (old, _), new = harness.of(Generate)[0], Address("elsewhere")
    lease = harness.lease(old)
    register = Register(lease.name, Role.D, new, lease.layouts, 9, 5, harness.capacity, 100)
    harness.router.handle(register)
    assert harness.of(Stop) == [(old, Stop())]
    assert harness.router.membership.get(old) is None
    moved = harness.of(Generate)[-1]
    assert moved[1].request == f"{stream.request}.1"
    harness.register(old, pid=1, incarnation=1)
    assert harness.of(Stop)[-1] == (old, Stop())
    assert harness.router.membership.get(old) is None, "an older one that wakes up stays out"
    assert [one.address for one in harness.router.membership.named(lease.name)] == [new]


@pytest.mark.parametrize("others", [1, 12])
def test_a_request_that_ends_each_of_its_instances_takes_no_other_with_it(others: int) -> None:
    """Though all of them were on each instance that was lost before."""
    harness = RouterHarness(PD0, PD1, restart_hold=60.0, max_queue=20)
    poison, *rest = [harness.submit() for _ in range(others + 1)]
    streams = {stream.request: stream for stream in rest}
    answered: dict[str, list[int]] = {}
    pid = 1
    for _ in range(100):
        requests = harness.router.debug_state().requests
        if not requests:
            break
        state = requests.get(poison.request)
        if state is not None and state.decode is not None:
            victim = state.decode.instance.address
            harness.router.handle(Deregister(victim))
            pid += 1
            harness.register(victim, pid=pid)
            continue
        name = next(one.id for one in requests.values() if one.decode is not None)
        answered[name] = finish(harness, streams[name])
    with pytest.raises(InstanceLost, match="given up after 3"):
        tokens_of(poison)
    assert answered == {stream.request: [7] for stream in rest}
    assert harness.outstanding() == 0


def test_late_messages_of_a_request_that_moved_are_ignored() -> None:
    harness = RouterHarness(PD0, PD1)
    stream = harness.submit()
    first = harness.of(Generate)[0][0]
    harness.router.handle(Tokens(stream.request, [1], 0))
    harness.router.handle(Deregister(first))
    assert harness.of(Cancel)[-1] == (first, Cancel(stream.request))
    harness.router.handle(Tokens(stream.request, [66], 1, finish_reason="stop"))
    assert finish(harness, stream) == [1, 7]


# ── failures that may be an instance's own ───────────────────────────────────────────────────────────────────


def fails(harness: RouterHarness, stream: TokenStream, at: Address, culprit: Culprit = Culprit.UNCLEAR) -> None:
    """An instance reports that a request has failed there."""
    request = harness.router.debug_state().requests[stream.request].generate.request
    harness.router.handle(Failed(request, at, ErrorKind.INTERNAL_ERROR, "the model failed", culprit=culprit))


def placed_at(harness: RouterHarness) -> Address:
    return harness.of(Generate)[-1][0]


@pytest.mark.parametrize("culprit", [Culprit.UNCLEAR, Culprit.HELPER])
def test_a_request_that_may_not_be_at_fault_is_tried_elsewhere(culprit: Culprit) -> None:
    harness = RouterHarness(PD0, PD1)
    stream = harness.submit()
    first = placed_at(harness)
    fails(harness, stream, first, culprit)
    assert placed_at(harness) != first
    assert harness.of(Cancel)[-1][0] == first
    assert finish(harness, stream) == [7]
    assert harness.outstanding() == 0


def test_a_request_at_fault_is_tried_once() -> None:
    harness = RouterHarness(PD0, PD1)
    stream = harness.submit()
    fails(harness, stream, placed_at(harness), Culprit.REQUEST)
    with pytest.raises(InternalError, match="the model failed"):
        tokens_of(stream)
    assert len(harness.of(Generate)) == 1


def test_a_request_that_fails_everywhere_is_tried_three_times() -> None:
    """Also where there is but one instance."""
    harness = RouterHarness(PD0)
    stream = harness.submit()
    for _ in range(MAX_FAILURES):
        fails(harness, stream, PD0)
    with pytest.raises(InternalError, match="the model failed"):
        tokens_of(stream)
    assert len(harness.of(Generate)) == MAX_FAILURES
    assert harness.outstanding() == 0


def test_an_instance_that_fails_fast_does_not_count_as_free() -> None:
    harness = RouterHarness(PD0, PD1)
    first = harness.submit()
    bad = placed_at(harness)
    fails(harness, first, bad)
    for _ in range(5):
        harness.submit()
        assert placed_at(harness) != bad, "although it has nothing to do"
    harness.wait(AVOIDED_SECONDS, PD0, PD1)
    harness.submit()
    assert placed_at(harness) == bad


def test_an_instance_that_fails_is_better_than_none() -> None:
    harness = RouterHarness(PD0)
    fails(harness, harness.submit(), PD0)
    harness.submit()
    assert placed_at(harness) == PD0


def test_an_item_whose_helper_failed_goes_to_another_encode_instance() -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0)
    [transfer] = harness.need(stream, 0)
    [(failing, _, _)] = encode_targets(harness)
    harness.router.handle(EncodeFailed(transfer, ErrorKind.INTERNAL_ERROR, "no worker", culprit=Culprit.HELPER))
    ask_for(harness, stream, PD0, attempt=1)
    assert encode_targets(harness)[-1][0] != failing
    harness.router.handle(Encoded(transfer, False, [], attempt=1))
    assert finish(harness, stream) == [7]
    assert harness.outstanding() == 0
