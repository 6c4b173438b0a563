"""How a request that another instance prefills gets its keys and values: through the receive buffer into its pages."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from triptych.engine.kv_rows import CacheRows, KVRows
from triptych.engine.request import Request
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk
from triptych.engine.source import RowSource
from triptych.messages.rows import Wrote
from triptych.messages.work import PrefillNeeded
from triptych.observe.timeline import Interval
from triptych.transfer.receiver import Receiver, TransferFailure
from triptych.types import Address, RequestId, TransferId


@dataclass
class _Arriving:
    """A request's KV on its way: of tokens from ``first_token`` on, into ``pages``. ``has_token``: the token after it
    has come, too."""

    request: Request
    transfer: TransferId
    first_token: int
    rows: KVRows
    pages: list[int]
    copied: int = 0
    began: float = 0.0
    has_token: bool = False

    @property
    def whole(self) -> bool:
        return self.copied == self.rows.num_rows


class KVSource(RowSource):
    """The KV of all requests of an instance that only decodes, over its receiver."""

    def __init__(
        self, receiver: Receiver, cache: CacheRows, name: str, address: Address, no_rows: MediaEmbeddings
    ) -> None:
        """``no_rows`` is what a step here takes for media rows: their tokens are prefilled elsewhere."""
        super().__init__(receiver, name, address)
        self._no_rows = no_rows
        self._missed: list[tuple[RequestId, TransferFailure]] = []
        self._cache = cache
        self._arriving: dict[RequestId, _Arriving] = {}
        self._intervals: dict[RequestId, Interval] = {}

    def need(self, request: Request) -> PrefillNeeded | None:
        """Starts over with a request; what to ask for, once it has pages to put it in."""
        self.release(request.id)
        if not request.admitted:
            return None
        transfer = self._name(request.id, next(self._numbers))
        first, end = request.num_computed, len(request.tokens)
        rows = KVRows(self._cache.num_layers, end - first)
        # In line when it is offered, which is when its prefill begins: what has blocks then gets its rows whatever
        # the others do. Blocks for one that waits for its turn could be what those before it wait for.
        self._receiver.expect(transfer, rows.num_rows, timeout=request.timeout)
        self._arriving[request.id] = _Arriving(request, transfer, first, rows, list(request.pages))
        return PrefillNeeded(request.id, self._address, transfer, first, request.tokens[request.num_prompt :])

    def release(self, request_id: RequestId) -> None:
        """Gives up what is still to come."""
        self._intervals.pop(request_id, None)
        if arriving := self._arriving.pop(request_id, None):
            if not arriving.whole:
                self._receiver.close(arriving.transfer, "the request ended or starts over")
            del self._requests[arriving.transfer]

    def token_came(self, transfer: TransferId) -> Request | None:
        """The request that the token after a transfer's rows is for; None when nobody waits for it any more."""
        arriving = self._arriving.get(self._requests.get(transfer, RequestId("")))
        if arriving is None or arriving.has_token:
            return None
        arriving.has_token = True
        self._forget_if_over(arriving)
        return arriving.request

    def arrived(self) -> list[tuple[Request, int]]:
        """Copies what has landed into the pages. The requests of which all is there now, and how many tokens that
        is."""
        whole = []
        for arriving in [arriving for arriving in self._arriving.values() if not arriving.whole]:
            self._copy(arriving)
            if arriving.whole:
                self._intervals[arriving.request.id] = Interval("transfer", arriving.began, time.time())
                whole.append((arriving.request, arriving.first_token + arriving.rows.num_tokens))
                self._forget_if_over(arriving)
        return whole

    def ready_tokens(self, request: Request) -> int:
        """All: the KV will come without waiting for anything else. But of a prompt with media or a grammar, not before
        its prefill instance offers it, which it does once the last row and the first mask are there."""
        if not request.items and request.sampling.grammar is None:
            return len(request.tokens)
        arriving = self._arriving.get(request.id)
        if arriving is None:
            return len(request.tokens) if request.admitted else request.num_computed
        comes = arriving.whole or self._receiver.is_offered(arriving.transfer)
        return len(request.tokens) if comes else request.num_computed

    def take(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        """Media tokens are prefilled elsewhere: there are no rows for any."""
        return self._no_rows

    def intervals(self, request_id: RequestId) -> list[Interval]:
        """From the first row's writing until all was in its place."""
        interval = self._intervals.get(request_id)
        return [interval] if interval else []

    def take_failures(self) -> list[tuple[RequestId, TransferFailure]]:
        """Those of which the token will never come are among them."""
        missed, self._missed = self._missed, []
        return [
            *((request_id, f) for request_id, f in missed if f.transfer in self._requests),
            *super().take_failures(),
        ]

    def producer_lost(self, producer: Address, offering: Collection[TransferId]) -> None:
        """The receiver has done with what is whole; but the token after it won't come any more."""
        super().producer_lost(producer, offering)
        for request_id, arriving in self._arriving.items():
            if arriving.whole and arriving.transfer in offering:
                failure = TransferFailure(
                    arriving.transfer, "InstanceLost", "it was lost before it said the next token"
                )
                self._missed.append((request_id, failure))

    def _note_landed(self, request_id: RequestId, wrote: Wrote) -> None:
        if arriving := self._arriving.get(request_id):
            arriving.began = arriving.began or wrote.began

    def _forget_if_over(self, arriving: _Arriving) -> None:
        if arriving.whole and arriving.has_token:
            del self._arriving[arriving.request.id], self._requests[arriving.transfer]

    def _copy(self, arriving: _Arriving) -> None:
        landed = self._receiver.landed(arriving.transfer)
        for run in arriving.rows.between(arriving.copied, landed):
            token, row = arriving.first_token + run.token, run.first_row
            for target in self._cache.of(run.layer, run.part, arriving.pages, token, run.num_tokens):
                place = 0
                for source in self._receiver.read(arriving.transfer, row, len(target)):
                    target[place : place + len(source)] = source
                    place += len(source)
                row += len(target)
        if landed > arriving.copied:
            arriving.copied = landed
            self._receiver.consume(arriving.transfer, landed)
