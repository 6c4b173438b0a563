"""Placement by cache: the policies and records alone, and a router that uses them."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import plan_of
from tests.support.router_harness import D0, D1, E0, E1, P0, P1, PD0, PD1, RouterHarness, prompt, request_of
from triptych.config import AdmissionConfig
from triptych.config.admission import PLACEMENTS
from triptych.errors import ErrorKind
from triptych.messages.codec import Message
from triptych.messages.identity import kept_name
from triptych.messages.operations import SetRole
from triptych.messages.stats import CacheTier, EncodeStats, InstanceStats, KeptPart
from triptych.messages.work import (
    ENCODE_BATCHES_AHEAD,
    LONG_ITEMS,
    Deregister,
    Draining,
    Encode,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Generate,
    Heartbeat,
    MissingItem,
    Prefill,
    PrefillNeeded,
    SamplingParams,
    Tokens,
)
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.caches import PREFIX_STEP, SHARED_BY, EncodedItems, PrefixIndex, prefix_hashes
from triptych.router.encode_dispatcher import CACHED_CREDITS
from triptych.router.instance import WorkKind
from triptych.router.placement import LOAD_BOUND, POLICIES, Work, affinity, by_rendezvous, round_robin, within_bound
from triptych.router.stream import TokenStream
from triptych.topology import Role
from triptych.types import Address, Placement, Span, TransferId

CACHE = 2**20
"""Bytes of an encoder cache; a row of the harness has 16."""


@dataclass(eq=False)
class Target:
    name: str
    outstanding: int = 0
    num_assigned: int = 0


targets = st.lists(st.integers(0, 10**6), min_size=1, max_size=8).map(
    lambda loads: [Target(f"e{number}", load) for number, load in enumerate(loads)]
)
works = st.builds(Work, cost=st.integers(1, 10**5), key=st.binary(min_size=1, max_size=40))


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_setting_has_a_policy() -> None:
    assert tuple(POLICIES) == PLACEMENTS


@given(targets, works, st.integers(0, 7))
def test_no_instance_beyond_the_bound_is_chosen_and_one_is_always_within(
    instances: list[Target], work: Work, holder: int
) -> None:
    mean = sum(one.outstanding for one in instances) / len(instances)
    chosen = affinity(instances, replace(work, holder=instances[holder % len(instances)]))
    assert chosen is not None
    assert chosen.outstanding <= LOAD_BOUND * mean + work.cost
    assert chosen in within_bound(instances, work.cost)


@given(targets, works, st.randoms(use_true_random=False))
def test_the_choice_depends_on_neither_order_nor_history(
    instances: list[Target], work: Work, rng: st.DataObject
) -> None:
    chosen = affinity(instances, work)
    for instance in instances:
        instance.num_assigned += 7
    rng.shuffle(instances)  # type: ignore[attr-defined]
    assert affinity(instances, work) is chosen


@given(targets, st.binary(min_size=1, max_size=40))
def test_without_an_instance_only_its_keys_move(instances: list[Target], key: bytes) -> None:
    order = by_rendezvous(instances, key)
    assert Counter(map(id, order)) == Counter(map(id, instances))
    for gone in instances:
        left = [one for one in instances if one is not gone]
        assert by_rendezvous(left, key) == [one for one in order if one is not gone]


def test_a_restarted_instance_gets_its_keys_again() -> None:
    before, after = [[Target(f"e{number}") for number in range(4)] for _ in range(2)]
    keys = [bytes([number]) for number in range(100)]
    places = [[by_rendezvous(instances, key)[0].name for key in keys] for instances in (before, after)]
    assert places[0] == places[1]
    assert all(15 <= count <= 35 for count in Counter(places[0]).values())


@given(targets, works)
def test_a_holder_is_chosen_within_the_bound_only(instances: list[Target], work: Work) -> None:
    for holder in instances:
        chosen = affinity(instances, replace(work, holder=holder))
        assert (chosen is holder) == (
            holder in within_bound(instances, work.cost) or affinity(instances, work) is holder
        )
    gone = Target("gone")
    assert affinity(instances, replace(work, holder=gone)) is affinity(instances, work)


def test_one_item_more_than_the_mean_is_within_the_bound_of_idle_instances() -> None:
    first, other = Target("e0"), Target("e1")
    work = Work(10, b"x", first)
    assert affinity([first, other], work) is first
    first.outstanding = 20
    assert affinity([first, other], work) is first
    first.outstanding = 30
    assert affinity([first, other], work) is other


def test_work_without_a_key_goes_where_the_load_is_least() -> None:
    instances = [Target("e0", 5), Target("e1", 4), Target("e2", 4, 0)]
    instances[1].num_assigned = 1
    assert affinity(instances, Work(1)) is instances[2]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    instances = [Target("e0", 100), Target("e1")]
    names = []
    for _ in range(4):
        chosen = round_robin(instances, Work(1, b"x"))
        assert chosen is not None
        chosen.num_assigned += 1
        names.append(chosen.name)
    assert names == ["e0", "e1", "e0", "e1"]


def test_no_instance_is_no_choice() -> None:
    assert [policy.choose([], Work(1, b"x")) for policy in POLICIES.values()] == [None, None, None]


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12))))
def test_the_record_of_an_encoder_cache_never_exceeds_it(used: list[tuple[str, int]]) -> None:
    items, sizes = EncodedItems(), {}
    for name, size in used:
        items.add(name.encode(), size, 20)
        sizes[name] = size
        assert (name.encode() in items) == (size <= 20)
        assert sum(size for name, size in sizes.items() if name.encode() in items) <= 20


def test_the_least_recently_used_item_is_forgotten_first() -> None:
    items = EncodedItems()
    for name in (b"a", b"b", b"a", b"c"):
        items.add(name, 10, 20)
    assert (b"a" in items, b"b" in items, b"c" in items, len(items)) == (True, False, True, 2)
    items.discard(b"a")
    items.add(b"d", 10, 20)
    assert (b"c" in items, b"d" in items) == (True, True)


tokens = st.lists(st.integers(0, 3), max_size=1200)


def item(key: str, start: int) -> PlannedItem:
    return replace(prompt(1.0).items[0], key=key, placement=Placement((Span(start, 2),)))


@given(tokens, tokens, tokens)
def test_prompts_share_hashes_as_far_as_they_share_tokens(common: list[int], one: list[int], other: list[int]) -> None:
    hashes, others = prefix_hashes(common + one, [], ""), prefix_hashes(common + other, [], "")
    shared = prefix_hashes(common, [], "")
    assert hashes[: len(shared)] == others[: len(shared)] == shared
    assert len(set(hashes)) == len(hashes)
    beyond = set(hashes[len(shared) :]) & set(others[len(shared) :])
    assert not beyond or one[0] == other[0]
    assert prefix_hashes(common + one, [], "salt")[:1] != hashes[:1] or not hashes


@pytest.mark.parametrize("length", [15, 16, 500, 512, 1024, 40_000])
def test_the_number_of_hashes_grows_with_the_logarithm_of_the_length(length: int) -> None:
    doublings = max(0, (length // 512).bit_length())
    assert len(prefix_hashes([1] * length, [], "")) <= min(length // PREFIX_STEP, 32 + 16 * doublings)


def test_an_item_counts_from_its_first_token_on() -> None:
    prompt_tokens = [1] * 64
    one, other = (prefix_hashes(prompt_tokens, [item("a", 3), item(key, 40)], "") for key in "bc")
    assert len(one) == 4
    assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [True, True, False, False]
    assert prefix_hashes(prompt_tokens, [item("b", 40), item("a", 3)], "") == one


def chat(number: int, turns: int, system: int = 40) -> list[bytes]:
    """The hashes of a chat's prompt after some turns; all have the same system prompt."""
    return prefix_hashes([1] * system + [100 + number] * 60 * turns, [], "")


def test_the_longest_known_prefix_has_the_holder() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(chat(1, 1), "a")
    index.add(chat(2, 1), "b")
    assert index.find(chat(1, 3)).holder == "a"
    assert index.find(chat(2, 3)).holder == "b"
    index.add(chat(1, 3), "b")
    assert index.find(chat(1, 4)).holder == "b"
    assert index.find(prefix_hashes([9] * 100, [], "")).holder is None
    assert index.find([]).key == b""


def test_a_prefix_that_many_prompts_share_has_no_holder() -> None:
    """Else every chat would go to the instance that first had their common system prompt."""
    index: PrefixIndex[str] = PrefixIndex()
    for number in range(SHARED_BY):
        index.add(chat(number, 1), "a")
    new = [index.find(chat(number, 1)) for number in (50, 51)]
    assert [found.holder for found in new] == [None, None]
    assert new[0].key != new[1].key
    assert index.find(chat(2, 2)).holder == "a"


def test_frontends_that_saw_different_chats_find_the_same_key_for_one() -> None:
    indexes: list[PrefixIndex[str]] = [PrefixIndex(), PrefixIndex()]
    for number in range(2 * SHARED_BY):
        indexes[number % 2].add(chat(number, 1 + number % 3), "a")
    keys = {index.find(chat(77, turns)).key for index in indexes for turns in (1, 2, 9)}
    assert len(keys) == 1


def test_the_index_forgets_the_least_recently_used() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_prefixes=20)
    for number in range(50):
        index.add(chat(number, 1), "a")
        assert len(index) <= 20
    assert index.find(chat(49, 2)).holder == "a"
    assert index.find(chat(3, 2)).holder is None


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────


def router(*addresses: Address, **settings: Any) -> RouterHarness:
    usual: dict[str, Any] = {"placement": "affinity", "encode_cache_bytes": CACHE, "max_queue": 200}
    return RouterHarness(*addresses, **usual | settings)


def ask(harness: RouterHarness, content: list[int], items: tuple[PlannedItem, ...] = (), salt: str = "") -> TokenStream:
    text = PlannedPrompt(content, prompt().positions, items)
    return harness.router.lifecycle.submit(request_of(), text, SamplingParams(max_tokens=4), [], salt)


def answer(harness: RouterHarness, stream: TokenStream) -> Address:
    """Where a request went; it is answered."""
    (to,) = [to for to, message in harness.of(Generate) if message.request == stream.request]
    harness.router.handle(Tokens(stream.request, [1], 0, finish_reason="stop"))
    return to


def turn(number: int, turns: int) -> list[int]:
    return [1] * 40 + [100 + number] * 60 * turns


def test_the_turns_of_a_chat_return_to_its_instance_and_chats_spread() -> None:
    harness = router(PD0, PD1)
    places: dict[int, set[Address]] = {number: set() for number in range(16)}
    for turns in (1, 2, 3):
        for number, seen in places.items():
            seen.add(answer(harness, ask(harness, turn(number, turns))))
    assert all(len(seen) == 1 for seen in places.values())
    assert all(3 <= count <= 13 for count in Counter(to for (to,) in places.values()).values())


def test_two_routers_send_a_chat_to_the_same_instance() -> None:
    routers = [router(PD0, PD1), router(PD1, PD0)]
    for number in range(8):
        for harness in routers:
            answer(harness, ask(harness, turn(number, 1)))
    for number in range(20, 30):
        first, later = (answer(one, ask(one, turn(number, turns))) for turns, one in enumerate(routers, 1))
        assert first == later


def test_a_busy_instance_does_not_keep_its_chats() -> None:
    harness = router(PD0, PD1)
    holder = answer(harness, ask(harness, turn(1, 1)))
    for _ in range(20):
        ask(harness, turn(1, 2))
    sent = Counter(to for to, _ in harness.of(Generate))
    loads = [harness.lease(address).outstanding for address in (PD0, PD1)]
    assert min(sent.values()) >= 6
    assert harness.lease(holder).outstanding == max(loads)


@pytest.mark.parametrize("how", ["full", "draining", "left", "restarted", "changing role"])
def test_a_chat_does_not_wait_for_an_instance_that_takes_no_work(how: str) -> None:
    harness = router(PD0, PD1, max_num_seqs=1)
    holder = answer(harness, ask(harness, turn(1, 1)))
    lease = harness.lease(holder)
    other = PD0 if holder == PD1 else PD1
    if how == "full":
        while lease.has_room:
            harness.occupy(holder, WorkKind.READY)
    elif how == "draining":
        harness.router.handle(Draining(holder))
    elif how == "left":
        harness.router.handle(Deregister(holder))
    elif how == "restarted":
        harness.register(holder, pid=2)
        harness.occupy(holder, cost=1000)
    else:
        harness.router.handle(SetRole(Address("operator"), str(holder), Role.E, 30.0, force=True))
    assert answer(harness, ask(harness, turn(1, 2))) == other


def test_a_lost_request_continues_elsewhere_and_its_chat_stays_there() -> None:
    harness = router(PD0, PD1)
    stream = ask(harness, turn(1, 1))
    ((first, _),) = harness.of(Generate)
    harness.router.handle(Deregister(first))
    ((_, again),) = [one for one in harness.of(Generate) if one[0] != first]
    harness.router.handle(Tokens(again.request, [1], 0, finish_reason="stop"))
    assert stream.record.finish_reason == "stop"
    harness.register(first, pid=2)
    assert answer(harness, ask(harness, turn(1, 2))) != first


def test_salts_separate_chats() -> None:
    harness = router(PD0, PD1)
    places = {answer(harness, ask(harness, turn(1, 1), salt=f"user {number}")) for number in range(12)}
    assert places == {PD0, PD1}


def test_prefill_and_decode_instances_each_get_their_chats_back() -> None:
    harness = router(P0, P1, D0, D1)
    places: dict[int, set[tuple[Address, Address]]] = {number: set() for number in range(8)}
    for turns in (1, 2, 3):
        for number, seen in places.items():
            stream = ask(harness, turn(number, turns))
            decode, _ = harness.of(Generate)[-1]
            harness.router.handle(PrefillNeeded(stream.request, decode, TransferId(stream.request), 0, []))
            prefill, _ = harness.of(Prefill)[-1]
            seen.add((answer(harness, stream), prefill))
    assert all(len(pairs) == 1 for pairs in places.values())
    assert {prefill for pairs in places.values() for _, prefill in pairs} == {P0, P1}
    assert {decode for pairs in places.values() for decode, _ in pairs} == {D0, D1}


@pytest.mark.parametrize("placement", ["least-loaded", "round-robin"])
def test_other_policies_look_at_no_cache(placement: str) -> None:
    harness = RouterHarness(PD0, PD1, placement=placement)
    places = [answer(harness, ask(harness, turn(1, turns))) for turns in (1, 2, 3, 4)]
    assert places == [PD0, PD1, PD0, PD1]


def test_affinity_is_the_default() -> None:
    assert AdmissionConfig().placement == "affinity"


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────


class Encoding:
    """A router with two encode instances, and the transfers of its items."""

    def __init__(self, **settings: object) -> None:
        self.harness = router(E0, E1, PD0, **settings)
        self.streams: dict[TransferId, TokenStream] = {}

    def need(self, key: str, patches: int = 1, salt: str = "", *, long: bool = False) -> TransferId:
        """An item of a new request is to be encoded."""
        (made,) = prompt(10.0).items
        plan = plan_of(10, 10, patches=(1, patches - 1)) if long else plan_of(2, patches=(patches,))
        plan = msgspec.structs.replace(plan, cost=made.plan.cost)
        stream = ask(self.harness, [0, 0, 1], (replace(made, key=key, plan=plan),), salt)
        transfer = TransferId(f"t{len(self.streams)}")
        self.streams[transfer] = stream
        self.harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, transfer)]))
        return transfer

    def at(self, transfer: TransferId) -> Address | None:
        """Where an item was sent last; None while it is queued."""
        return next((to for to, sent in reversed(self.harness.of(Encode)) if sent.transfer == transfer), None)

    def encoded(self, transfer: TransferId, *, cached: bool = False) -> None:
        self.harness.router.handle(Encoded(transfer, cached, []))

    def warm(self, key: str, **how: object) -> Address:
        """An item is encoded, and its request ends. Returns where."""
        transfer = self.need(key, **how)  # type: ignore[arg-type]
        self.encoded(transfer)
        self.harness.router.lifecycle.cancel(self.streams[transfer].request)
        found = self.at(transfer)
        assert found is not None
        return found

    def fill(self, address: Address) -> None:
        """Give an instance as much as it may be given."""
        patches = ENCODE_BATCHES_AHEAD * self.harness.lease(address).capacity.encode_batch_patches
        self.harness.occupy(address, WorkKind.ITEM, 10**6, patches)


def other_of(address: Address) -> Address:
    return E0 if address == E1 else E1


def test_items_go_to_both_instances_and_return_where_they_are_cached() -> None:
    encoding = Encoding()
    places = {f"{number:064}": encoding.warm(f"{number:064}") for number in range(30)}
    assert set(places.values()) == {E0, E1}
    assert all(encoding.warm(key) == place for key, place in places.items())


def test_salts_separate_items() -> None:
    encoding = Encoding()
    assert {encoding.warm("a" * 64, salt=f"user {number}") for number in range(12)} == {E0, E1}


def test_a_cached_item_goes_to_its_holder_even_when_that_is_full() -> None:
    encoding = Encoding()
    holder = encoding.warm("a" * 64)
    encoding.fill(holder)
    assert encoding.at(encoding.need("a" * 64)) == holder
    assert encoding.at(encoding.need("b" * 64)) == other_of(holder)


def test_a_full_holder_gets_a_bounded_number_of_cached_items() -> None:
    encoding = Encoding(encode_batch_patches=10)
    holder = encoding.warm("a" * 64, patches=10)
    encoding.fill(holder)
    more = [encoding.at(encoding.need("a" * 64, patches=10)) for _ in range(6)]
    allowed = (CACHED_CREDITS - 1) * ENCODE_BATCHES_AHEAD
    assert more == [holder] * allowed + [other_of(holder)] * (6 - allowed)


def test_a_cached_item_does_not_wait_behind_its_clients_other_items() -> None:
    encoding = Encoding(encode_batch_patches=10)
    holder = encoding.warm("a" * 64)
    encoding.fill(E0)
    encoding.fill(E1)
    waiting = encoding.need("b" * 64)
    assert encoding.at(encoding.need("a" * 64)) == holder
    assert encoding.at(waiting) is None


def test_a_cached_long_item_takes_no_slot_of_those_in_time_slices() -> None:
    encoding = Encoding(encode_batch_patches=10)
    holder = encoding.warm("a" * 64, patches=100, long=True)
    for address in [E0, E1] * LONG_ITEMS:
        encoding.harness.occupy(address, WorkKind.LONG_ITEM)
    assert encoding.at(encoding.need("b" * 64, patches=100, long=True)) is None
    assert encoding.at(encoding.need("a" * 64, patches=100, long=True)) == holder
    assert encoding.harness.lease(holder).account.num(WorkKind.LONG_ITEM) == LONG_ITEMS


def test_an_item_joins_the_instance_that_encodes_it() -> None:
    encoding = Encoding()
    transfers = [encoding.need("a" * 64) for _ in range(20)]
    assert len({encoding.at(transfer) for transfer in transfers}) == 1


def leave(encoding: Encoding, holder: Address, transfer: TransferId) -> Message:
    return Deregister(holder)


def fail(encoding: Encoding, holder: Address, transfer: TransferId) -> Message:
    return EncodeFailed(transfer, ErrorKind.DECODE_FAILED, "x")


@pytest.mark.parametrize("event", [leave, fail])
def test_what_an_instance_never_encoded_is_not_held(event: object) -> None:
    encoding = Encoding()
    transfer = encoding.need("a" * 64)
    holder = encoding.at(transfer)
    assert holder is not None
    encoding.harness.router.handle(event(encoding, holder, transfer))  # type: ignore[operator]
    if event is leave:
        encoding.harness.register(holder, pid=2)
    assert not len(encoding.harness.lease(holder).encoded)


def test_a_failure_shows_that_an_instance_does_not_hold_what_it_was_believed_to() -> None:
    encoding = Encoding()
    holder = encoding.warm("a" * 64)
    encoding.harness.router.handle(fail(encoding, holder, encoding.need("a" * 64)))
    assert not len(encoding.harness.lease(holder).encoded)


def test_a_draining_or_restarted_holder_is_not_asked() -> None:
    encoding = Encoding()
    holder = encoding.warm("a" * 64)
    encoding.harness.router.handle(Draining(holder))
    assert encoding.at(encoding.need("a" * 64)) == other_of(holder)
    encoding = Encoding()
    holder = encoding.warm("a" * 64)
    encoding.harness.register(holder, pid=2)
    encoding.fill(holder)
    assert encoding.at(encoding.need("a" * 64)) == other_of(holder)


def test_without_a_cache_no_instance_is_a_holder() -> None:
    encoding = Encoding()
    encoding.harness.stats.encode.cache_max_bytes = 0  # type: ignore[union-attr]
    encoding.harness.wait(0.25, E0, E1, PD0)
    holder = encoding.warm("a" * 64)
    encoding.fill(holder)
    assert encoding.at(encoding.need("a" * 64)) == other_of(holder)


def test_a_tier_that_outlives_the_instance_makes_it_a_holder() -> None:
    """Also if it keeps nothing in its own memory."""
    encoding = Encoding()
    stats = encoding.harness.stats.encode
    assert stats is not None
    stats.cache_max_bytes, stats.tiers = 0, [CacheTier("memory", 0, 0, 0), CacheTier("shm", 0, 0, CACHE)]
    encoding.harness.wait(0.25, E0, E1, PD0)
    holder = encoding.warm("a" * 64)
    encoding.fill(holder)
    assert encoding.at(encoding.need("a" * 64)) == holder


def test_heartbeats_say_what_other_frontends_had_encoded() -> None:
    usual = Encoding().warm("a" * 64)
    for salt, holder in (("", other_of(usual)), ("another", usual)):
        encoding = Encoding()
        stats = InstanceStats(EncodeStats(0, 0, 0, 0, 0, 0, CACHE))
        assert stats.encode is not None
        stats.encode.latest = [KeptPart(kept_name("a" * 64, salt, 0), 1)]
        encoding.harness.router.handle(Heartbeat(other_of(usual), stats))
        assert encoding.at(encoding.need("a" * 64)) == holder


# ── single flight: no two instances encode the same part at the same time, if one can wait ──────────────────


def waits(encoding: Encoding) -> float | None:
    return encoding.harness.router.metrics.registry.get_sample_value("triptych:mm_single_flight_waits_total")


@pytest.mark.parametrize("placement", POLICIES)
def test_what_is_being_encoded_is_waited_for_without_a_cache_and_whatever_the_policy(placement: str) -> None:
    encoding = Encoding(placement=placement)
    encoding.harness.stats.encode.cache_max_bytes = 0  # type: ignore[union-attr]
    encoding.harness.wait(0.25, E0, E1, PD0)
    transfers = [encoding.need("a" * 64) for _ in range(8)]
    (holder,) = {encoding.at(transfer) for transfer in transfers}
    assert (holder in (E0, E1), waits(encoding)) == (True, 7)
    for transfer in transfers:
        encoding.encoded(transfer)
    assert not encoding.harness.router.membership.get(holder).account.encoding  # type: ignore[arg-type, union-attr]
    others = {encoding.at(encoding.need(f"{number:064}")) for number in range(20)}
    assert (others, waits(encoding)) == ({E0, E1}, 7)


def full() -> tuple[Encoding, TransferId, Address]:
    """Two instances, one of which has as much as it may have, and encodes an item of cost 10 among it."""
    encoding = Encoding(encode_batch_patches=10)
    first = encoding.need("a" * 64, patches=10)
    holder = encoding.at(first)
    assert holder is not None
    encoding.harness.occupy(holder, WorkKind.ITEM, 0, 2 * ENCODE_BATCHES_AHEAD * 10)
    return encoding, first, holder


def test_an_item_waits_for_a_full_instance_that_encodes_it_and_others_pass_it() -> None:
    encoding, first, holder = full()
    second = encoding.need("a" * 64, patches=10)
    assert (encoding.at(second), waits(encoding)) == (None, 0)
    assert encoding.at(encoding.need("b" * 64)) == other_of(holder)
    encoding.encoded(first)
    assert (encoding.at(second), waits(encoding)) == (other_of(holder), 1), "the parts are encoded no longer"


def test_a_waiting_item_holds_up_no_cached_item_of_its_client() -> None:
    encoding, _, holder = full()
    assert encoding.warm("c" * 64) == other_of(holder)
    waiting = encoding.need("a" * 64, patches=10)
    assert encoding.at(encoding.need("c" * 64)) == other_of(holder)
    assert encoding.at(waiting) is None


def test_items_that_join_another_add_no_work() -> None:
    encoding = Encoding(encode_batch_patches=10)
    transfers = [encoding.need("a" * 64, patches=10) for _ in range(9)]
    (holder,) = {encoding.at(transfer) for transfer in transfers}
    assert holder is not None
    assert encoding.harness.lease(holder).outstanding == 1
    encoding.harness.occupy(holder, WorkKind.ITEM, 0, 2 * ENCODE_BATCHES_AHEAD * 10)
    assert encoding.at(encoding.need("a" * 64, patches=10)) is None, "it is sooner done there"


def test_copies_of_a_video_that_is_being_encoded_leave_room_for_pictures() -> None:
    encoding = Encoding(encode_batch_patches=10)
    transfers = [encoding.need("a" * 64, patches=100, long=True) for _ in range(20)]
    (holder,) = {encoding.at(transfer) for transfer in transfers}
    assert holder is not None
    encoding.fill(other_of(holder))
    assert encoding.at(encoding.need("b" * 64, patches=10)) == holder


def test_what_goes_on_for_others_after_a_request_has_ended_is_charged_to_one_of_them() -> None:
    encoding = Encoding(encode_batch_patches=10)
    transfers = [encoding.need("a" * 64, patches=100, long=True) for _ in range(4)]
    (holder,) = {encoding.at(transfer) for transfer in transfers}
    account = encoding.harness.lease(holder).account  # type: ignore[arg-type]
    for transfer in transfers:
        assert (account.num(WorkKind.LONG_ITEM), account.outstanding) == (1, 1)
        encoding.harness.router.lifecycle.cancel(encoding.streams[transfer].request)
        encoding.harness.router.tick()
    assert (account.num(WorkKind.LONG_ITEM), account.outstanding, account.patches) == (0, 0, 0)


def test_an_item_waits_for_no_instance_that_takes_longer_than_encoding_it_again() -> None:
    encoding, _, holder = full()
    encoding.harness.occupy(holder, WorkKind.ITEM, 1)
    assert encoding.at(encoding.need("a" * 64, patches=10)) == other_of(holder)
    encoding, _, holder = full()
    encoding.harness.occupy(other_of(holder), WorkKind.ITEM, 5)
    encoding.harness.occupy(holder, WorkKind.ITEM, 4)
    assert encoding.at(encoding.need("a" * 64, patches=10)) is None


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_not_encoded_any_more_is_not_waited_for(fails: bool) -> None:
    encoding, first, holder = full()
    second = encoding.need("a" * 64, patches=10)
    assert encoding.at(second) is None
    if fails:
        encoding.harness.router.handle(fail(encoding, holder, first))
    else:
        encoding.harness.router.lifecycle.cancel(encoding.streams[first].request)
        encoding.harness.router.tick()
    assert encoding.at(second) == other_of(holder)


def test_a_popular_item_leaves_the_others_to_the_other_instance() -> None:
    encoding = Encoding()
    holder = encoding.warm("a" * 64)
    for _ in range(10):
        encoding.need("a" * 64)
    others = [encoding.at(encoding.need(f"{number:064}")) for number in range(4)]
    assert others == [other_of(holder)] * 4
