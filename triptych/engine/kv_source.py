"""KV of requests that another instance prefills, received into their pages."""

from collections.abc import Collection
from dataclasses import replace

from triptych.engine.active_request import ActiveRequest, IncomingKV
from triptych.engine.cache_rows import CacheRows
from triptych.engine.incoming import IncomingTransfers
from triptych.engine.kv_rows import KVRows
from triptych.engine.state_records import StateRecords
from triptych.engine.state_slots import slot_of
from triptych.errors import ErrorKind
from triptych.messages.work import Prefilled, PrefillNeeded
from triptych.observe.timeline import Interval
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address, TransferId


class KVSource:
    """KV transfers of an instance that only decodes."""

    def __init__(
        self, incoming: IncomingTransfers, cache: CacheRows, address: Address, states: StateRecords | None = None
    ) -> None:
        """``states`` are those of the cache, in a model that has any."""
        self._incoming = incoming
        self._receiver = incoming.receiver
        self._cache = cache
        self._address = address
        self._states = states
        self._with_token: dict[ActiveRequest, None] = {}
        """Requests whose first token has arrived and isn't handled, in that order."""

    def expect(self, active: ActiveRequest) -> PrefillNeeded | None:
        """Start, or restart, a request's transfer once it has pages. Returns the message that asks for its prefill."""
        self.release(active)
        request = active.request
        if not request.admitted:
            return None
        transfer = self._incoming.new_name()
        first, end = request.num_computed, len(request.tokens)
        rows = KVRows(self._cache.of_token, first, end)
        # Queued for blocks when offered, which is when its prefill begins: a transfer with blocks then always makes
        # progress. A transfer that waits for its prefill could otherwise hold the blocks that earlier ones need.
        self._receiver.expect(transfer, rows.num_rows, timeout=request.timeout, owner=active.reply_to)
        active.incoming_kv = IncomingKV(transfer, rows, [table.copy() for table in request.tables])
        self._incoming.add(transfer, active, active.incoming_kv.times)
        generated = request.tokens[request.num_prompt :]
        return PrefillNeeded(request.id, self._address, transfer, first, generated, active.next_asked())

    def release(self, active: ActiveRequest) -> None:
        """Close a request's transfer."""
        active.kv_interval = active.first_token = None
        self._with_token.pop(active, None)
        if (kv := active.incoming_kv) is not None:
            if not kv.complete:
                self._receiver.close(kv.transfer, "the request has ended or is restarted")
            self._forget(active, kv)

    def on_first_token(self, message: Prefilled) -> ActiveRequest | None:
        """Return the request that a first token is for; None if it isn't expected any more."""
        active = self._incoming.request_of(message.transfer)
        if active is None or (kv := active.incoming_kv) is None or kv.has_token:
            return None
        kv.has_token = True
        active.first_token = message
        self._with_token[active] = None
        active.prefill_attempts = 0
        if kv.complete:
            self._forget(active, kv)
        return active

    def take_completed(self) -> list[tuple[ActiveRequest, int]]:
        """Copy landed rows to the pages. Returns the requests that became complete, with their number of tokens in
        pages."""
        complete: list[tuple[ActiveRequest, int]] = []
        for active in self._incoming.requests:
            kv = active.incoming_kv
            if kv is None or kv.complete:
                continue
            try:
                is_complete = self._copy(kv)
            except MemoryError as error:
                self._incoming.fail(TransferFailure(kv.transfer, ErrorKind.INTERNAL_ERROR, str(error)))
                continue
            if is_complete:
                active.kv_interval = Interval("transfer", kv.times.began, self._incoming.clock.monotonic())
                complete.append((active, kv.rows.end_token))
                if kv.has_token:
                    self._forget(active, kv)
        return complete

    def take_first_tokens(self) -> list[ActiveRequest]:
        """Return the requests whose first token has arrived since the last call."""
        arrived, self._with_token = list(self._with_token), {}
        return arrived

    def ready_tokens(self, active: ActiveRequest) -> int:
        """Return all tokens if the KV arrives without waiting for anything else. With media or a grammar, that is once
        the prefill instance has offered it, after the last embedding and the first mask."""
        request, kv = active.request, active.incoming_kv
        if not request.items and request.sampling.grammar is None:
            comes = True
        elif kv is None:
            comes = request.admitted
        else:
            comes = kv.complete or self._receiver.is_offered(kv.transfer)
        return len(request.tokens) if comes else request.num_computed

    def producer_lost(self, offering: Collection[TransferId], *, suspect: bool) -> None:
        """Fail the transfers that lack only the first token, which a lost producer had yet to send. The receiver has
        dropped them already. ``suspect`` is as in Abort."""
        for active in self._incoming.requests:
            if (kv := active.incoming_kv) is not None and kv.complete and kv.transfer in offering:
                reason = "the prefill instance was lost before it sent the next token"
                self._incoming.fail(TransferFailure(kv.transfer, ErrorKind.INSTANCE_LOST, reason, suspect))

    def _forget(self, active: ActiveRequest, kv: IncomingKV) -> None:
        active.incoming_kv = None
        self._incoming.remove(kv.transfer)

    def _copy(self, kv: IncomingKV) -> bool:
        """Copy landed rows to the pages. Returns whether that was the last of them."""
        landed = self._receiver.landed(kv.transfer)
        if landed > kv.copied:
            try:
                self._write(kv, landed)
            finally:
                self._cache.finish_writes()  # even if one fails: the blocks and pages of the others are freed then
            kv.copied = landed
            self._receiver.consume(kv.transfer, landed)
        return kv.complete

    def _write(self, kv: IncomingKV, landed: int) -> None:
        """Write the rows below ``landed`` that aren't yet in the pages, or in the slot of the state."""
        for run in kv.rows.between(kv.copied, landed):
            done = 0
            for rows in self._receiver.read(kv.transfer, run.first_row, run.num_rows):
                part = replace(run, start=run.start + done, num_rows=len(rows), first_row=run.first_row + done)
                self._cache.write(part, kv.tables, rows)
                done += len(rows)
        if self._states is not None and landed > (first := kv.rows.num_token_rows):
            row = max(kv.copied, first)
            for rows in self._receiver.read(kv.transfer, row, landed - row):
                self._cache.write_state(slot_of(kv.tables), row - first, rows)
                row += len(rows)
            if landed == kv.rows.num_rows:
                self._states.received(slot_of(kv.tables), kv.rows.end_token)
