"""Sends KV to the decode instance, layer by layer, while prefill computes it."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_rows import CacheRows, KVRows
from triptych.engine.scheduler import Chunk
from triptych.errors import BlockError, TransferError
from triptych.messages.rows import RowLayout
from triptych.messages.work import Prefill
from triptych.transfer.sender import Sender
from triptych.types import Address, RequestId, TransferId

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _OutgoingKV:
    """One request's KV transfer."""

    request_id: RequestId
    transfer: TransferId
    consumer: Address
    first_token: int
    """First token whose KV is sent."""
    rows: KVRows
    provided: list[int]
    """By layer, the first token that has not been provided."""
    timeout: float
    pages: list[int] = field(default_factory=list)
    """The request's pages, retained from the offer to the end of the transfer."""


class KVSink:
    """KV transfers of all requests that an instance prefills, over its sender."""

    def __init__(self, sender: Sender, cache: CacheRows, pool: PagePool, layout: RowLayout) -> None:
        self._sender = sender
        self._cache = cache
        self._pool = pool
        self._layout = layout
        self._outgoing: dict[RequestId, _OutgoingKV] = {}
        self._retained: set[_OutgoingKV] = set()
        self._cancelled: list[_OutgoingKV] = []

    def expect(self, prefill: Prefill, num_tokens: int) -> None:
        """Announce that the KV of ``num_tokens`` tokens will be sent. Raises TransferError if the transfer is under way
        already."""
        request_id, transfer = prefill.generate.request, prefill.transfer
        if transfer in self._sender or any(outgoing.transfer == transfer for outgoing in self._outgoing.values()):
            raise TransferError(f"transfer {transfer} is under way already")
        rows = KVRows(self._cache.num_layers, num_tokens - prefill.first_token)
        provided, timeout = [prefill.first_token] * self._cache.num_layers, prefill.generate.timeout
        self._outgoing[request_id] = _OutgoingKV(
            request_id, transfer, prefill.consumer, prefill.first_token, rows, provided, timeout
        )

    def step_started(self, chunks: Sequence[Chunk]) -> None:
        """Handle the start of a step. The KV of requests that have just got all their pages is offered, and its cached
        part is provided."""
        for chunk in chunks:
            outgoing = self._outgoing.get(chunk.request.id) if chunk.request.sends_pages else None
            if outgoing is not None and not outgoing.pages and self._offer(outgoing, chunk.request.pages):
                for layer in range(self._cache.num_layers):
                    self._provide(outgoing, layer, chunk.start)

    def layer_computed(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Provide a layer's keys and values, unless a failed attempt of the same step has already provided them."""
        for chunk in chunks:
            outgoing = self._outgoing.get(chunk.request.id)
            if outgoing is not None and outgoing.pages:
                self._provide(outgoing, layer, chunk.start + chunk.length)

    def complete(self, request_id: RequestId) -> None:
        """Record that all of the request's KV has been provided. The sender does the rest."""
        del self._outgoing[request_id]

    def abort(self, request_id: RequestId, reason: str) -> None:
        """Abort a request's transfer."""
        if outgoing := self._outgoing.pop(request_id, None):
            self._sender.abort(outgoing.transfer, reason)

    def take_cancelled(self) -> list[RequestId]:
        """Return the unfinished requests whose transfers have ended since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return [outgoing.request_id for outgoing in cancelled if self._outgoing.get(outgoing.request_id) is outgoing]

    def requests_for(self, consumer: Address) -> list[RequestId]:
        """Return the unfinished requests whose KV goes to that consumer."""
        return [outgoing.request_id for outgoing in self._outgoing.values() if outgoing.consumer == consumer]

    def check_idle(self) -> None:
        """Raise BlockError if pages are retained although no transfer is under way."""
        if self._sender.idle and self._retained:
            raise BlockError(f"pages of {len(self._retained)} transfers are held while nothing is being sent")

    @property
    def idle(self) -> bool:
        """Whether no pages are retained."""
        return not self._retained

    def _provide(self, outgoing: _OutgoingKV, layer: int, end_token: int) -> None:
        """Provide a layer's tokens below ``end_token``."""
        first, token = outgoing.first_token, outgoing.provided[layer]
        if end_token <= token:
            return
        outgoing.provided[layer] = end_token
        for run in outgoing.rows.of_layer(layer, token - first, end_token - first):
            row = run.first_row
            for views in self._cache.of(layer, run.part, outgoing.pages, first + run.token, run.num_tokens):
                self._sender.provide(outgoing.transfer, views, row)
                row += len(views)

    def _offer(self, outgoing: _OutgoingKV, pages: list[int]) -> bool:
        outgoing.pages = list(pages)
        self._pool.retain(outgoing.pages)
        self._retained.add(outgoing)
        on_end = functools.partial(self._on_transfer_end, outgoing)
        try:
            self._sender.offer(
                outgoing.transfer,
                outgoing.consumer,
                outgoing.rows.num_rows,
                self._layout,
                on_end,
                timeout=outgoing.timeout,
            )
        except TransferError as error:  # on an instance that also encodes, the name may be in use
            log.error("%s", error)
            on_end(complete=False)
            return False
        return True

    def _on_transfer_end(self, outgoing: _OutgoingKV, complete: bool) -> None:
        self._retained.remove(outgoing)
        self._pool.release(outgoing.pages)
        # rows may all be sent before the prompt's next token is sampled
        if self._outgoing.get(outgoing.request_id) is outgoing and not complete:
            self._cancelled.append(outgoing)
