"""Engine loops, message by message: encoders and frontends are lost, instances drain."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_instances import (
    ENGINE,
    FIRST,
    MEDIA_ROWS,
    MEDIA_START,
    ROWS_PER_PART,
    SECOND,
    Encoder,
    EngineInstances,
    engine_instances,
    generate,
    prefill,
)
from triptych.engine.embedding_source import SHORT_TEXT
from triptych.errors import ErrorKind, InvalidRequest
from triptych.messages.codec import Message
from triptych.messages.work import (
    Cancel,
    EncodeNeeded,
    Failed,
    Generate,
    HandBack,
    MissingItem,
    PeerLost,
    PlacedItem,
    Prefilled,
    PrefillNeeded,
    Tokens,
)
from triptych.topology import Role
from triptych.transfer.incoming import MAX_IDLE_ATTEMPTS
from triptych.types import Placement, RequestId, Span, TransferId

HALF = MEDIA_ROWS // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("loops") / "tiny")


@pytest.fixture
def pd(folder: Path) -> Iterator[EngineInstances]:
    with engine_instances(folder, pd=Role.PD) as instances:
        yield instances


@pytest.fixture
def split(folder: Path) -> Iterator[EngineInstances]:
    with engine_instances(folder, p=Role.P, d=Role.D) as instances:
        yield instances


def answer(instances: EngineInstances, request: str, encoder: Encoder, *, seed: int = 0, ending: int = 0) -> list[int]:
    """The answer to a request with media that isn't disturbed. Nothing of it stays in the prefix cache for others."""
    instances.give("pd", generate(request, media=True, salt=request, ending=ending))
    needed = instances.needed(request)
    encoder.offer(instances.address("pd"), needed)
    encoder.provide(needed, seed=seed)
    return instances.tokens(request)


def ask(instances: EngineInstances, request: str, encoder: Encoder, end_row: int) -> MissingItem:
    """Have an encoder send the first rows of a new request's item."""
    instances.give("pd", generate(request, media=True, salt=request))
    needed = instances.needed(request)
    encoder.offer(instances.address("pd"), needed)
    encoder.provide(needed, 0, end_row)
    receiver = instances.loop("pd").incoming.receiver
    instances.until(lambda: receiver.landed(needed.transfer) == end_row)
    return needed


# ── encode instances are lost ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["lost", "aborted"])
@pytest.mark.parametrize("landed", [0, ROWS_PER_PART, HALF])
def test_another_encoder_sends_the_rest_of_the_rows(pd: EngineInstances, end: str, landed: int) -> None:
    a, b = pd.encoder("a"), pd.encoder("b")
    expected = answer(pd, "undisturbed", b)
    assert expected != answer(pd, "other picture", b, seed=1), "the rows matter"
    first = ask(pd, "r", a, landed)
    assert (first.first_row, first.attempt) == (0, 0)
    if end == "lost":
        pd.kill(a)
        pd.loop("pd").peer_lost(PeerLost(a.address, [first.transfer], FIRST))
    else:
        a.sender.abort(first.transfer, "leaving")
    pd.until(lambda: len([one for one in pd.of(EncodeNeeded) if one.request == "r"]) == 2)
    second = pd.needed("r")
    assert second == MissingItem(0, first.transfer, first_row=landed, attempt=1)
    b.offer(pd.address("pd"), second)
    b.provide(second, landed)
    assert pd.tokens("r") == expected
    assert pd.of(Failed) == []


def test_an_encoder_that_is_lost_before_it_offers_is_replaced(pd: EngineInstances) -> None:
    b = pd.encoder("b")
    expected = answer(pd, "undisturbed", b)
    pd.give("pd", generate("r", media=True, salt="r"))
    first = pd.needed("r")
    pd.loop("pd").peer_lost(PeerLost(pd.encoder("a").address, [first.transfer], FIRST))
    pd.until(lambda: pd.needed("r").attempt == 1)
    second = pd.needed("r")
    assert second.transfer == first.transfer
    b.offer(pd.address("pd"), second)
    b.provide(second)
    assert pd.tokens("r") == expected


def test_encoders_that_are_lost_for_other_reasons_than_their_work_do_not_count(pd: EngineInstances) -> None:
    b = pd.encoder("b")
    expected = answer(pd, "undisturbed", b)
    pd.give("pd", generate("r", media=True, salt="r"))
    needed = pd.needed("r")
    for attempt in range(1, 2 * MAX_IDLE_ATTEMPTS):
        lost = PeerLost(pd.encoder(f"a{attempt}").address, [needed.transfer], FIRST, suspect=False)
        pd.loop("pd").peer_lost(lost)
        pd.until(lambda: pd.needed("r").attempt == attempt)  # noqa: B023 - called at once
    b.offer(pd.address("pd"), pd.needed("r"))
    b.provide(pd.needed("r"))
    assert pd.tokens("r") == expected


def test_rows_in_the_prefix_cache_are_not_asked_for(pd: EngineInstances) -> None:
    """The prompts differ from the second page on, in which the item ends."""
    encoder = pd.encoder("a")
    expected = answer(pd, "elsewhere", encoder, ending=1)
    answer(pd, "one", encoder)
    pd.give("pd", generate("two", media=True, salt="one", ending=1))
    needed = pd.needed("two")
    assert needed.first_row == ENGINE.page_size - MEDIA_START
    encoder.offer(pd.address("pd"), needed)
    encoder.provide(needed)
    assert pd.tokens("two") == expected


# ── frontends ────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_request_is_answered_to_its_own_frontend(pd: EngineInstances) -> None:
    pd.give("pd", generate("one", FIRST))
    pd.give("pd", generate("two", SECOND))
    pd.give("pd", generate("long", SECOND, max_tokens=10**6))
    assert pd.tokens("one", FIRST) == pd.tokens("two", SECOND)
    assert {one.request for one in pd.of(Tokens, FIRST)} == {"one"}
    assert {one.request for one in pd.of(Tokens, SECOND)} == {"two"}
    assert [(one.request, one.error) for one in pd.of(Failed, SECOND)] == [("long", ErrorKind.PROMPT_TOO_LONG)]
    assert pd.of(Failed, FIRST) == []


def test_a_lost_frontend_costs_its_own_requests_alone(pd: EngineInstances) -> None:
    pd.give("pd", generate("lost media", FIRST, media=True))
    pd.give("pd", generate("lost text", FIRST, max_tokens=1000))
    pd.give("pd", generate("kept", SECOND, max_tokens=60))
    pd.until(lambda: pd.of(Tokens, FIRST) and pd.of(Tokens, SECOND))
    pd.loop("pd").frontend_lost(FIRST)
    pd.turn()  # delivers what was sent before
    pd.sent[FIRST].clear()
    assert len(pd.tokens("kept", SECOND)) == 60
    assert pd.sent[FIRST] == []


def test_a_lost_frontend_ends_its_requests_on_both_instances(split: EngineInstances) -> None:
    d = split.address("d")
    request = generate("lost", FIRST, media=True)
    split.give("d", request)
    split.until(lambda: split.of(PrefillNeeded))
    split.give("p", prefill(request, d, split.of(PrefillNeeded)[0].transfer))
    split.needed("lost")
    for name in ("p", "d"):
        split.loop(name).frontend_lost(FIRST)
        assert split.loop(name).debug_state()["active"] == []


def test_a_failed_prefill_is_aborted_when_the_frontend_knows(split: EngineInstances) -> None:
    """Its transfer's end would otherwise reach the frontend as another failure, from the decode instance."""
    request = generate("late")
    split.give("d", request)
    split.until(lambda: split.of(PrefillNeeded))
    transfer = split.of(PrefillNeeded)[0].transfer
    split.loop("p").runner.run = failing  # type: ignore[method-assign, assignment]
    split.give("p", prefill(request, split.address("d"), transfer))
    split.until(lambda: split.of(Failed))
    split.settle()
    assert [one.error for one in split.of(Failed)] == [ErrorKind.INTERNAL_ERROR]
    assert [one.sender for one in split.of(Failed)] == [split.address("p")]
    for name in ("p", "d"):
        split.loop(name).handlers[Cancel](Cancel(RequestId("late"), transfer if name == "p" else TransferId("")))


def failing(*_: object) -> None:
    raise RuntimeError("a bug")


# ── messages that arrive late or twice ───────────────────────────────────────────────────────────────────────────


def test_a_prefill_that_arrives_twice_is_done_once(split: EngineInstances) -> None:
    d = split.address("d")
    request = generate("twice")
    split.give("d", request)
    split.until(lambda: split.of(PrefillNeeded))
    message = prefill(request, d, split.of(PrefillNeeded)[0].transfer)
    split.give("p", message)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="under way"):
            split.give("p", message)
        split.turn()
    split.until(lambda: not split.loop("p").debug_state()["active"])
    with pytest.raises(InvalidRequest, match="under way"):
        split.give("p", message)  # its rows are still being sent
    assert len(split.tokens("twice")) == 6
    split.give("p", message)  # it is too late, and the decode instance says so
    split.settle()
    assert split.of(Failed) == []


@pytest.mark.parametrize("more", [-1, 1])
def test_kv_of_another_length_fails_its_request_alone(split: EngineInstances, more: int) -> None:
    """And a state after that number of tokens."""

    def changed(message: Message) -> Message:
        if not isinstance(message, Prefilled) or message.transfer != transfers["odd"]:
            return message
        return structs.replace(message, position=message.position + more)

    transfers: dict[str, str] = {}
    split.changed = changed
    for name in ("odd", "even"):
        request = generate(name, salt=name)
        split.give("d", request)
        split.until(lambda: len(split.of(PrefillNeeded)) > len(transfers))
        transfers[name] = split.of(PrefillNeeded)[-1].transfer
        split.give("p", prefill(request, split.address("d"), transfers[name]))
    assert len(split.tokens("even")) == 6
    split.until(lambda: split.of(Failed))
    assert [(one.request, one.error, one.message) for one in split.of(Failed)] == [
        ("odd", ErrorKind.INTERNAL_ERROR, f"the prefill instance sent {40 + more} tokens, not 40")
    ]
    assert [one.request for one in split.of(Tokens)] == ["even"] * len(split.of(Tokens))


def test_a_cancelled_prefill_leaves_a_later_one_alone(split: EngineInstances) -> None:
    d = split.address("d")
    request = generate("again")
    split.give("d", request)
    split.until(lambda: split.of(PrefillNeeded))
    split.give("p", prefill(request, d, split.of(PrefillNeeded)[0].transfer))
    for transfer in ("earlier", ""):
        split.loop("p").handlers[Cancel](Cancel(RequestId("again"), TransferId(transfer)))
    assert len(split.tokens("again")) == 6


def test_tokens_say_where_in_the_answer_they_are(pd: EngineInstances) -> None:
    pd.give("pd", generate("new"))
    pd.give("pd", generate("continued", generated=[1, 2]))
    assert len(pd.tokens("new")) == 6
    assert len(pd.tokens("continued")) == 4
    assert [one.first for one in pd.of(Tokens) if one.request == "new"] == list(range(6))
    assert [one.first for one in pd.of(Tokens) if one.request == "continued"] == list(range(2, 6))


# ── text before rows that haven't arrived ────────────────────────────────────────────────────────────────────


def with_text_first(request: Generate, text: int) -> Generate:
    """Move its item behind ``text`` tokens."""
    item = PlacedItem("picture", Placement((Span(text, MEDIA_ROWS),)), ROWS_PER_PART)
    return structs.replace(request, items=[item])


def num_computed(instances: EngineInstances, request: str) -> int:
    """Tokens computed once nothing more can be."""
    instances.settle()
    found = instances.loop("pd").scheduler.get(RequestId(request))
    assert found is not None
    return found.num_computed


@pytest.mark.parametrize("text", [1, SHORT_TEXT, SHORT_TEXT + 1])
def test_short_text_waits_for_the_rows_after_it(pd: EngineInstances, text: int) -> None:
    """A step takes 16 tokens here, so that of the longest text one token is left."""
    encoder = pd.encoder("a")
    pd.give("pd", with_text_first(generate("r", media=True), text))
    needed = pd.needed("r")
    one_step = ENGINE.max_num_batched_tokens
    assert num_computed(pd, "r") == (one_step if text > SHORT_TEXT else 0)
    encoder.offer(pd.address("pd"), needed)
    encoder.provide(needed)
    assert len(pd.tokens("r")) == 6
    began = {one.stage: one.start for one in pd.of(Tokens)[-1].intervals}
    assert (began["queue"] < began["transfer"]) == (text > SHORT_TEXT), "waiting for rows isn't queueing"


def test_few_rows_do_not_wait_for_others(pd: EngineInstances) -> None:
    """The others may be waiting for their blocks of the receive pool."""
    encoder = pd.encoder("a")
    needed = ask(pd, "r", encoder, ROWS_PER_PART)
    assert MEDIA_START + ROWS_PER_PART < SHORT_TEXT
    assert num_computed(pd, "r") == MEDIA_START + ROWS_PER_PART
    encoder.provide(needed, ROWS_PER_PART)
    assert len(pd.tokens("r")) == 6


# ── a drain ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_that_have_not_begun_are_handed_back(pd: EngineInstances) -> None:
    """Although the text before their items may be computed."""
    encoder = pd.encoder("a")
    pd.give("pd", generate("text", FIRST, max_tokens=200))
    ask(pd, "rows landed", encoder, ROWS_PER_PART)
    pd.give("pd", with_text_first(generate("waits", FIRST, media=True), SHORT_TEXT + 1))
    pd.give("pd", generate("continued", SECOND, media=True, generated=[1, 2]))
    pd.until(lambda: len([one for one in pd.of(Tokens) if one.request == "text"]) > 2)
    here = pd.address("pd")
    assert pd.loop("pd").hand_back() == {
        FIRST: HandBack(here, [RequestId("waits")], []),
        SECOND: HandBack(here, [RequestId("continued")], []),
    }
    assert pd.loop("pd").hand_back() == {}
    assert pd.loop("pd").debug_state()["active"] == ["text", "rows landed"]
    encoder.provide(pd.needed("rows landed"), ROWS_PER_PART)
    pd.tokens("rows landed")
    assert len(pd.tokens("text")) == 200


def test_a_decode_instance_hands_back_requests_whose_kv_has_not_landed(split: EngineInstances) -> None:
    """Also those that it has asked a prefill for. The prefill instance is told."""
    d = split.address("d")
    begun, asked, waits = generate("begun", max_tokens=200), generate("asked"), generate("waits", media=True)
    split.give("d", begun)
    split.until(lambda: split.of(PrefillNeeded))
    split.give("p", prefill(begun, d, split.of(PrefillNeeded)[0].transfer))
    split.until(lambda: split.of(Tokens))
    for request in (asked, waits):
        split.give("d", request)
    split.until(lambda: len(split.of(PrefillNeeded)) == 3)
    split.give("p", prefill(waits, d, split.of(PrefillNeeded)[2].transfer))
    split.needed("waits")
    assert split.loop("d").hand_back() == {FIRST: HandBack(d, [RequestId("asked"), RequestId("waits")], [])}
    assert split.loop("p").hand_back() == {FIRST: HandBack(split.address("p"), [RequestId("waits")], [])}
    assert len(split.tokens("begun")) == 200


def test_a_prefill_that_was_handed_back_is_done_by_another_instance(folder: Path) -> None:
    with engine_instances(folder, p0=Role.P, p1=Role.P, d=Role.D) as instances:
        encoder, d = instances.encoder("a"), instances.address("d")
        request = generate("r", media=True)
        instances.give("d", request)
        instances.until(lambda: instances.of(PrefillNeeded))
        message = prefill(request, d, instances.of(PrefillNeeded)[0].transfer)
        instances.give("p0", message)
        first = instances.needed("r")
        assert instances.loop("p0").hand_back() == {FIRST: HandBack(instances.address("p0"), [RequestId("r")], [])}
        instances.give("p1", message)
        instances.until(lambda: instances.needed("r") != first)
        encoder.offer(instances.address("p1"), instances.needed("r"))
        encoder.provide(instances.needed("r"))
        assert len(instances.tokens("r")) == 6
