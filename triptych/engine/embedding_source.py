"""Receives media embeddings, and copies them from the receive pool into steps."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.engine.active_request import ActiveChunk, ActiveRequest, CopiedRows, IncomingItem
from triptych.engine.incoming import IncomingTransfers
from triptych.engine.runner import MediaEmbeddings
from triptych.messages.work import EncodeNeeded, MissingItem
from triptych.transfer.memory import Bytes
from triptych.types import Address, Placement, TransferId

SHORT_TEXT = 16
"""Largest number of text tokens that wait for the missing rows after them. A step for them alone would read all
weights, and delay an encoder in the same process."""


class EmbeddingSource:
    """Embedding transfers of an instance that prefills."""

    def __init__(
        self, incoming: IncomingTransfers, address: Address, row_dtype: torch.dtype, embedding_width: int
    ) -> None:
        self._incoming = incoming
        self._receiver = incoming.receiver
        self._address = address
        self._row_dtype = row_dtype
        self._none = MediaEmbeddings.none(embedding_width, row_dtype)

    def expect(self, active: ActiveRequest) -> EncodeNeeded | None:
        """Start, or restart, a transfer for each section of an item that isn't entirely in the KV cache, queued by
        arrival and prompt order. Returns the message that asks for them, if any."""
        self.release(active)
        needed = [
            missing
            for index, item in enumerate(active.request.items)
            for number, rows in enumerate(item.sections)
            if (missing := self._expect_section(active, index, number, item.placement.section(rows))) is not None
        ]
        return self._needed(active, needed) if needed else None

    def _expect_section(
        self, active: ActiveRequest, index: int, number: int, placement: Placement
    ) -> MissingItem | None:
        """Start a transfer for a section of an item unless it is in the KV cache."""
        request, part_rows = active.request, active.request.items[index].part_rows
        covered = placement.rows_before(request.num_computed)
        if covered == placement.rows:
            return None
        transfer = self._incoming.new_name()
        # only the rows that a lost encode instance had yet to send are encoded again
        self._receiver.expect(
            transfer,
            placement.rows,
            (request.arrival, index, number),
            first_row=covered,
            part_rows=part_rows if part_rows < placement.rows else 0,
            timeout=request.timeout,
            resumable=True,
            owner=active.reply_to,
        )
        incoming = IncomingItem(index, placement, transfer, section=number)
        self._incoming.add(transfer, active, incoming.times)
        active.items.append(incoming)
        return MissingItem(index, transfer, first_row=covered, section=number)

    def take_orphaned(self) -> list[tuple[ActiveRequest, EncodeNeeded]]:
        """Return, for each request whose transfers have lost their encode instances since the last call, the message
        that asks for the rest of the rows under the same names."""
        needed: dict[ActiveRequest, list[MissingItem]] = {}
        for transfer in self._receiver.take_orphaned():
            if (active := self._incoming.request_of(transfer)) is None:
                continue
            (item,) = (item for item in active.items if item.transfer == transfer)
            landed, attempt = self._receiver.landed(transfer), self._receiver.attempt(transfer)
            missing = MissingItem(item.index, transfer, landed, attempt, item.section)
            needed.setdefault(active, []).append(missing)
        return [(active, self._needed(active, items)) for active, items in needed.items()]

    def release(self, active: ActiveRequest) -> None:
        """Close the transfers of a request's items."""
        for item in active.items:
            if item.transfer is not None:
                self._receiver.close(item.transfer, "the request has ended or is restarted")
                self._incoming.remove(item.transfer)
        active.items = []

    def ready_tokens(self, active: ActiveRequest) -> int:
        """Return the number of tokens before the first one whose embedding hasn't arrived, or before its atomic span.
        Short text before it isn't counted. Rows always are: they occupy the receive pool, for which the missing ones
        may be waiting."""
        for item in active.items:
            if item.transfer is not None:
                landed = self._receiver.landed(item.transfer)
                if landed < item.placement.rows:
                    span, first_row = item.placement.span_of(landed)
                    ready = span.start if span.atomic else span.start + landed - first_row
                    computed = active.request.num_computed
                    is_short = 0 < ready - computed <= SHORT_TEXT
                    return computed if is_short and not active.request.has_media(computed, ready) else ready
        return len(active.request.tokens)

    def gather(self, chunks: Sequence[ActiveChunk]) -> MediaEmbeddings:
        """Copy the embeddings of a step's media tokens, and free their blocks. A request that can't be preempted also
        keeps the blocks of its later rows."""
        for active, _ in chunks:
            if active.request.sends_pages:
                self._pin(active)
        views: list[Bytes] = []
        index: list[NDArray[np.int64]] = []
        taken: list[tuple[IncomingItem, TransferId, int]] = []
        first_token = 0
        for active, chunk in chunks:
            for item in active.items:
                if item.transfer is None:
                    continue
                end_row = 0
                for token, row, length in item.placement.runs(chunk.start, chunk.start + chunk.length):
                    index.append(np.arange(token, token + length) - chunk.start + first_token)
                    views += self._read(item, item.transfer, row, length)
                    end_row = row + length
                if end_row:
                    taken.append((item, item.transfer, end_row))
            first_token += chunk.length
        if not views:
            return self._none
        rows = torch.from_numpy(np.concatenate(views)).view(self._row_dtype)
        for item, transfer, end_row in taken:
            self._consume(item, transfer, end_row)
        return MediaEmbeddings(torch.from_numpy(np.concatenate(index)), rows)

    def make_room(self) -> bool:
        """Copy landed rows of atomic spans out of the receive pool where the transfer gets no blocks for others.

        Without it, a span that needs more blocks than its transfer may hold would wait for them forever, or as long as
        earlier transfers do. Returns whether blocks were freed. There are copies of at most one span for each item.
        """
        freed = [self._copy_out(transfer) for transfer in self._receiver.starved()]
        return any(freed)

    def _copy_out(self, transfer: TransferId) -> bool:
        if (active := self._incoming.request_of(transfer)) is None:
            return False
        (item,) = (item for item in active.items if item.transfer == transfer)
        consumed, landed = self._receiver.consumed(transfer), self._receiver.landed(transfer)
        span, first_row = item.placement.span_of(landed)
        if not span.atomic or consumed < first_row:  # steps will read what is ready
            return False
        item.copied.append(
            CopiedRows(consumed, np.concatenate(self._receiver.read(transfer, consumed, landed - consumed)))
        )
        self._receiver.consume(transfer, landed)
        return True

    def _read(self, item: IncomingItem, transfer: TransferId, first_row: int, rows: int) -> list[Bytes]:
        """Return views of landed rows."""
        views, end_row = [], first_row + rows
        for copied in item.copied:
            low, high = max(first_row, copied.first_row), min(end_row, copied.end_row)
            if low < high:
                views.append(copied.rows[low - copied.first_row : high - copied.first_row])
                first_row = high
        return views + self._receiver.read(transfer, first_row, end_row - first_row) if first_row < end_row else views

    def _needed(self, active: ActiveRequest, items: list[MissingItem]) -> EncodeNeeded:
        return EncodeNeeded(active.id, self._address, items, active.prefill_transfer, active.next_asked())

    def _pin(self, active: ActiveRequest) -> None:
        """Pin the request's blocks until it is done. Earlier requests may wait for its pages, because it can't be
        preempted. So it must not wait for their blocks."""
        for item in active.items:
            if item.transfer is not None:
                self._receiver.pin(item.transfer)

    def _consume(self, item: IncomingItem, transfer: TransferId, end_row: int) -> None:
        self._receiver.consume(transfer, end_row)
        item.copied = []
        if end_row == item.placement.rows:
            item.transfer = None
            self._incoming.remove(transfer)
