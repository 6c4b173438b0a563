"""KV of requests that another instance prefills, received into their pages."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from triptych.engine.kv_rows import CacheRows, KVRows
from triptych.engine.request import Request
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk
from triptych.engine.source import RowSource
from triptych.errors import ErrorKind
from triptych.messages.rows import Wrote
from triptych.messages.work import PrefillNeeded
from triptych.observe.timeline import Interval
from triptych.transfer.receiver import Receiver, TransferFailure
from triptych.types import Address, RequestId, TransferId


@dataclass
class _IncomingKV:
    """One request's KV transfer."""

    request: Request
    transfer: TransferId
    first_token: int
    """First token whose KV is transferred."""
    rows: KVRows
    pages: list[int]
    copied: int = 0
    """Rows copied to ``pages``."""
    began: float = 0.0
    """When the first row was written, in seconds since the epoch."""
    has_token: bool = False
    """Whether the token after the prompt has arrived."""

    @property
    def complete(self) -> bool:
        return self.copied == self.rows.num_rows


class KVSource(RowSource):
    """KV transfers of all requests of an instance that only decodes, over its receiver."""

    def __init__(
        self, receiver: Receiver, cache: CacheRows, name: str, address: Address, no_rows: MediaEmbeddings
    ) -> None:
        """``no_rows``: the empty embeddings that every step gets, since media tokens are prefilled elsewhere."""
        super().__init__(receiver, name, address)
        self._no_rows = no_rows
        self._failures: list[tuple[RequestId, TransferFailure]] = []
        self._cache = cache
        self._incoming: dict[RequestId, _IncomingKV] = {}
        self._intervals: dict[RequestId, Interval] = {}

    def expect(self, request: Request) -> PrefillNeeded | None:
        """Start, or restart, a request's transfer once it has pages. Returns the message that asks for its prefill."""
        self.release(request.id)
        if not request.admitted:
            return None
        transfer = self._new_transfer(request.id)
        first, end = request.num_computed, len(request.tokens)
        rows = KVRows(self._cache.num_layers, end - first)
        # Queued for blocks when offered, which is when its prefill begins: a transfer with blocks then always makes
        # progress. A transfer that waits for its prefill could otherwise hold the blocks that earlier ones need.
        self._receiver.expect(transfer, rows.num_rows, timeout=request.timeout)
        self._incoming[request.id] = _IncomingKV(request, transfer, first, rows, list(request.pages))
        return PrefillNeeded(request.id, self._address, transfer, first, request.tokens[request.num_prompt :])

    def release(self, request_id: RequestId) -> None:
        """Close a request's transfer."""
        self._intervals.pop(request_id, None)
        if incoming := self._incoming.pop(request_id, None):
            if not incoming.complete:
                self._receiver.close(incoming.transfer, "the request has ended or is restarted")
            del self._requests[incoming.transfer]

    def on_first_token(self, transfer: TransferId) -> Request | None:
        """Return the request that a transfer's first token is for; None if it isn't expected any more."""
        incoming = self._incoming.get(self._requests.get(transfer, RequestId("")))
        if incoming is None or incoming.has_token:
            return None
        incoming.has_token = True
        self._drop_if_done(incoming)
        return incoming.request

    def take_completed(self) -> list[tuple[Request, int]]:
        """Copy landed rows to the pages. Returns the requests that became complete, with their number of tokens in
        pages."""
        complete = []
        for incoming in [incoming for incoming in self._incoming.values() if not incoming.complete]:
            self._copy(incoming)
            if incoming.complete:
                self._intervals[incoming.request.id] = Interval("transfer", incoming.began, time.time())
                complete.append((incoming.request, incoming.first_token + incoming.rows.num_tokens))
                self._drop_if_done(incoming)
        return complete

    def ready_tokens(self, request: Request) -> int:
        """Return all tokens if the KV arrives without waiting for anything else. With media or a grammar, that is once
        the prefill instance has offered it, after the last embedding and the first mask."""
        if not request.items and request.sampling.grammar is None:
            return len(request.tokens)
        incoming = self._incoming.get(request.id)
        if incoming is None:
            return len(request.tokens) if request.admitted else request.num_computed
        comes = incoming.complete or self._receiver.is_offered(incoming.transfer)
        return len(request.tokens) if comes else request.num_computed

    def gather(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        """Return no embeddings: media tokens are prefilled elsewhere."""
        return self._no_rows

    def intervals(self, request_id: RequestId) -> list[Interval]:
        """Return the time from the first row's writing to the last row's copying."""
        interval = self._intervals.get(request_id)
        return [interval] if interval else []

    def take_failures(self) -> list[tuple[RequestId, TransferFailure]]:
        """As ``RowSource.take_failures``, including requests whose first token will never arrive."""
        failures, self._failures = self._failures, []
        return [
            *((request_id, f) for request_id, f in failures if f.transfer in self._requests),
            *super().take_failures(),
        ]

    def producer_lost(self, producer: Address, offering: Collection[TransferId]) -> None:
        """Fail open transfers, and those that lack only the first token. The receiver has already dropped the
        latter."""
        super().producer_lost(producer, offering)
        for request_id, incoming in self._incoming.items():
            if incoming.complete and incoming.transfer in offering:
                failure = TransferFailure(
                    incoming.transfer,
                    ErrorKind.INSTANCE_LOST,
                    "the prefill instance was lost before it sent the next token",
                )
                self._failures.append((request_id, failure))

    def _on_rows_landed(self, request_id: RequestId, wrote: Wrote) -> None:
        if incoming := self._incoming.get(request_id):
            incoming.began = incoming.began or wrote.began

    def _drop_if_done(self, incoming: _IncomingKV) -> None:
        if incoming.complete and incoming.has_token:
            del self._incoming[incoming.request.id], self._requests[incoming.transfer]

    def _copy(self, incoming: _IncomingKV) -> None:
        landed = self._receiver.landed(incoming.transfer)
        for run in incoming.rows.between(incoming.copied, landed):
            token, row = incoming.first_token + run.token, run.first_row
            for target in self._cache.of(run.layer, run.part, incoming.pages, token, run.num_tokens):
                offset = 0
                for source in self._receiver.read(incoming.transfer, row, len(target)):
                    target[offset : offset + len(source)] = source
                    offset += len(source)
                row += len(target)
        if landed > incoming.copied:
            incoming.copied = landed
            self._receiver.consume(incoming.transfer, landed)
