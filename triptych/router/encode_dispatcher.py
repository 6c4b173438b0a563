"""Queues media items and dispatches them to encode instances. Holds no socket.

Each instance is given only a few batches at a time, so that the rest stays in the fair queue and can be reordered.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.fair_queue import FairQueue, QueueState, Ticket
from triptych.messages.codec import Message
from triptych.messages.work import MEDIA_PIECE_BYTES, Encode, FetchMedia, MediaBytes, MediaGone, time_left
from triptych.prompt.prompt import PlannedItem
from triptych.router.forecast import Rate
from triptych.router.membership import InstanceLease, Membership
from triptych.router.placement import least_outstanding
from triptych.types import Address, ItemPlan, RequestId, TransferId

ENCODE_BATCHES_AHEAD = 4
"""Batches of patches in flight at an encode instance: one in the tower, the others being preprocessed."""

LONG_ITEMS = 4
"""Time-sliced items in flight at an encode instance, besides these. Bounded, because each keeps a decoder open."""

LONG_ITEMS_PER_CLIENT = LONG_ITEMS - 1
"""Maximum of these items that may belong to one client, so that slots remain for other clients."""

MAX_MEDIA_SENDS = 8
"""Times that an instance may fetch an item's file. It asks again for what got lost. Bounded, because what it asks for
and doesn't read stays in this process's memory."""


@dataclass(frozen=True, eq=False)
class EncodeTask:
    """An item whose embedding a language instance needs."""

    request: RequestId
    index: int
    """The item's index in its request."""
    item: PlannedItem
    transfer: TransferId
    consumer: Address
    """The language instance."""
    first_row: int
    """The consumer has the rows before this one."""
    attempt: int
    """As in MissingItem."""
    asked: int
    """As in EncodeNeeded."""
    deadline: float
    """When the embedding is of no use any more, by the router's clock, in seconds."""
    client: str
    priority: int
    cache_salt: str = ""


@dataclass(eq=False)
class InFlightEncode:
    """An item that has been dispatched to an encode instance."""

    task: EncodeTask
    instance: InstanceLease
    """The encode instance."""
    long: bool
    """Whether it is encoded in time slices, alternating with other items."""
    patches: int
    """Patches counted against the instance's capacity; 0 if ``long``."""
    num_bytes_sent: int = 0
    """Of its file."""

    @property
    def cost(self) -> int:
        return cost_of(self.task.item.plan)


@dataclass
class _RequestItems:
    """The items of one request."""

    queued: dict[int, Ticket[EncodeTask]] = field(default_factory=dict)
    """By the item's index."""
    in_flight: dict[TransferId, InFlightEncode] = field(default_factory=dict)

    def known(self, index: int) -> list[EncodeTask]:
        """Return what was asked for last of the item of that index, queued or dispatched; empty if nothing was."""
        queued = [self.queued[index].work] if index in self.queued else []
        return queued + [one.task for one in self.in_flight.values() if one.task.index == index]


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


def cost_of(plan: ItemPlan) -> int:
    """Return a plan's cost as a whole number, so that sums and differences are exact."""
    return max(1, round(plan.cost))


class EncodeDispatcher:
    """Queues items by client and assigns them to encode instances with capacity."""

    def __init__(
        self,
        *,
        membership: Membership,
        address: Address,
        send: Callable[[Address, Message], None],
        rate: Rate,
        clock: Callable[[], float],
    ) -> None:
        """Each encode instance gets items while it has fewer than ``ENCODE_BATCHES_AHEAD`` of its batches in flight,
        and fewer than ``LONG_ITEMS`` time-sliced items. Any other item counts as at most one batch. ``address`` is this
        frontend's. ``rate`` is updated with the work done, in cost per second."""
        self._membership = membership
        self._address = address
        self._send = send
        self._rate = rate
        self._clock = clock
        self._queue: FairQueue[EncodeTask] = FairQueue()
        self._requests: dict[RequestId, _RequestItems] = {}
        self._in_flight: dict[TransferId, InFlightEncode] = {}
        self._at: defaultdict[Address, dict[TransferId, InFlightEncode]] = defaultdict(dict)
        """Those of them that an instance was assigned, by its address."""
        self._unfinished: dict[InFlightEncode, None] = {}
        self._num_long: Counter[tuple[Address, str]] = Counter()
        """Unfinished time-sliced items of a client at an instance."""

    def enqueue(self, task: EncodeTask) -> bool:
        """Queue an item; call ``dispatch`` afterwards. Return whether it replaces an earlier transfer of the same item,
        as after a preemption. Does nothing if the instance has asked for the item later or this is known already."""
        items = self._requests.setdefault(task.request, _RequestItems())
        if any(known.asked >= task.asked for known in items.known(task.index)):
            return False
        replaced = self._release_item(items, task.index)
        plan = task.item.plan
        kind = "long" if plan.is_time_sliced(self._membership.encode_batch_patches) else "short"
        items.queued[task.index] = self._queue.add(task, task.client, cost_of(plan), task.priority, kind)
        return replaced

    def dispatch(self) -> None:
        """Dispatch queued items to encode instances with capacity, each to the least loaded one."""
        while instances := self._with_capacity():
            if (ticket := self._queue.pop(lambda task: any(self._fits(task, one) for one in instances))) is None:
                return
            instance = least_outstanding([one for one in instances if self._fits(ticket.work, one)])
            assert instance is not None
            self._dispatch_to(ticket.work, instance)

    def _with_capacity(self) -> list[InstanceLease]:
        """Return the encode instances that have capacity for some item; none if nothing is queued."""
        if not len(self._queue):
            return []
        instances = self._membership.encode_instances(begun=True)
        return [one for one in instances if self._has_patches(one) or one.num_long < LONG_ITEMS]

    @staticmethod
    def _has_patches(instance: InstanceLease) -> bool:
        return instance.patches < ENCODE_BATCHES_AHEAD * instance.capacity.encode_batch_patches

    def _fits(self, task: EncodeTask, instance: InstanceLease) -> bool:
        """Return whether an encode instance has capacity for an item."""
        if not task.item.plan.is_time_sliced(instance.capacity.encode_batch_patches):
            return self._has_patches(instance)
        own = self._num_long[instance.address, task.client]
        return instance.num_long < LONG_ITEMS and own < LONG_ITEMS_PER_CLIENT

    def _dispatch_to(self, task: EncodeTask, instance: InstanceLease) -> None:
        item, plan, batch_patches = task.item, task.item.plan, instance.capacity.encode_batch_patches
        long = plan.is_time_sliced(batch_patches)
        patches = 0 if long else min(plan.patches, batch_patches)
        items, encode = self._requests[task.request], InFlightEncode(task, instance, long, patches)
        del items.queued[task.index]
        items.in_flight[task.transfer] = self._in_flight[task.transfer] = encode
        self._at[instance.address][task.transfer] = encode
        self._unfinished[encode] = None
        instance.assign(encode.cost)
        instance.patches += patches
        if long:
            instance.num_long += 1
            self._num_long[instance.address, task.client] += 1
        now = self._clock()
        self._rate.set_busy(now, busy=True)
        message = Encode(
            transfer=task.transfer,
            consumer=task.consumer,
            reply_to=self._address,
            key=item.key,
            plan=plan,
            size=len(item.data),
            first_row=task.first_row,
            attempt=task.attempt,
            timeout=time_left(task.deadline, now),
            cache_salt=task.cache_salt,
            client=task.client,
        )
        self._send(instance.address, message)

    def cost_ahead(self, cost: float) -> float:
        """Return the cost in flight that is done before a new item of this cost. A time-sliced item delays it by at
        most its own cost."""
        return sum(min(one.cost, cost) if one.long else one.cost for one in self._unfinished)

    def is_pending(self, request: RequestId) -> bool:
        """Return whether any item of the request is not encoded yet."""
        items = self._requests.get(request)
        return items is not None and bool(
            items.queued or any(one in self._unfinished for one in items.in_flight.values())
        )

    def get(self, transfer: TransferId) -> InFlightEncode | None:
        """Return the item that was dispatched for that transfer; None if there is none or its request has ended."""
        return self._in_flight.get(transfer)

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
            self._queue.charge(encode.task.client, -encode.cost)
        self._free_capacity(encode, 0.0 if cached else encode.cost)
        self.dispatch()

    def release(self, request: RequestId) -> None:
        """Release a request's items, because it has ended or another instance computes its prompt. Call ``dispatch``
        afterwards."""
        if items := self._requests.pop(request, None):
            for index in [*items.queued, *(encode.task.index for encode in items.in_flight.values())]:
                self._release_item(items, index)

    def consumer_lost(self, consumer: Address) -> None:
        """Drop the queued items of a language instance that is gone."""
        for ticket in self._queue:
            if ticket.work.consumer == consumer:
                self._queue.remove(ticket)
                del self._requests[ticket.work.request].queued[ticket.work.index]

    def instance_lost(self, instance: InstanceLease) -> tuple[list[TransferId], list[RequestId]]:
        """Forget what an encode instance was assigned. Returns all its transfers, whose consumers ask again for the
        rows that they lack, and the requests of those that it hadn't finished, each once."""
        assigned = self._at.pop(instance.address, {})
        requests = dict.fromkeys(one.task.request for one in assigned.values() if one in self._unfinished)
        for transfer, encode in assigned.items():
            self._free_capacity(encode, 0.0)
            del self._in_flight[transfer]
            del self._requests[encode.task.request].in_flight[transfer]
        return list(assigned), list(requests)

    def hand_back(self, instance: InstanceLease, transfers: Sequence[TransferId]) -> list[RequestId]:
        """Forget what an instance was assigned and hasn't begun, at no cost to the clients; call ``dispatch``
        afterwards. Returns the requests concerned, whose consumers ask for the items again."""
        returned = [one for transfer in transfers if (one := self._at[instance.address].get(transfer)) is not None]
        for encode in returned:
            if encode in self._unfinished:
                self._queue.charge(encode.task.client, -encode.cost)
            self._release_item(self._requests[encode.task.request], encode.task.index)
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
        )

    def __len__(self) -> int:
        """Number of queued items."""
        return len(self._queue)

    def _release_item(self, items: _RequestItems, index: int) -> bool:
        """Release an item, queued or in flight; return False if it is neither."""
        earlier = [transfer for transfer, encode in items.in_flight.items() if encode.task.index == index]
        for transfer in earlier:
            encode = items.in_flight.pop(transfer)
            self._free_capacity(encode, 0.0)
            del self._in_flight[transfer]
            held = self._at[encode.instance.address]
            held.pop(transfer, None)
            if not held:
                del self._at[encode.instance.address]
        if ticket := items.queued.pop(index, None):
            self._queue.remove(ticket)
        return bool(earlier or ticket)

    def _free_capacity(self, encode: InFlightEncode, done: float) -> None:
        """Free the capacity that an item takes at its encode instance. ``done`` is the cost that was actually work."""
        if encode not in self._unfinished:
            return
        del self._unfinished[encode]
        instance, client = encode.instance, encode.task.client
        instance.outstanding -= encode.cost
        instance.patches -= encode.patches
        if encode.long:
            instance.num_long -= 1
            self._num_long[instance.address, client] -= 1
            if not self._num_long[instance.address, client]:
                del self._num_long[instance.address, client]
        now = self._clock()
        self._rate.add(done, now)
        self._rate.set_busy(now, busy=bool(self._unfinished))
