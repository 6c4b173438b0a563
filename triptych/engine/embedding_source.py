"""Which media rows each request still waits for, and how they get from the receive buffer into a step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.engine.request import Request
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
    """One item of a request. ``transfer`` is None once its last row is consumed."""

    index: int
    placement: Placement
    transfer: TransferId | None
    began: float = 0.0
    landed: float = 0.0


class EmbeddingSource(RowSource):
    """The items of all requests of an instance, over its receiver."""

    def __init__(
        self, receiver: Receiver, name: str, address: Address, row_dtype: torch.dtype, embedding_width: int
    ) -> None:
        super().__init__(receiver, name, address)
        self._row_dtype = row_dtype
        self._row_width = embedding_width
        self._items: dict[RequestId, list[_Item]] = {}

    def need(self, request: Request) -> EncodeNeeded | None:
        """Starts over with a request's items: a new transfer for each that isn't wholly in the KV cache, in line by
        arrival and prompt order. What to ask for, if anything."""
        self.release(request.id)
        items = []
        for index, item in enumerate(request.items):
            covered = item.placement.rows_before(request.num_computed)
            if covered == item.placement.rows:
                continue
            transfer = self._name(request.id, next(self._numbers))
            self._receiver.expect(
                transfer,
                item.placement.rows,
                (request.arrival, index),
                first_row=covered,
                part_rows=item.rows_per_part if item.rows_per_part < item.placement.rows else 0,
                timeout=request.timeout,
            )
            items.append(_Item(index, item.placement, transfer))
        self._items[request.id] = items
        needed = [MissingItem(item.index, item.transfer) for item in items if item.transfer is not None]
        return EncodeNeeded(request.id, self._address, needed) if needed else None

    def release(self, request_id: RequestId) -> None:
        """Gives up what a request still waits for."""
        for item in self._items.pop(request_id, []):
            if item.transfer is not None:
                self._receiver.close(item.transfer, "the request ended or starts over")
                del self._requests[item.transfer]

    def ready_tokens(self, request: Request) -> int:
        """How many tokens, from the first on, can be computed: all before the first row that hasn't landed."""
        for item in self._items.get(request.id, ()):
            if item.transfer is not None:
                landed = self._receiver.landed(item.transfer)
                if landed < item.placement.rows:
                    return item.placement.token_of(landed)
        return len(request.tokens)

    def take(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        """Copies out the rows of a step's media tokens; their blocks are free again. A request that can't be preempted
        keeps the rows that it hasn't got to yet."""
        for chunk in chunks:
            if chunk.request.sends_pages:
                self._keep(chunk.request.id)
        views: list[Bytes] = []
        index: list[NDArray[np.int64]] = []
        taken: list[tuple[_Item, TransferId, int]] = []
        first_token = 0
        for chunk in chunks:
            for item in self._items.get(chunk.request.id, ()):
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

    def intervals(self, request_id: RequestId) -> list[Interval]:
        """From the first row's writing to the last row's landing, for each item."""
        items = self._items.get(request_id, ())
        return [Interval("transfer", item.began, item.landed, item.index) for item in items if item.landed]

    def _note_landed(self, request_id: RequestId, wrote: Wrote) -> None:
        for item in self._items.get(request_id, ()):
            if item.transfer == wrote.transfer:
                item.began = item.began or wrote.began
                item.landed = time.time()

    def _keep(self, request_id: RequestId) -> None:
        """Its pages are its own until it is done, so those before it may wait for it: it must not wait for them."""
        for item in self._items.get(request_id, ()):
            if item.transfer is not None:
                self._receiver.pin(item.transfer)

    def _consume(self, item: _Item, transfer: TransferId, end_row: int) -> None:
        self._receiver.consume(transfer, end_row)
        if end_row == item.placement.rows:
            item.transfer = None
            del self._requests[transfer]
