"""The media items of all requests on their way through encode instances: in line, and in hand. Holds no socket.

Instances are given a few batches at a time, so that the order of the rest is still to choose: whose turn it is, is the
fair queue's to say.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from triptych.fair_queue import FairQueue, Ticket
from triptych.messages.codec import Message
from triptych.messages.work import Encode, time_left
from triptych.prompt.prompt import PlannedItem
from triptych.router.forecast import Rate
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease
from triptych.types import Address, ItemPlan, RequestId, TransferId

ENCODE_BATCHES_AHEAD = 4
"""Batches of patches that an encode instance has at a time: one in the tower, the others being preprocessed."""

LONG_ITEMS = 4
"""Besides these, so many items that it encodes by turns with all else: each keeps a decoder open while it waits."""

LONG_ITEMS_PER_CLIENT = LONG_ITEMS - 1
"""So many of them may be one client's: another's first one needn't wait until one has ended."""


@dataclass(frozen=True, eq=False)
class EncodeTask:
    """An item, the ``index``-th of ``client``'s request, whose rows ``consumer`` lacks; by the ``deadline``, on the
    router's clock, they are of no use any more."""

    request: RequestId
    index: int
    item: PlannedItem
    transfer: TransferId
    consumer: Address
    deadline: float
    client: str
    cache_salt: str = ""


@dataclass(frozen=True, eq=False)
class InFlightEncode:
    """One item in the hands of ``encoder``, on its way to a language instance. ``patches`` is the room that it takes:
    none if it is ``long``, and encoded by turns."""

    wanted: EncodeTask
    encoder: InstanceLease
    long: bool
    patches: int

    @property
    def cost(self) -> int:
        return cost_of(self.wanted.item.plan)


@dataclass
class _Items:
    """Of one request: by item's index those in line, by transfer those in hand."""

    in_line: dict[int, Ticket[EncodeTask]] = field(default_factory=dict)
    in_hand: dict[TransferId, InFlightEncode] = field(default_factory=dict)


def cost_of(plan: ItemPlan) -> int:
    """A plan's cost as a whole number: sums of them are exact."""
    return max(1, round(plan.cost))


class EncodeDispatcher:
    """Which items wait, and who encodes the others."""

    def __init__(
        self,
        *,
        encoders: Callable[[], Collection[InstanceLease]],
        batch_patches: int,
        tell: Callable[[Address, Message], None],
        rate: Rate,
        clock: Callable[[], float],
    ) -> None:
        """``encoders`` says which encode instances there are; each is given more while it has less than
        ``ENCODE_BATCHES_AHEAD`` batches of ``batch_patches`` in hand, and fewer than ``LONG_ITEMS`` items that take
        turns. Any other item counts as one batch at most. ``rate`` learns how fast they are, in cost per second."""
        self._encoders = encoders
        self._batch_patches = batch_patches
        self._max_patches = ENCODE_BATCHES_AHEAD * batch_patches
        self._tell = tell
        self._rate = rate
        self._clock = clock
        self._line: FairQueue[EncodeTask] = FairQueue()
        self._requests: dict[RequestId, _Items] = {}
        self._in_hand: dict[TransferId, InFlightEncode] = {}
        self._unfinished: set[InFlightEncode] = set()

    def want(self, wanted: EncodeTask, priority: int) -> bool:
        """Puts an item in line. Whether it is there or in hand already, for a transfer that this one replaces: after a
        preemption an item is needed anew. Call ``start`` afterwards."""
        items = self._requests.setdefault(wanted.request, _Items())
        anew = self._drop(items, wanted.index)
        plan = wanted.item.plan
        kind = "long" if plan.takes_turns(self._batch_patches) else "short"
        items.in_line[wanted.index] = self._line.add(wanted, wanted.client, cost_of(plan), priority, kind)
        return anew

    def start(self) -> None:
        """Gives items to encode instances that have room: whose turn it is goes to the one with the least to do."""
        while ticket := self._line.pop(lambda wanted: bool(self._with_room(wanted))):
            encoder = least_outstanding(self._with_room(ticket.work))
            assert encoder is not None
            self._give(ticket.work, encoder)

    def _with_room(self, wanted: EncodeTask) -> list[InstanceLease]:
        """The encode instances that may be given an item."""
        if not wanted.item.plan.takes_turns(self._batch_patches):
            return [one for one in self._encoders() if one.patches < self._max_patches]
        long = [encoding for encoding in self._unfinished if encoding.long]
        by_encoder = Counter(encoding.encoder.address for encoding in long)
        own = Counter(encoding.encoder.address for encoding in long if encoding.wanted.client == wanted.client)
        return [
            one
            for one in self._encoders()
            if by_encoder[one.address] < LONG_ITEMS and own[one.address] < LONG_ITEMS_PER_CLIENT
        ]

    def _give(self, wanted: EncodeTask, encoder: InstanceLease) -> None:
        item, plan = wanted.item, wanted.item.plan
        long = plan.takes_turns(self._batch_patches)
        patches = 0 if long else min(plan.patches, self._batch_patches)
        items, encoding = self._requests[wanted.request], InFlightEncode(wanted, encoder, long, patches)
        del items.in_line[wanted.index]
        items.in_hand[wanted.transfer] = self._in_hand[wanted.transfer] = encoding
        self._unfinished.add(encoding)
        encoder.give(encoding.cost)
        encoder.patches += patches
        now = self._clock()
        self._rate.look(now, busy=True)
        timeout = time_left(wanted.deadline, now)
        salt, client = wanted.cache_salt, wanted.client
        encode = Encode(wanted.transfer, wanted.consumer, item.key, plan, item.data, timeout, salt, client)
        self._tell(encoder.address, encode)

    def ahead(self, cost: float) -> float:
        """How much of what encode instances have in hand is done before new items of that cost: of what is encoded by
        turns with them no more than they are themselves."""
        return sum(min(one.cost, cost) if one.long else one.cost for one in self._unfinished)

    def waits(self, request: RequestId) -> bool:
        """Whether an item of the request isn't encoded yet."""
        items = self._requests.get(request)
        return items is not None and bool(
            items.in_line or any(one in self._unfinished for one in items.in_hand.values())
        )

    def get(self, transfer: TransferId) -> InFlightEncode | None:
        """The item that was given to an encode instance for that transfer, and whose request goes on."""
        return self._in_hand.get(transfer)

    def encoded(self, encoding: InFlightEncode, *, cached: bool) -> None:
        """The instance has done its part; ``cached`` when that was little."""
        if cached and encoding in self._unfinished:
            self._line.charge(encoding.wanted.client, -encoding.cost)
        self._settle(encoding, 0.0 if cached else encoding.cost)
        self.start()

    def forget(self, request: RequestId) -> None:
        """The request has ended, or its prompt is somebody else's to compute: its items are off the books. Call
        ``start`` afterwards."""
        if items := self._requests.pop(request, None):
            for index in [*items.in_line, *(encoding.wanted.index for encoding in items.in_hand.values())]:
                self._drop(items, index)

    def consumer_lost(self, consumer: Address) -> None:
        """Nobody is there any more to whom rows could be offered that haven't been asked of an instance yet."""
        for ticket in self._line:
            if ticket.work.consumer == consumer:
                self._line.remove(ticket)
                del self._requests[ticket.work.request].in_line[ticket.work.index]

    def offered_by(self, encoder: InstanceLease) -> list[TransferId]:
        """What that instance was given to offer."""
        return [transfer for transfer, encoding in self._in_hand.items() if encoding.encoder is encoder]

    def unfinished_at(self, encoder: InstanceLease) -> list[RequestId]:
        """The requests with items that it has in hand, each once."""
        in_hand = [one for one in self._in_hand.values() if one.encoder is encoder and one in self._unfinished]
        return list(dict.fromkeys(one.wanted.request for one in in_hand))

    def in_line(self) -> list[RequestId]:
        """The requests with items in line, each once."""
        return list(dict.fromkeys(ticket.work.request for ticket in self._line))

    def __len__(self) -> int:
        """Items in line."""
        return len(self._line)

    def _drop(self, items: _Items, index: int) -> bool:
        """Takes an item off the books, wherever it is; False when it is nowhere."""
        earlier = [transfer for transfer, encoding in items.in_hand.items() if encoding.wanted.index == index]
        for transfer in earlier:
            self._settle(items.in_hand.pop(transfer), 0.0)
            del self._in_hand[transfer]
        if ticket := items.in_line.pop(index, None):
            self._line.remove(ticket)
        return bool(earlier or ticket)

    def _settle(self, encoding: InFlightEncode, done: float) -> None:
        """An encode instance has nothing more to do for an item; so much of its cost was really work."""
        if encoding in self._unfinished:
            self._unfinished.remove(encoding)
            encoding.encoder.outstanding -= encoding.cost
            encoding.encoder.patches -= encoding.patches
            now = self._clock()
            self._rate.done(done, now)
            self._rate.look(now, busy=bool(self._unfinished))
