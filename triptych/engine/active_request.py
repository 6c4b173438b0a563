"""Record of an active request: everything that an engine loop knows about it."""

from dataclasses import dataclass, field

from triptych.engine.grammar.matching import Matching
from triptych.engine.kv_rows import KVRows
from triptych.engine.page_tables import PageTables
from triptych.engine.request import Request
from triptych.engine.scheduler import Chunk
from triptych.messages.work import Generate, Prefill, Prefilled
from triptych.observe.timeline import Interval, shifted
from triptych.transfer.memory import Bytes
from triptych.types import Address, Placement, RequestId, TransferId

MERGE_GAP = 0.005
"""Prefill steps less than this many seconds apart form one interval: the time to schedule a step, with a margin."""


@dataclass
class Timings:
    """When a request reached each state, by the clock's ``monotonic``; 0 for not yet."""

    received: float
    reused: int = 0
    """Prompt tokens found in the prefix cache on arrival."""
    ready: float = 0.0
    """When something was first to be computed."""
    scheduled: float = 0.0
    first_token: float = 0.0
    transfers: list[Interval] = field(default_factory=list)
    prefills: list[Interval] = field(default_factory=list)

    def add_prefill(self, began: float, ended: float) -> None:
        """Record a step that computed part of the prompt. Steps in close succession form one interval."""
        if self.prefills and began - self.prefills[-1].end < MERGE_GAP:
            began = self.prefills.pop().start
        self.prefills.append(Interval("prefill", began, ended))

    def until_first_token(self, now: float) -> list[Interval]:
        """Return the intervals before the first token, for a message that is sent now."""
        # a decode instance schedules before KV arrives
        queued = self.ready if 0 < self.ready <= self.scheduled else self.received
        return shifted([Interval("queue", queued, self.scheduled), *self.transfers, *self.prefills], -now)

    def intervals(self, now: float) -> list[Interval]:
        """Return all intervals, for a message that is sent now."""
        return [*self.until_first_token(now), Interval("decode", self.first_token - now, 0.0)]


@dataclass
class TransferTimes:
    """When the rows of an incoming transfer were written, by the clock's ``monotonic``; 0 for not yet."""

    began: float = 0.0
    """When the first row was written."""
    landed: float = 0.0
    """When the last row so far arrived."""


@dataclass(frozen=True)
class CopiedRows:
    """Rows of an item that are no longer in the receive pool."""

    first_row: int
    rows: Bytes
    """uint8 [rows, row_bytes]."""

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


@dataclass
class IncomingItem:
    """Embeddings of one of the request's items, or of a section of one."""

    index: int
    placement: Placement
    """The section's own; its row 0 is the transfer's."""
    transfer: TransferId | None
    """None once the last row is consumed."""
    times: TransferTimes = field(default_factory=TransferTimes)
    copied: list[CopiedRows] = field(default_factory=list)
    """Rows of an atomic span that were copied out of the receive pool before all of them had landed, in order."""
    section: int = 0
    """Number of the section (``PlacedItem.sections``)."""


@dataclass
class IncomingKV:
    """KV of a request that another instance prefills."""

    transfer: TransferId
    rows: KVRows
    tables: PageTables
    """The request's page tables when it was admitted."""
    copied: int = 0
    """Rows copied to the pages."""
    has_token: bool = False
    """Whether the token after the prompt has arrived."""
    times: TransferTimes = field(default_factory=TransferTimes)

    @property
    def complete(self) -> bool:
        return self.copied == self.rows.num_rows


@dataclass(eq=False)
class OutgoingKV:
    """KV of a request that another instance decodes. Outlives the request until the consumer has all rows."""

    transfer: TransferId
    consumer: Address
    rows: KVRows
    provided: list[int]
    """By layer, the first token that has not been provided."""
    timeout: float
    tables: PageTables
    """The request's pages with rows to send, as far as they have been part of a step. Retained until the transfer
    ends."""
    offered: bool = False
    over: bool = False
    """Whether the transfer has ended. The request may go on until it is cancelled."""


@dataclass(eq=False)
class ActiveRequest:
    """A request from its arrival until its last token, failure or cancellation."""

    request: Request
    """The request as the scheduler sees it."""
    generate: Generate
    deadline: float
    """By the clock's ``now``."""
    num_given: int
    """Tokens that it came with: the prompt, and the answer so far."""
    timings: Timings
    matching: Matching | None = None
    """What its grammar allows next, if it has a grammar."""
    items: list[IncomingItem] = field(default_factory=list)
    """The items that aren't entirely in the KV cache."""
    incoming_kv: IncomingKV | None = None
    """Until all rows and the token after them have arrived."""
    kv_interval: Interval | None = None
    """From the first KV row's writing to the last row's copying."""
    first_token: Prefilled | None = None
    """The token that came with the KV, until it is handled."""
    prefill_attempts: int = 0
    """Prefill instances that were lost in a row."""
    prefill: Prefill | None = None
    """The message that asks for the prefill, if another instance decodes the request."""
    outgoing_kv: OutgoingKV | None = None
    num_asked: int = 0
    """Messages that have asked the frontend for what the request needs."""
    failed: bool = False
    """Whether it has failed, and remains only until its outgoing transfer is aborted."""

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def reply_to(self) -> Address:
        """The frontend that owns the request."""
        return self.generate.reply_to

    def next_asked(self) -> int:
        """Return the number of the next message that asks the frontend for what the request needs."""
        self.num_asked += 1
        return self.num_asked - 1

    @property
    def prefill_transfer(self) -> TransferId:
        """The transfer of the prefill that it is here for; empty if it is decoded here as well."""
        return self.prefill.transfer if self.prefill is not None else TransferId("")

    @property
    def begun(self) -> bool:
        """Whether work on the request would be lost if another instance took it over. The text before an item that
        hasn't arrived doesn't count, nor do pages that wait for KV: the request may have to wait long for either."""
        if self.failed or self.first_token is not None or len(self.request.tokens) > self.num_given:
            return True
        waiting_for = [item.times for item in self.items]
        if self.incoming_kv is not None:
            waiting_for.append(self.incoming_kv.times)
        if waiting_for:
            return any(times.landed for times in waiting_for)
        request = self.request
        return request.running or request.sends_pages or request.num_computed > request.num_reused

    def transfer_intervals(self) -> list[Interval]:
        """Return for each item, and for the KV, the time from the first row's writing to the last row's landing."""
        items = [item for item in self.items if item.times.landed]
        media = [Interval("transfer", item.times.began, item.times.landed, item.index) for item in items]
        return [*media, self.kv_interval] if self.kv_interval else media


ActiveChunk = tuple[ActiveRequest, Chunk]
"""A chunk of a step with the record of its request."""
