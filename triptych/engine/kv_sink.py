"""How what prefill leaves in the KV cache gets to the instance that decodes: layer by layer, while it is computed."""

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
class _Leaving:
    """A request's KV on its way. Tokens ``[first_token, …)`` of it go; once it has all its pages it is offered, and
    its ``pages`` are held until that is over. ``provided`` is, by layer, the first token that has not been provided."""

    request_id: RequestId
    transfer: TransferId
    consumer: Address
    first_token: int
    rows: KVRows
    provided: list[int]
    timeout: float
    pages: list[int] = field(default_factory=list)


class KVSink:
    """The transfers of all requests that an instance prefills, over its sender."""

    def __init__(self, sender: Sender, cache: CacheRows, pool: PagePool, layout: RowLayout) -> None:
        self._sender = sender
        self._cache = cache
        self._pool = pool
        self._layout = layout
        self._leaving: dict[RequestId, _Leaving] = {}
        self._holding: set[_Leaving] = set()
        self._unwanted: list[_Leaving] = []

    def expect(self, prefill: Prefill, num_tokens: int) -> None:
        """The KV of so many tokens will go. Raises TransferError for a transfer that is under way."""
        request_id, transfer = prefill.generate.request, prefill.transfer
        if transfer in self._sender or any(leaving.transfer == transfer for leaving in self._leaving.values()):
            raise TransferError(f"transfer {transfer} is under way already")
        rows = KVRows(self._cache.num_layers, num_tokens - prefill.first_token)
        provided, timeout = [prefill.first_token] * self._cache.num_layers, prefill.generate.timeout
        self._leaving[request_id] = _Leaving(
            request_id, transfer, prefill.consumer, prefill.first_token, rows, provided, timeout
        )

    def started(self, chunks: Sequence[Chunk]) -> None:
        """A step begins. Those of its requests that have all their pages now, for good, are new here: their KV is
        offered, and what the cache holds of it goes."""
        for chunk in chunks:
            leaving = self._leaving.get(chunk.request.id) if chunk.request.sends_pages else None
            if leaving is not None and not leaving.pages and self._offer(leaving, chunk.request.pages):
                for layer in range(self._cache.num_layers):
                    self._provide(leaving, layer, chunk.start)

    def computed(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """A layer of a step is done: its keys and values go, unless they went before in a step that then failed."""
        for chunk in chunks:
            leaving = self._leaving.get(chunk.request.id)
            if leaving is not None and leaving.pages:
                self._provide(leaving, layer, chunk.start + chunk.length)

    def leave(self, request_id: RequestId) -> None:
        """All of the request's KV has been provided; what is left to do is the sender's."""
        del self._leaving[request_id]

    def give_up(self, request_id: RequestId, reason: str) -> None:
        """The rest will never exist."""
        if leaving := self._leaving.pop(request_id, None):
            self._sender.abort(leaving.transfer, reason)

    def take_unwanted(self) -> list[RequestId]:
        """The requests whose KV nobody waits for any more, though they aren't done."""
        unwanted, self._unwanted = self._unwanted, []
        return [leaving.request_id for leaving in unwanted if self._leaving.get(leaving.request_id) is leaving]

    def of_consumer(self, consumer: Address) -> list[RequestId]:
        """The requests whose KV isn't all there yet, and goes to that instance."""
        return [leaving.request_id for leaving in self._leaving.values() if leaving.consumer == consumer]

    def check_idle(self) -> None:
        """Raises BlockError when pages are held for transfers that are over."""
        if self._sender.idle and self._holding:
            raise BlockError(f"pages of {len(self._holding)} transfers are held while nothing is being sent")

    @property
    def idle(self) -> bool:
        """Whether no page is held."""
        return not self._holding

    def _provide(self, leaving: _Leaving, layer: int, end_token: int) -> None:
        """All of a layer's tokens below ``end_token`` are computed."""
        first, token = leaving.first_token, leaving.provided[layer]
        if end_token <= token:
            return
        leaving.provided[layer] = end_token
        for run in leaving.rows.of_layer(layer, token - first, end_token - first):
            row = run.first_row
            for views in self._cache.of(layer, run.part, leaving.pages, first + run.token, run.num_tokens):
                self._sender.provide(leaving.transfer, views, row)
                row += len(views)

    def _offer(self, leaving: _Leaving, pages: list[int]) -> bool:
        leaving.pages = list(pages)
        self._pool.hold(leaving.pages)
        self._holding.add(leaving)
        over = functools.partial(self._over, leaving)
        try:
            self._sender.offer(
                leaving.transfer,
                leaving.consumer,
                leaving.rows.num_rows,
                self._layout,
                over,
                timeout=leaving.timeout,
            )
        except TransferError as error:  # an instance that encodes, too, may have been given the name twice
            log.error("%s", error)
            over(complete=False)
            return False
        return True

    def _over(self, leaving: _Leaving, complete: bool) -> None:
        self._holding.remove(leaving)
        self._pool.free(leaving.pages)
        # all its rows may be there before the token after them is
        if self._leaving.get(leaving.request_id) is leaving and not complete:
            self._unwanted.append(leaving)
