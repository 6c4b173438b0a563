"""Queues media items and dispatches them to encode instances. Holds no socket.

Each instance is given only a few batches at a time, so that the rest stays in the fair queue and can be reordered.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from triptych.fair_queue import FairQueue, QueueState, Ticket
from triptych.messages.codec import Message
from triptych.messages.work import Encode, time_left
from triptych.prompt.prompt import PlannedItem
from triptych.router.forecast import Rate
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease
from triptych.types import Address, ItemPlan, RequestId, TransferId

ENCODE_BATCHES_AHEAD = 4
"""Batches of patches in flight at an encode instance: one in the tower, the others being preprocessed."""

LONG_ITEMS = 4
"""Time-sliced items in flight at an encode instance, besides these. Bounded, because each keeps a decoder open."""

LONG_ITEMS_PER_CLIENT = LONG_ITEMS - 1
"""Maximum of these items that may belong to one client, so that slots remain for other clients."""


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
    deadline: float
    """When the embedding is of no use any more, by the router's clock, in seconds."""
    client: str
    cache_salt: str = ""


@dataclass(frozen=True, eq=False)
class InFlightEncode:
    """An item that has been dispatched to an encode instance."""

    task: EncodeTask
    instance: InstanceLease
    """The encode instance."""
    long: bool
    """Whether it is encoded in time slices, alternating with other items."""
    patches: int
    """Patches counted against the instance's capacity; 0 if ``long``."""

    @property
    def cost(self) -> int:
        return cost_of(self.task.item.plan)


@dataclass
class _RequestItems:
    """The items of one request."""

    queued: dict[int, Ticket[EncodeTask]] = field(default_factory=dict)
    """By the item's index."""
    in_flight: dict[TransferId, InFlightEncode] = field(default_factory=dict)


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
        encode_instances: Callable[[], Collection[InstanceLease]],
        address: Address,
        batch_patches: int,
        send: Callable[[Address, Message], None],
        rate: Rate,
        clock: Callable[[], float],
    ) -> None:
        """``encode_instances`` returns the current encode instances. Each gets items while it has fewer than
        ``ENCODE_BATCHES_AHEAD`` batches of ``batch_patches`` in flight, and fewer than ``LONG_ITEMS`` time-sliced
        items. Any other item counts as at most one batch. ``rate`` is updated with the work done, in cost per second.
        """
        self._encode_instances = encode_instances
        self._batch_patches = batch_patches
        self._max_patches = ENCODE_BATCHES_AHEAD * batch_patches
        self._address = address
        self._send = send
        self._rate = rate
        self._clock = clock
        self._queue: FairQueue[EncodeTask] = FairQueue()
        self._requests: dict[RequestId, _RequestItems] = {}
        self._in_flight: dict[TransferId, InFlightEncode] = {}
        self._unfinished: set[InFlightEncode] = set()

    def enqueue(self, task: EncodeTask, priority: int) -> bool:
        """Queue an item; call ``dispatch`` afterwards. Return whether it replaces an earlier transfer of the same item,
        as after a preemption."""
        items = self._requests.setdefault(task.request, _RequestItems())
        replaced = self._release_item(items, task.index)
        plan = task.item.plan
        kind = "long" if plan.is_time_sliced(self._batch_patches) else "short"
        items.queued[task.index] = self._queue.add(task, task.client, cost_of(plan), priority, kind)
        return replaced

    def dispatch(self) -> None:
        """Dispatch queued items to encode instances with capacity, each to the least loaded one."""
        while ticket := self._queue.pop(lambda task: bool(self._with_capacity(task))):
            instance = least_outstanding(self._with_capacity(ticket.work))
            assert instance is not None
            self._dispatch_to(ticket.work, instance)

    def _with_capacity(self, task: EncodeTask) -> list[InstanceLease]:
        """Return the encode instances that have capacity for an item."""
        if not task.item.plan.is_time_sliced(self._batch_patches):
            return [one for one in self._encode_instances() if one.patches < self._max_patches]
        long = [encode for encode in self._unfinished if encode.long]
        by_instance = Counter(encode.instance.address for encode in long)
        own = Counter(encode.instance.address for encode in long if encode.task.client == task.client)
        return [
            one
            for one in self._encode_instances()
            if by_instance[one.address] < LONG_ITEMS and own[one.address] < LONG_ITEMS_PER_CLIENT
        ]

    def _dispatch_to(self, task: EncodeTask, instance: InstanceLease) -> None:
        item, plan = task.item, task.item.plan
        long = plan.is_time_sliced(self._batch_patches)
        patches = 0 if long else min(plan.patches, self._batch_patches)
        items, encode = self._requests[task.request], InFlightEncode(task, instance, long, patches)
        del items.queued[task.index]
        items.in_flight[task.transfer] = self._in_flight[task.transfer] = encode
        self._unfinished.add(encode)
        instance.assign(encode.cost)
        instance.patches += patches
        now = self._clock()
        self._rate.set_busy(now, busy=True)
        timeout = time_left(task.deadline, now)
        salt, client = task.cache_salt, task.client
        message = Encode(task.transfer, task.consumer, self._address, item.key, plan, item.data, timeout, salt, client)
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

    def transfers_of(self, instance: InstanceLease) -> list[TransferId]:
        """Return the transfers that an encode instance was assigned to offer."""
        return [transfer for transfer, encode in self._in_flight.items() if encode.instance is instance]

    def unfinished_requests(self, instance: InstanceLease) -> list[RequestId]:
        """Return the requests with unfinished items at an encode instance, each once."""
        in_flight = [one for one in self._in_flight.values() if one.instance is instance and one in self._unfinished]
        return list(dict.fromkeys(one.task.request for one in in_flight))

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
            self._free_capacity(items.in_flight.pop(transfer), 0.0)
            del self._in_flight[transfer]
        if ticket := items.queued.pop(index, None):
            self._queue.remove(ticket)
        return bool(earlier or ticket)

    def _free_capacity(self, encode: InFlightEncode, done: float) -> None:
        """Free the capacity that an item takes at its encode instance. ``done`` is the cost that was actually work."""
        if encode in self._unfinished:
            self._unfinished.remove(encode)
            encode.instance.outstanding -= encode.cost
            encode.instance.patches -= encode.patches
            now = self._clock()
            self._rate.add(done, now)
            self._rate.set_busy(now, busy=bool(self._unfinished))
