"""How what prefill leaves in the KV cache gets to the instance that decodes: layer by layer, while it is computed."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from triptych.language.kv_cache import PagePool
from triptych.language.kv_rows import CacheRows, KVRows
from triptych.language.scheduler import Chunk
from triptych.language.sequence import Sequence
from triptych.messages.rows import RowLayout
from triptych.messages.work import Prefill
from triptych.transfer.sender import Sender
from triptych.types import RequestId, TransferId


@dataclass
class _Leaving:
    """A sequence's KV on its way. Tokens ``[first_token, …)`` of it go; ``pages`` are held until it is over, once the
    sequence has them all."""

    transfer: TransferId
    first_token: int
    rows: KVRows
    pages: list[int] | None = None


class OutgoingKV:
    """The transfers of all sequences that an instance prefills, over its sender."""

    def __init__(self, sender: Sender, cache: CacheRows, pool: PagePool, layout: RowLayout) -> None:
        self._sender = sender
        self._cache = cache
        self._pool = pool
        self._layout = layout
        self._leaving: dict[RequestId, _Leaving] = {}
        self._held: dict[TransferId, list[int]] = {}
        self._unwanted: list[RequestId] = []

    def offer(self, prefill: Prefill, sequence: Sequence) -> None:
        """Says that the sequence's KV will exist, so that it is granted room before it does."""
        rows = KVRows(self._cache.num_layers, len(sequence.tokens) - prefill.first_token)
        self._leaving[sequence.request] = _Leaving(prefill.transfer, prefill.first_token, rows)
        self._sender.offer(
            prefill.transfer,
            prefill.consumer,
            rows.num_rows,
            self._layout,
            on_end=lambda complete: self._over(sequence.request, prefill.transfer, complete=complete),
        )

    def started(self, chunks: Rows[Chunk]) -> None:
        """A step begins: those of its sequences that are new have their pages now, and what the cache knows of them
        can go."""
        for chunk in chunks:
            leaving = self._leaving.get(chunk.sequence.request)
            if leaving is not None and leaving.pages is None and leaving.transfer in self._sender:
                leaving.pages = self._held[leaving.transfer] = list(chunk.sequence.pages)
                self._pool.hold(leaving.pages)
                for layer in range(self._cache.num_layers):
                    self._provide(leaving, leaving.pages, layer, leaving.first_token, chunk.start)

    def computed(self, layer: int, chunks: Rows[Chunk]) -> None:
        """A layer of a step is done: its keys and values go."""
        for chunk in chunks:
            leaving = self._leaving.get(chunk.sequence.request)
            if leaving is not None and leaving.pages is not None:
                start = max(leaving.first_token, chunk.start)
                self._provide(leaving, leaving.pages, layer, start, chunk.start + chunk.length)

    def leave(self, request: RequestId) -> None:
        """All of the sequence's KV has been provided; what is left to do is the sender's."""
        del self._leaving[request]

    def give_up(self, request: RequestId, reason: str) -> None:
        """The rest will never exist."""
        if leaving := self._leaving.pop(request, None):
            self._sender.abort(leaving.transfer, reason)

    def take_unwanted(self) -> list[RequestId]:
        """The sequences whose KV nobody waits for any more, though they aren't done."""
        unwanted, self._unwanted = self._unwanted, []
        return [request for request in unwanted if request in self._leaving]

    @property
    def idle(self) -> bool:
        """Whether no page is held."""
        return not self._held

    def _provide(self, leaving: _Leaving, pages: list[int], layer: int, token: int, end_token: int) -> None:
        first = leaving.first_token
        for run in leaving.rows.of_layer(layer, token - first, end_token - first):
            row = run.first_row
            for views in self._cache.of(layer, run.part, pages, first + run.token, run.num_tokens):
                self._sender.provide(leaving.transfer, views, row)
                row += len(views)

    def _over(self, request: RequestId, transfer: TransferId, *, complete: bool) -> None:
        self._pool.free(self._held.pop(transfer, ()))
        leaving = self._leaving.get(request)  # all its rows may be there before the token after them is
        if leaving is not None and leaving.transfer == transfer and not complete:
            self._unwanted.append(request)
