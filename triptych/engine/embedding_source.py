"""Receives media embeddings, and copies them from the receive pool into steps."""

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
class _IncomingItem:
    """One item of a request."""

    index: int
    placement: Placement
    transfer: TransferId | None
    """None once the last row is consumed."""
    began: float = 0.0
    """When the first row was written, in seconds since the epoch."""
    landed: float = 0.0
    """When the last row so far arrived."""


class EmbeddingSource(RowSource):
    """Embedding transfers of all requests of an instance, over its receiver."""

    def __init__(
        self, receiver: Receiver, name: str, address: Address, row_dtype: torch.dtype, embedding_width: int
    ) -> None:
        super().__init__(receiver, name, address)
        self._row_dtype = row_dtype
        self._row_width = embedding_width
        self._items: dict[RequestId, list[_IncomingItem]] = {}

    def expect(self, request: Request) -> EncodeNeeded | None:
        """Start, or restart, a transfer for each item that isn't entirely in the KV cache, queued by arrival and prompt
        order. Returns the message that asks for them, if any."""
        self.release(request.id)
        items = []
        for index, item in enumerate(request.items):
            covered = item.placement.rows_before(request.num_computed)
            if covered == item.placement.rows:
                continue
            transfer = self._new_transfer(request.id)
            self._receiver.expect(
                transfer,
                item.placement.rows,
                (request.arrival, index),
                first_row=covered,
                part_rows=item.rows_per_part if item.rows_per_part < item.placement.rows else 0,
                timeout=request.timeout,
            )
            items.append(_IncomingItem(index, item.placement, transfer))
        self._items[request.id] = items
        needed = [MissingItem(item.index, item.transfer) for item in items if item.transfer is not None]
        return EncodeNeeded(request.id, self._address, needed) if needed else None

    def release(self, request_id: RequestId) -> None:
        """Close the transfers of a request's items."""
        for item in self._items.pop(request_id, []):
            if item.transfer is not None:
                self._receiver.close(item.transfer, "the request has ended or is restarted")
                del self._requests[item.transfer]

    def ready_tokens(self, request: Request) -> int:
        """Return the number of tokens before the first one whose embedding hasn't arrived."""
        for item in self._items.get(request.id, ()):
            if item.transfer is not None:
                landed = self._receiver.landed(item.transfer)
                if landed < item.placement.rows:
                    return item.placement.token_of(landed)
        return len(request.tokens)

    def gather(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        """Copy the embeddings of a step's media tokens, and free their blocks. A request that can't be preempted also
        keeps the blocks of its later rows."""
        for chunk in chunks:
            if chunk.request.sends_pages:
                self._pin(chunk.request.id)
        views: list[Bytes] = []
        index: list[NDArray[np.int64]] = []
        taken: list[tuple[_IncomingItem, TransferId, int]] = []
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
        """Return for each item the time from the first row's writing to the last row's landing."""
        items = self._items.get(request_id, ())
        return [Interval("transfer", item.began, item.landed, item.index) for item in items if item.landed]

    def _on_rows_landed(self, request_id: RequestId, wrote: Wrote) -> None:
        for item in self._items.get(request_id, ()):
            if item.transfer == wrote.transfer:
                item.began = item.began or wrote.began
                item.landed = time.time()

    def _pin(self, request_id: RequestId) -> None:
        """Pin the request's blocks until it is done. Earlier requests may wait for its pages, because it can't be
        preempted. So it must not wait for their blocks."""
        for item in self._items.get(request_id, ()):
            if item.transfer is not None:
                self._receiver.pin(item.transfer)

    def _consume(self, item: _IncomingItem, transfer: TransferId, end_row: int) -> None:
        self._receiver.consume(transfer, end_row)
        if end_row == item.placement.rows:
            item.transfer = None
            del self._requests[transfer]
