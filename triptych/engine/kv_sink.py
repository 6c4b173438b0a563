"""Sends KV to the decode instance while prefill computes it: layer by layer or, of a replayed step, at its end."""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from triptych.engine.active_request import ActiveChunk, ActiveRequest, OutgoingKV
from triptych.engine.cache_manager import CacheManager
from triptych.engine.cache_rows import CacheRows, DeviceEvent
from triptych.engine.kv_rows import KVRows, KVRun
from triptych.engine.page_tables import PageTables
from triptych.engine.state_slots import slot_of
from triptych.errors import BlockError, TransferError
from triptych.layers.decoder import AfterLayer
from triptych.messages.rows import RowLayout
from triptych.messages.work import Prefill
from triptych.transfer.memory import Bytes
from triptych.transfer.sender import POLL_INTERVAL, Sender
from triptych.types import TransferId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Read:
    """Rows that are being read from the cache."""

    outgoing: OutgoingKV
    first_row: int
    rows: Bytes
    done: DeviceEvent


class KVSink:
    """KV transfers of all requests that an instance prefills for others, over its sender."""

    def __init__(
        self, sender: Sender, cache: CacheRows, manager: CacheManager, layout: RowLayout, *, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called from the compute thread after each layer; then ``provide_layers`` has work to do."""
        self._sender = sender
        self._cache = cache
        self._manager = manager
        self._layout = layout
        self._wake = wake
        self._layers: deque[tuple[int, Sequence[ActiveChunk], DeviceEvent]] = deque()
        self._reads: deque[_Read] = deque()
        self._expected: set[TransferId] = set()
        self._retained: set[OutgoingKV] = set()
        self._cancelled: list[ActiveRequest] = []

    def expect(self, prefill: Prefill, num_tokens: int) -> OutgoingKV:
        """Announce that the KV of ``num_tokens`` tokens will be sent. Raises TransferError if there is nothing to send,
        or the transfer is under way already."""
        if prefill.first_token >= num_tokens:
            raise TransferError(f"token {prefill.first_token} of {num_tokens} can't be the first to send")
        if prefill.transfer in self:
            raise TransferError(f"transfer {prefill.transfer} is under way already")
        self._expected.add(prefill.transfer)
        rows = KVRows(self._cache.of_token, prefill.first_token, num_tokens)
        return OutgoingKV(
            transfer=prefill.transfer,
            consumer=prefill.consumer,
            rows=rows,
            provided=[prefill.first_token] * self._cache.num_layers,
            timeout=prefill.generate.timeout,
            tables=self._kept_tables(rows),
        )

    def __contains__(self, transfer: TransferId) -> bool:
        """Whether the transfer is expected, or under way."""
        return transfer in self._expected or transfer in self._sender

    def start_step(self, chunks: Sequence[ActiveChunk]) -> AfterLayer:
        """Handle the start of a step. The KV of requests that have just got all their pages is offered, and its cached
        part is provided. Returns what the compute thread calls after each layer."""
        for active, chunk in chunks:
            outgoing = active.outgoing_kv if active.request.sends_pages else None
            if outgoing is None or outgoing.over:
                continue
            if begins := not outgoing.offered:
                self._offer(active, outgoing)
            if not outgoing.over:
                self._manager.retain(outgoing.tables, active.request.tables, chunk.start + chunk.length)
            if begins:
                layers = range(self._cache.num_layers)
                runs = [run for layer in layers for run in self._new_runs(outgoing, layer, chunk.start)]
                self._read(outgoing, runs, self._cache.event())
        self._provide()

        def after_layer(layer: int) -> None:
            self._layers.append((layer, chunks, self._cache.event()))
            self._wake()

        return after_layer

    def provide_layers(self) -> None:
        """Provide the keys and values of the layers computed since the last call, unless a failed attempt of the same
        step has already provided them."""
        runs: dict[OutgoingKV, list[KVRun]] = {}
        computed: DeviceEvent | None = None
        while self._layers:
            layer, chunks, computed = self._layers.popleft()
            for active, chunk in chunks:
                if (outgoing := active.outgoing_kv) is not None and outgoing.offered:
                    new = self._new_runs(outgoing, layer, chunk.start + chunk.length)
                    runs.setdefault(outgoing, []).extend(new)
        if computed is not None:  # the last one, behind all of them
            for outgoing, of_transfer in runs.items():
                self._read(outgoing, of_transfer, computed)
        self._provide()

    @property
    def next_provide(self) -> float:
        """Seconds after which ``provide_layers`` must be called although no layer was computed."""
        return POLL_INTERVAL if self._reads else float("inf")

    def complete(self, active: ActiveRequest) -> None:
        """Record that all of the request's KV has been computed, and provide its state. The sender does the rest."""
        outgoing = self._forget(active)
        if outgoing is not None and not outgoing.over and self._cache.of_token.of_state:
            try:
                record = self._cache.read_state(slot_of(outgoing.tables), self._cache.event())
            except MemoryError as error:
                self._fail(outgoing, error)
                return
            self._reads.append(_Read(outgoing, outgoing.rows.num_token_rows, record, self._cache.read_event()))
            self._provide()

    def abort(self, active: ActiveRequest, reason: str) -> None:
        """Abort a request's transfer, if it has one."""
        if outgoing := self._forget(active):
            self._sender.abort(outgoing.transfer, reason)

    def take_cancelled(self) -> list[ActiveRequest]:
        """Return the unfinished requests whose transfers have ended since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return [active for active in cancelled if active.outgoing_kv is not None]

    def check_idle(self) -> None:
        """Raise BlockError if pages are retained although no transfer is under way."""
        if self._sender.idle and self._retained:
            raise BlockError(f"pages of {len(self._retained)} transfers are held while nothing is being sent")

    @property
    def idle(self) -> bool:
        """Whether no pages are retained."""
        return not self._retained

    def _forget(self, active: ActiveRequest) -> OutgoingKV | None:
        outgoing, active.outgoing_kv = active.outgoing_kv, None
        if outgoing is not None:
            self._expected.remove(outgoing.transfer)
        return outgoing

    def _kept_tables(self, rows: KVRows) -> PageTables:
        """Return the tables of what the transfer retains, which is nothing yet."""
        tables = self._manager.new_tables()
        for table, first in zip(tables, rows.first_tokens, strict=False):
            table.first = first // self._manager.page_size
        return tables

    def _new_runs(self, outgoing: OutgoingKV, layer: int, end_token: int) -> Iterator[KVRun]:
        """Yield the rows of a layer's tokens below ``end_token`` that haven't been read, which now count as read."""
        token = outgoing.provided[layer]
        if end_token > token:
            outgoing.provided[layer] = end_token
            yield from outgoing.rows.of_layer(layer, token, end_token)

    def _read(self, outgoing: OutgoingKV, runs: Sequence[KVRun], computed: DeviceEvent) -> None:
        """Read runs, unless the transfer is over."""
        if outgoing.over or not runs:
            return
        try:
            found = list(self._cache.read(runs, outgoing.tables, computed))
        except MemoryError as error:
            self._fail(outgoing, error)
            return
        done = self._cache.read_event()
        self._reads.extend(_Read(outgoing, row, rows, done) for row, rows in found)

    def _fail(self, outgoing: OutgoingKV, error: MemoryError) -> None:
        """Abort one transfer, for which there is no memory. Others go on."""
        log.error("transfer %s: %s", outgoing.transfer, error)
        self._sender.abort(outgoing.transfer, str(error))

    def _provide(self) -> None:
        """Provide what has been read, in order."""
        while self._reads and self._reads[0].done.query():
            read = self._reads.popleft()
            if not read.outgoing.over:
                self._sender.provide(read.outgoing.transfer, read.rows, read.first_row)

    def _offer(self, active: ActiveRequest, outgoing: OutgoingKV) -> None:
        outgoing.offered = True
        self._retained.add(outgoing)
        on_end = functools.partial(self._on_transfer_end, active, outgoing)
        try:
            self._sender.offer(
                outgoing.transfer,
                outgoing.consumer,
                outgoing.rows.num_rows,
                self._layout,
                on_end,
                timeout=outgoing.timeout,
                owner=active.reply_to,
            )
        except TransferError as error:  # on an instance that also encodes, the name may be in use
            log.error("%s", error)
            on_end(complete=False)  # provides nothing: the rows would join the other transfer

    def _on_transfer_end(self, active: ActiveRequest, outgoing: OutgoingKV, complete: bool) -> None:
        outgoing.over = True
        self._retained.remove(outgoing)
        self._manager.release_retained(outgoing.tables)
        # rows may all be sent before the prompt's next token is sampled
        if active.outgoing_kv is outgoing and not complete:
            self._cancelled.append(active)
