"""Queues media items and dispatches them to encode instances. Holds no socket.

Each instance is given only a few batches at a time, so that the rest stays in the fair queue and can be reordered.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from triptych.clock import Clock
from triptych.fair_queue import FairQueue, QueueState, Ticket
from triptych.messages.codec import Message
from triptych.messages.work import (
    LONG_ITEMS,
    MEDIA_PIECE_BYTES,
    Encode,
    FetchMedia,
    HandBack,
    MediaBytes,
    MediaGone,
    PlacedItem,
    time_left,
)
from triptych.prompt.prompt import PlannedItem
from triptych.router import division
from triptych.router.caches import part_names
from triptych.router.division import EncoderState, divide
from triptych.router.encode_tasks import (
    EncodeTask,
    InFlightEncode,
    ItemGroup,
    ItemKind,
    ItemSection,
    StartableKinds,
    SuspectKind,
    WaitingKind,
)
from triptych.router.forecast import Rate
from triptych.router.instance import ENCODE_KINDS, Instance, WorkKind
from triptych.router.membership import Membership
from triptych.router.placement import PlacementPolicy, Work, by_rendezvous, least_loaded
from triptych.router.quarantine import Quarantine
from triptych.router.request_state import RequestPhase, RequestState
from triptych.router.request_table import RequestTable
from triptych.types import Address, RequestId, TransferId

log = logging.getLogger(__name__)

CACHED_CREDITS = 2
"""Times its credit that an encode instance may have in flight, up to which it gets items that it probably has cached:
it copies these at once, whatever else it does. Bounded, because they may have been evicted."""

LONG_ITEMS_PER_CLIENT = LONG_ITEMS - 1
"""Maximum of an instance's time-sliced items that may belong to one client, so that slots remain for other clients."""

MAX_MEDIA_SENDS = 8
"""Times that an instance may fetch an item's file. It asks again for what got lost. Bounded, because what it asks for
and doesn't read stays in this process's memory."""


WAITS_FOR_ITEMS = (RequestPhase.PREFILLING, RequestPhase.ENCODING)
"""Phases in which a request may have asked for its items, or is about to."""


@dataclass
class _RequestItems:
    """The items of one request."""

    queued: dict[ItemSection, Ticket[EncodeTask]] = field(default_factory=dict)
    in_flight: dict[TransferId, InFlightEncode] = field(default_factory=dict)
    waited: set[ItemSection] = field(default_factory=set)
    """Queued ones that have waited for an instance that encodes the same parts."""

    def known(self, key: ItemSection) -> list[EncodeTask]:
        """Return what was asked for last of an item or section, queued or dispatched; empty if nothing was."""
        queued = [self.queued[key].work] if key in self.queued else []
        return queued + [one.task for one in self.in_flight.values() if one.task.key == key]


@dataclass(frozen=True)
class EncodeDispatcherState:
    """Snapshot of an ``EncodeDispatcher``, for tests and debugging."""

    requests: frozenset[RequestId]
    """Requests with items here."""
    in_flight: dict[TransferId, InFlightEncode]
    """Dispatched items of requests that haven't ended."""
    unfinished: frozenset[InFlightEncode]
    """Those of them that their encode instance hasn't finished."""
    pending: frozenset[RequestId]
    """Requests with items that are not encoded yet."""
    queue: QueueState
    queued: tuple[Ticket[EncodeTask], ...]
    """In no particular order."""


class EncodeDispatcher:
    """Queues items by client and assigns them to encode instances with capacity."""

    def __init__(
        self,
        *,
        membership: Membership,
        requests: RequestTable,
        quarantine: Quarantine,
        address: Address,
        send: Callable[[Address, Message], None],
        rate: Rate,
        policy: PlacementPolicy,
        clock: Clock,
        note_wait: Callable[[], None],
    ) -> None:
        """Each encode instance gets items while this frontend has less in flight there than its credit: patches,
        where an item counts as at most one batch, and time-sliced items. A policy that uses caches gives it those that
        it has cached up to ``CACHED_CREDITS`` times that. Whatever the policy, no two encode the same part at the
        same time if waiting for the first takes less. ``address`` is this frontend's. ``rate`` is updated with
        the work done, in cost per second. ``note_wait`` counts an item that waits for another one's."""
        self._membership = membership
        self._table = requests
        self._quarantine = quarantine
        self._address = address
        self._send = send
        self._rate = rate
        self._policy = policy
        self._clock = clock
        self._note_wait = note_wait
        self._queue: FairQueue[EncodeTask] = FairQueue()
        self._requests: dict[RequestId, _RequestItems] = {}
        self._in_flight: dict[TransferId, InFlightEncode] = {}
        self._at: defaultdict[Address, dict[TransferId, InFlightEncode]] = defaultdict(dict)
        """Those of them that an instance was assigned, by its address."""
        self._unfinished: dict[InFlightEncode, None] = {}
        self.num_openings = 0
        """Changes so far that may let waiting items go on, but for those of the table: some were queued or dropped."""

    def enqueue(self, tasks: Sequence[EncodeTask]) -> int:
        """Queue items that were asked for together. Returns how many replace an earlier transfer of the same item, as
        after a preemption. Ignores those that the instance has asked for later, or that are known already."""
        cost, least = sum(task.cost for task in tasks), self._least_section()
        spread = cost >= 2 * least and self._policy.uses_caches  # other policies place each item by itself
        return sum(self._enqueue(replace(one, group=ItemGroup(tasks[0].cache_key, cost, spread))) for one in tasks)

    def _enqueue(self, task: EncodeTask) -> bool:
        items = self._requests.setdefault(task.request, _RequestItems())
        if any(known.asked >= task.asked for known in items.known(task.key)):
            return False
        replaced = self._release_item(items, task.key)
        items.queued[task.key] = self._queued(task)
        return replaced

    def divide(self, state: RequestState) -> list[PlacedItem]:
        """Return a request's items, with where they are to be divided among the encode instances, as loads and caches
        are now. Those of a suspect aren't: each instance that works on it may be lost."""
        items, instances = state.prompt.items, self._membership.encode_instances(begun=True)
        is_divisible = len(instances) > 1 and any(item.plan.num_parts > 1 for item in items)
        if not is_divisible or self._quarantine.is_suspect(state):
            return [msgspec.structs.replace(item, cuts=()) for item in state.generate.items]
        cost = sum(item.plan.cost for item in items)
        encoders = [EncoderState(_load_before(one, cost), one.has_part) for one in instances]
        cuts = divide(items, state.generate.cache_salt, encoders, self._least_section())
        planned = self._planned(state)
        return [
            msgspec.structs.replace(item, cuts=planned.get(item.key, rows))
            for item, rows in zip(state.generate.items, cuts, strict=True)
        ]

    def _planned(self, state: RequestState) -> dict[str, tuple[int, ...]]:
        """Return, by key, how items are divided that other requests wait for: in the same way, the sections of a
        request are those of the others, and each is encoded once."""
        waiting = (one for one in self._table if one is not state and self._was_divided(one))
        salt = state.generate.cache_salt
        return {
            item.key: item.cuts for one in waiting if one.generate.cache_salt == salt for item in one.generate.items
        }

    def _was_divided(self, state: RequestState) -> bool:
        """Return whether a request waits for items, in sections that were decided for it: those of a suspect are whole,
        and so are those of a request that no instance computes the prompt of yet."""
        if state.phase not in WAITS_FOR_ITEMS or self._quarantine.is_suspect(state):
            return False
        computes = state.decode is not None and state.decode.instance.role.prefills
        return computes or state.prefill is not None or state.only_encodes

    def _least_section(self) -> float:
        """Return the cost from which it pays that another instance encodes a part of an item, or of a request's items:
        as long as nothing was measured, that of a batch."""
        stats = [one.stats.encode for one in self._membership.encode_instances(begun=True) if one.stats.encode]
        seconds, cost = sum(one.tower_seconds for one in stats), sum(one.cost for one in stats)
        return division.SECTION_SECONDS * cost / seconds if cost and seconds else self._membership.encode_batch_patches

    def _queued(self, task: EncodeTask) -> Ticket[EncodeTask]:
        instances = self._membership.encode_instances(begun=True)
        awaited = tuple(task.part_names) if task.key in self._requests[task.request].waited else ()
        kind: ItemKind | SuspectKind | WaitingKind = ItemKind.SHORT
        if self._quarantine.is_suspect(self._state(task)):
            kind = SuspectKind(task.request, awaited)
        elif awaited:
            kind = WaitingKind(awaited)
        elif any(self._has_parts(task, one) for one in instances):
            kind = ItemKind.CACHED
        elif task.item.plan.is_time_sliced(self._membership.encode_batch_patches):
            kind = ItemKind.LONG
        self.num_openings += 1
        return self._queue.add(task, task.client, task.cost, task.priority, kind)

    def _state(self, task: EncodeTask) -> RequestState:
        state = self._table.get(task.request)
        assert state is not None, "items are released when their request ends"
        return state

    def queue_again(self, state: RequestState) -> None:
        """Queue a request's waiting items as those of a suspect, which block no others, or of one that is none now."""
        if (items := self._requests.get(state.id)) is not None:
            for key, ticket in items.queued.items():
                self._queue.remove(ticket)
                items.queued[key] = self._queued(ticket.work)

    def dispatch(self) -> None:
        """Dispatch queued items to encode instances with capacity, as the policy chooses."""
        while len(self._queue):
            instances = self._membership.encode_instances(begun=True)
            kinds = StartableKinds(frozenset(kind for one in instances for kind in self._startable(one)))
            waiting: list[EncodeTask] = []
            ticket = self._queue.pop(functools.partial(self._may_start, instances, waiting), kinds)
            for task in waiting:
                self._set_waiting(task)
            if ticket is None:
                if waiting:
                    continue  # others may come before them now
                return
            if (task := ticket.work).transfer in self._in_flight:
                log.error("request %s: another item has the transfer %s", task.request, task.transfer)
                del self._requests[task.request].queued[task.key]
            else:
                self._dispatch_to(task, self._choose(task, self._candidates(task, instances)))

    def _may_start(self, instances: Sequence[Instance], waiting: list[EncodeTask], task: EncodeTask) -> bool:
        """Return whether an instance may be given an item now. Adds it to ``waiting`` if it begins to wait for one that
        encodes the same parts."""
        if self._candidates(task, instances):
            return True
        is_encoded = any(_encodes_part(task, one) for one in instances)
        if is_encoded and task.key not in self._requests[task.request].waited:
            waiting.append(task)
        return False

    def _set_waiting(self, task: EncodeTask) -> None:
        """Have a queued item block none of other parts while it waits for an instance that encodes its parts."""
        items = self._requests[task.request]
        items.waited.add(task.key)
        self._queue.remove(items.queued[task.key])
        items.queued[task.key] = self._queued(task)

    def _candidates(self, task: EncodeTask, instances: Sequence[Instance]) -> list[Instance]:
        """Return the instances that may be given an item now: those with capacity, but for those that would encode what
        another one is encoding, which is sooner done."""
        fitting = [one for one in instances if self._fits(task, one)]
        encoding = [one for one in instances if _encodes_part(task, one) and one not in fitting]
        encoding = [one for one in encoding if self._quarantine.allows(self._state(task), one)]
        if not encoding or not fitting:
            return fitting
        soonest = min(_cost_until_done(task, one) for one in encoding)
        return [one for one in fitting if self._has_parts(task, one) or _cost_until_done(task, one) < soonest]

    def _choose(self, task: EncodeTask, candidates: Sequence[Instance]) -> Instance:
        """Return the instance that gets an item. One that has it cached, or is encoding it, is taken even if it is
        busy: that is less work than encoding it again elsewhere."""
        group = task.group
        work = Work(max(task.cost, group.cost), group.key)
        holder = least_loaded([one for one in candidates if self._has_parts(task, one)], work)
        if holder is None and (group.spread or any(_encodes_part(task, one) for one in candidates)):
            ranks = {one: rank for rank, one in enumerate(by_rendezvous(candidates, task.cache_key))}
            return min(candidates, key=lambda one: (one.outstanding + _missing_cost(task, one), ranks[one]))
        instance = holder or self._policy.choose(candidates, work)
        assert instance is not None, "the item was dequeued because it fits"
        return instance

    def _startable(self, instance: Instance) -> Iterator[ItemKind]:
        """Yield the kinds of items that an encode instance may have capacity for."""
        if self._has_patches(instance):
            yield ItemKind.SHORT
        if instance.account.num(WorkKind.LONG_ITEM) < instance.credit.long_items:
            yield ItemKind.LONG
        if self._has_patches(instance, CACHED_CREDITS):
            yield ItemKind.CACHED

    @staticmethod
    def _has_patches(instance: Instance, credits: int = 1) -> bool:
        return instance.account.patches < credits * instance.credit.patches

    @staticmethod
    def _has_parts(task: EncodeTask, instance: Instance) -> bool:
        """Return whether an encode instance probably has an item's rows, or is encoding them."""
        return all(map(instance.has_part, task.part_names))

    def has_cached(self, item: PlannedItem, salt: str) -> bool:
        """Return whether an encode instance probably has an item's rows, or is encoding them."""
        names = part_names(item.key, salt, range(item.plan.num_parts))
        return any(all(map(one.has_part, names)) for one in self._membership.encode_instances(begun=True))

    def _fits(self, task: EncodeTask, instance: Instance) -> bool:
        """Return whether an encode instance has capacity for an item, and its request may be there."""
        if not self._quarantine.allows(self._state(task), instance):
            return False
        if self._has_parts(task, instance):
            return self._has_patches(instance, CACHED_CREDITS)
        if not task.item.plan.is_time_sliced(instance.capacity.encode_batch_patches):
            return self._has_patches(instance)
        account = instance.account
        own, num_long = account.num_long_of(task.client), account.num(WorkKind.LONG_ITEM)
        return num_long < instance.credit.long_items and own < LONG_ITEMS_PER_CLIENT

    def _dispatch_to(self, task: EncodeTask, instance: Instance) -> None:
        cached = self._has_parts(task, instance)
        is_kept = all(name in instance.encoded for name in task.part_names)
        joins = cached and not is_kept
        items = self._requests[task.request]
        encode = InFlightEncode(
            instance=instance,
            request=task.request,
            client=task.client,
            kind=WorkKind.ITEM,
            cost=0,
            patches=1,
            encodes=() if is_kept else task.part_names,
            task=task,
            cached=cached,
            joins=joins,
        )
        if not joins:
            _bear(encode)
        if task.key in items.waited or (not is_kept and _encodes_part(task, instance)):
            items.waited.discard(task.key)
            self._note_wait()
        del items.queued[task.key]
        items.in_flight[task.transfer] = self._in_flight[task.transfer] = encode
        self._at[instance.address][task.transfer] = encode
        self._unfinished[encode] = None
        self._table.charge(self._state(task), encode)
        now = self._clock.now()
        self._rate.set_busy(now, busy=True)
        message = Encode(
            transfer=task.transfer,
            consumer=task.consumer,
            reply_to=self._address,
            key=task.item.key,
            plan=task.item.plan,
            size=len(task.item.data),
            parts=task.parts,
            attempt=task.attempt,
            timeout=time_left(task.deadline, now),
            cache_salt=task.cache_salt,
            client=task.client,
            rows=task.rows,
        )
        self._send(instance.address, message)

    def cost_ahead(self, cost: float) -> float:
        """Return the cost in flight that is done before a new item of this cost. A time-sliced item delays it by at
        most its own cost."""
        return sum(min(one.cost, cost) if one.long else one.cost for one in self._unfinished)

    @property
    def outstanding(self) -> int:
        """Cost of all items that aren't encoded yet, queued or in flight. Takes time in proportion to their number."""
        return sum(ticket.work.cost for ticket in self._queue) + sum(one.cost for one in self._unfinished)

    def is_pending(self, request: RequestId) -> bool:
        """Return whether any item of the request is not encoded yet."""
        items = self._requests.get(request)
        return items is not None and bool(
            items.queued or any(one in self._unfinished for one in items.in_flight.values())
        )

    def get(self, transfer: TransferId, attempt: int) -> InFlightEncode | None:
        """Return the item that was dispatched for that attempt of a transfer; None if there is none, its request has
        ended, or another instance has it."""
        encode = self._in_flight.get(transfer)
        return encode if encode is not None and encode.task.attempt == attempt else None

    def media(self, wanted: FetchMedia) -> MediaBytes | MediaGone:
        """Return the answer to an instance that asks for a piece of an item's file."""
        encode = self._in_flight.get(wanted.transfer)
        if encode is None or encode.instance.address != wanted.reply_to:
            return MediaGone(wanted.transfer)
        data = encode.task.item.data
        encode.num_bytes_sent += wanted.length
        if encode.num_bytes_sent > MAX_MEDIA_SENDS * max(len(data), MEDIA_PIECE_BYTES):
            return MediaGone(wanted.transfer)
        return MediaBytes(wanted.transfer, wanted.offset, data[wanted.offset : wanted.offset + wanted.length])

    def finish(self, encode: InFlightEncode, *, cached: bool) -> None:
        """Record that an item is encoded. A ``cached`` one is refunded to its client."""
        if cached and encode in self._unfinished:
            self._queue.charge(encode.task.client, -encode.task.cost)
        self._note_cached(encode)
        self._free_capacity(encode, 0.0 if cached else encode.cost)

    def failed(self, encode: InFlightEncode) -> None:
        """Note that an item couldn't be encoded: its instance doesn't have its rows, whatever it had said."""
        for name in encode.task.part_names:
            encode.instance.encoded.discard(name)

    def all_landed(self, state: RequestState) -> None:
        """Note that all rows of a request have arrived: its items are encoded, though an instance may yet have to say
        so."""
        items = self._requests.get(state.id)
        for encode in items.in_flight.values() if items else ():
            if encode in self._unfinished:
                self.finish(encode, cached=encode.cached)

    def _note_cached(self, encode: InFlightEncode) -> None:
        """Note that an item's rows are in the cache of its instance."""
        if self._policy.uses_caches:
            task, instance = encode.task, encode.instance
            for number, name in zip(task.parts, task.part_names, strict=True):
                num_bytes = task.item.plan.rows_of(number) * instance.media_row_bytes
                instance.encoded.add(name, num_bytes, instance.encode_cache_bytes)

    def release(self, state: RequestState) -> None:
        """Release a request's items, because it has ended or another instance computes its prompt."""
        if items := self._requests.pop(state.id, None):
            for key in [*items.queued, *(encode.task.key for encode in items.in_flight.values())]:
                self._release_item(items, key)

    def consumer_lost(self, consumer: Address) -> list[RequestId]:
        """Drop the queued items of a language instance, or of another engine, that is gone. Returns their requests."""
        dropped = [ticket.work for ticket in self._queue if ticket.work.consumer == consumer]
        for task in dropped:
            self._dequeue(self._requests[task.request], task.key)
        return list(dict.fromkeys(task.request for task in dropped))

    def instance_lost(self, instance: Instance) -> tuple[list[TransferId], list[RequestId]]:
        """Forget what an encode instance was assigned. Returns all its transfers, whose consumers ask again for the
        rows that they lack, and the requests of those that it hadn't finished, each once."""
        assigned = self._at.pop(instance.address, {})
        requests = dict.fromkeys(one.task.request for one in assigned.values() if one in self._unfinished)
        for transfer, encode in assigned.items():
            self._free_capacity(encode, 0.0)
            del self._in_flight[transfer]
            del self._requests[encode.task.request].in_flight[transfer]
        return list(assigned), list(requests)

    def hand_back(self, instance: Instance, message: HandBack) -> list[RequestId]:
        """Forget what an instance was assigned and hasn't begun, at no cost to the clients. Returns the
        requests concerned, whose consumers ask for the items again."""
        held = self._at.get(instance.address, {})
        returned = [
            one
            for transfer in message.transfers
            if (one := held.get(transfer)) is not None and one.task.attempt == message.attempts.get(transfer, 0)
        ]
        for encode in returned:
            if encode in self._unfinished:
                self._queue.charge(encode.task.client, -encode.task.cost)
            self._release_item(self._requests[encode.task.request], encode.task.key)
        return [encode.task.request for encode in returned]

    def queued_requests(self) -> list[RequestId]:
        """Return the requests with queued items, each once."""
        return list(dict.fromkeys(ticket.work.request for ticket in self._queue))

    def debug_state(self) -> EncodeDispatcherState:
        return EncodeDispatcherState(
            requests=frozenset(self._requests),
            in_flight=dict(self._in_flight),
            unfinished=frozenset(self._unfinished),
            pending=frozenset(filter(self.is_pending, self._requests)),
            queue=self._queue.debug_state(),
            queued=tuple(self._queue),
        )

    def oldest(self) -> float | None:
        """Return when the first of the queued items was queued, by the router's clock; None if none is queued."""
        return min((ticket.work.since for ticket in self._queue.heads()), default=None)

    def working_on(self, request: RequestId) -> list[str]:
        """Return the names of the encode instances that have items of a request."""
        items = self._requests.get(request)
        return list(dict.fromkeys(one.instance.name for one in items.in_flight.values())) if items else []

    def num_at(self, instance: Instance) -> int:
        """Return the number of items that an encode instance was assigned."""
        return len(self._at.get(instance.address, ()))

    def __len__(self) -> int:
        """Number of queued items."""
        return len(self._queue)

    def _release_item(self, items: _RequestItems, key: ItemSection) -> bool:
        """Release an item or section, queued or in flight; return False if it is neither."""
        earlier = [transfer for transfer, encode in items.in_flight.items() if encode.task.key == key]
        for transfer in earlier:
            encode = items.in_flight.pop(transfer)
            del self._in_flight[transfer]
            held = self._at[encode.instance.address]
            held.pop(transfer, None)
            if not held:
                del self._at[encode.instance.address]
            was_unfinished = encode in self._unfinished
            self._free_capacity(encode, 0.0)
            if was_unfinished and not encode.joins:
                self._bequeath(encode, held.values())
        return self._dequeue(items, key) or bool(earlier)

    def _dequeue(self, items: _RequestItems, key: ItemSection) -> bool:
        """Take an item or section out of the queue; return False if it isn't there."""
        if (ticket := items.queued.pop(key, None)) is None:
            return False
        items.waited.discard(key)
        self._queue.remove(ticket)
        self.num_openings += 1  # others may have waited behind it
        return True

    def _bequeath(self, encode: InFlightEncode, others: Iterable[InFlightEncode]) -> None:
        """Charge what an instance goes on encoding after one request no longer needs it to those that joined."""
        left = {name for name in encode.encodes if name in encode.instance.account.encoding}
        for one in others if left else ():
            if one.joins and one in self._unfinished and not left.isdisjoint(one.encodes):
                left.difference_update(one.encodes)
                state = self._state(one.task)
                self._table.release(state, one)
                one.joins = one.cached = False
                _bear(one)
                self._table.charge(state, one)

    def _free_capacity(self, encode: InFlightEncode, done: float) -> None:
        """Free the capacity that an item takes at its encode instance. ``done`` is the cost that was actually work."""
        state = self._table.get(encode.request)
        if state is None or not self._table.release(state, encode):
            return
        del self._unfinished[encode]
        now = self._clock.now()
        self._rate.add(done, now)
        self._rate.set_busy(now, busy=bool(self._unfinished))


def _bear(encode: InFlightEncode) -> None:
    """Set what an item costs that gets its rows from no other one's work."""
    task, batch_patches = encode.task, encode.instance.capacity.encode_batch_patches
    long = task.item.plan.is_time_sliced(batch_patches) and not encode.cached
    encode.kind = WorkKind.LONG_ITEM if long else WorkKind.ITEM
    encode.cost, encode.patches = task.cost, 0 if long else min(task.patches, batch_patches)


def _missing_cost(task: EncodeTask, instance: Instance) -> float:
    """Return the cost of a task's parts that an encode instance probably doesn't have, and isn't encoding."""
    parts = zip(task.parts, task.part_names, strict=True)
    return sum(task.item.plan.parts[number].cost for number, name in parts if not instance.has_part(name))


def _encodes_part(task: EncodeTask, instance: Instance) -> bool:
    """Return whether an instance is encoding one of a task's parts."""
    return not instance.account.encoding.keys().isdisjoint(task.part_names)


def _cost_until_done(task: EncodeTask, instance: Instance) -> float:
    """Return the cost of what an encode instance does until it has a task's rows."""
    return _load_before(instance, task.cost) + _missing_cost(task, instance)


def _load_before(instance: Instance, cost: float) -> float:
    """Return the cost of what an encode instance does before items of this cost, which time-sliced ones delay by at
    most their own."""
    items = [one for one in instance.account if one.kind in ENCODE_KINDS]
    return sum(min(one.cost, cost) if one.kind is WorkKind.LONG_ITEM else one.cost for one in items)
