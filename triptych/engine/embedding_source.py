"""Which media rows each sequence still waits for, and how they get from the receive buffer into a step."""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.engine.request import Sequence
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk
from triptych.engine.source import RowSource
from triptych.messages.rows import Wrote
from triptych.messages.work import EncodeNeeded, MissingItem
from triptych.observe.timeline import Interval
from triptych.transfer.memory import Bytes
from triptych.transfer.receiver import Receiver
from triptych.types import Address, Placement, RequestId, TransferId


@dataclass
class _Item:
    """One item of a sequence. ``transfer`` is None once its last row is consumed."""

    index: int
    placement: Placement
    transfer: TransferId | None
    began: float = 0.0
    landed: float = 0.0


class EmbeddingSource(RowSource):
    """The items of all sequences of an instance, over its receiver."""

    def __init__(
        self, receiver: Receiver, name: str, address: Address, row_dtype: torch.dtype, embedding_width: int
    ) -> None:
        super().__init__(receiver, name, address)
        self._row_dtype = row_dtype
        self._row_width = embedding_width
        self._items: dict[RequestId, list[_Item]] = {}

    def need(self, sequence: Sequence) -> EncodeNeeded | None:
        """Starts over with a sequence's items: a new transfer for each that isn't wholly in the KV cache, in line by
        arrival and prompt order. What to ask for, if anything."""
        self.release(sequence.request)
        items = []
        for index, item in enumerate(sequence.items):
            covered = item.placement.rows_before(sequence.num_computed)
            if covered == item.placement.rows:
                continue
            transfer = self._name(sequence.request, next(self._numbers))
            self._receiver.expect(
                transfer,
                item.placement.rows,
                (sequence.arrival, index),
                first_row=covered,
                part_rows=item.rows_per_part if item.rows_per_part < item.placement.rows else 0,
                timeout=sequence.timeout,
            )
            items.append(_Item(index, item.placement, transfer))
        self._items[sequence.request] = items
        needed = [MissingItem(item.index, item.transfer) for item in items if item.transfer is not None]
        return EncodeNeeded(sequence.request, self._address, needed) if needed else None

    def release(self, request: RequestId) -> None:
        """Gives up what a sequence still waits for."""
        for item in self._items.pop(request, []):
            if item.transfer is not None:
                self._receiver.close(item.transfer, "the request ended or starts over")
                del self._requests[item.transfer]

    def ready_tokens(self, sequence: Sequence) -> int:
        """How many tokens, from the first on, can be computed: all before the first row that hasn't landed."""
        for item in self._items.get(sequence.request, ()):
            if item.transfer is not None:
                landed = self._receiver.landed(item.transfer)
                if landed < item.placement.rows:
                    return item.placement.token_of(landed)
        return len(sequence.tokens)

    def take(self, chunks: Rows[Chunk]) -> MediaEmbeddings:
        """Copies out the rows of a step's media tokens; their blocks are free again. A sequence that can't be preempted
        keeps the rows that it hasn't got to yet."""
        for chunk in chunks:
            if chunk.sequence.sends_pages:
                self._keep(chunk.sequence.request)
        views: list[Bytes] = []
        index: list[NDArray[np.int64]] = []
        taken: list[tuple[_Item, TransferId, int]] = []
        first_token = 0
        for chunk in chunks:
            for item in self._items.get(chunk.sequence.request, ()):
                if item.transfer is None:
                    continue
                end_row = 0
                for token, row, length in item.placement.runs(chunk.start, chunk.start + chunk.length):
                    index.append(np.arange(token, token + length) - chunk.start + first_token)
                    views += self._receiver.read(item.transfer, row, length)
                    end_row = row + length
                if end_row:
                    taken.append((item, item.transfer, end_row))
            first_token += chunk.length
        if not views:
            return MediaEmbeddings.none(self._row_width, self._row_dtype)
        rows = torch.from_numpy(np.concatenate(views)).view(self._row_dtype)
        for item, transfer, end_row in taken:
            self._consume(item, transfer, end_row)
        return MediaEmbeddings(torch.from_numpy(np.concatenate(index)), rows)

    def intervals(self, request: RequestId) -> list[Interval]:
        """From the first row's writing to the last row's landing, for each item."""
        items = self._items.get(request, ())
        return [Interval("transfer", item.began, item.landed, item.index) for item in items if item.landed]

    def _note_landed(self, request: RequestId, wrote: Wrote) -> None:
        for item in self._items.get(request, ()):
            if item.transfer == wrote.transfer:
                item.began = item.began or wrote.began
                item.landed = time.time()

    def _keep(self, request: RequestId) -> None:
        """Its pages are its own until it is done, so those before it may wait for it: it must not wait for them."""
        for item in self._items.get(request, ()):
            if item.transfer is not None:
                self._receiver.keep(item.transfer)

    def _consume(self, item: _Item, transfer: TransferId, end_row: int) -> None:
        self._receiver.consume(transfer, end_row)
        if end_row == item.placement.rows:
            item.transfer = None
            del self._requests[transfer]
