"""Fetches the files of items from the frontends that have them, piece by piece. Holds no socket and no clock.

Each frontend has a window: what it has been asked for and hasn't sent. Pieces are asked for file by file, and of a file
in order of offsets. A piece that is lost is asked for again, with all that follow it.
"""

from collections import Counter
from dataclasses import dataclass, field

from triptych.encode.jobs import EncodeJob
from triptych.errors import InternalError
from triptych.fair_queue import FairQueue, Ticket
from triptych.messages.codec import Send
from triptych.messages.work import MEDIA_PIECE_BYTES, FetchMedia, MediaBytes
from triptych.types import Address, TransferId

WINDOW_BYTES = 8 * MEDIA_PIECE_BYTES
"""Bytes asked of one frontend at a time. They are queued in front of its other messages to this instance."""

MAX_SHORT_BYTES = 64 * 2**20
MAX_LONG_BYTES = 256 * 2**20
"""No further file of a frontend is fetched while those of its short items, or of its long items, take this much memory.
Files are kept until they are preprocessed, so without a limit all queued ones would be in memory."""

ASK_AGAIN_SECONDS = 5.0
"""Time without a piece of a file after which the pieces under way count as lost for the first time. It doubles each
time, so that a slow network isn't filled with repetitions."""

MAX_REPEATS = 3
"""Times that pieces are asked for again before the frontend counts as lost."""


@dataclass(eq=False)
class _Fetch:
    """A file that is being fetched."""

    job: EncodeJob
    source: TransferId
    """The transfer whose frontend is asked."""
    frontend: Address
    progressed: float
    """When a piece was last asked for or received, by the caller's clock."""
    pieces: list[bytes] = field(default_factory=list)
    received: int = 0
    """Bytes of the pieces."""
    asked: int = 0
    """Bytes that have been asked for."""
    repeats: int = 0
    """Times since the last piece that those under way counted as lost."""


class MediaFetcher:
    """Files that are being fetched or wait for it, and the memory that files take until they are released.

    Callers pass the time, in seconds."""

    def __init__(self, address: Address, send: Send, *, max_short: int = MAX_SHORT_BYTES) -> None:
        """``address`` is this instance's own, where frontends answer. ``max_short`` replaces ``MAX_SHORT_BYTES``."""
        self.num_bytes = 0
        """Bytes fetched so far."""
        self._address = address
        self._send = send
        self._limits = {False: max_short, True: MAX_LONG_BYTES}
        self._waiting: FairQueue[EncodeJob] = FairQueue()
        self._tickets: dict[EncodeJob, Ticket[EncodeJob]] = {}
        self._fetches: dict[TransferId, _Fetch] = {}
        """By source, oldest first."""
        self._of_job: dict[EncodeJob, _Fetch] = {}
        self._held: dict[EncodeJob, tuple[Address, bool]] = {}
        """Jobs whose files take memory, and the limit that each counts against."""
        self._held_bytes: Counter[tuple[Address, bool]] = Counter()

    def add(self, job: EncodeJob) -> None:
        """Queue a job, which has a transfer, to have its file fetched; call ``advance`` afterwards."""
        self._tickets[job] = self._waiting.add(job, job.flow, job.size, kind=job.frontend)

    def advance(self, now: float) -> set[Address]:
        """Begin to fetch the files for which there is memory. Ask for pieces, also for those that got lost. Returns the
        frontends that don't answer, whose transfers must leave their jobs."""
        while ticket := self._waiting.pop(self._has_room):
            job = ticket.work
            del self._tickets[job]
            account = job.frontend, job.long
            self._held[job] = account
            self._held_bytes[account] += job.size
            self._begin(_Fetch(job, job.source, job.frontend, now))
        silent = set()
        for fetch in self._fetches.values():
            if fetch.asked > fetch.received and now - fetch.progressed > ASK_AGAIN_SECONDS * 2**fetch.repeats:
                if fetch.repeats == MAX_REPEATS:
                    silent.add(fetch.frontend)
                fetch.asked = fetch.received
                fetch.repeats += 1
        for frontend in dict.fromkeys(fetch.frontend for fetch in self._fetches.values()):
            if frontend not in silent:
                self._ask(frontend, now)
        return silent

    def receive(self, message: MediaBytes, now: float) -> tuple[EncodeJob, list[bytes]] | None:
        """Take a piece. Returns the job with the pieces of its file if that was the last one. Drops pieces that aren't
        awaited. Call ``advance`` afterwards. Raises InternalError for a piece of the wrong size."""
        fetch = self._fetches.get(message.transfer)
        if fetch is None or message.offset != fetch.received or message.offset >= fetch.asked:
            return None
        if len(message.data) != _piece(fetch.job, message.offset):
            fetch.pieces, fetch.received = [], 0  # the others need not be right either
            raise InternalError("an item's file doesn't have the announced size")
        fetch.pieces.append(message.data)
        fetch.received += len(message.data)
        fetch.progressed, fetch.repeats = now, 0
        self.num_bytes += len(message.data)
        if fetch.received < fetch.job.size:
            return None
        self._end(fetch)
        return fetch.job, fetch.pieces

    def job_of(self, source: TransferId) -> EncodeJob | None:
        """Return the job whose file the frontend of that transfer is being asked for."""
        fetch = self._fetches.get(source)
        return fetch.job if fetch else None

    def change_source(self, job: EncodeJob, now: float) -> None:
        """Go on with the frontend of another transfer if the one that was asked has left the job; call ``advance``
        afterwards."""
        fetch = self._of_job.get(job)
        if fetch is None or fetch.source in job.transfers:
            return
        self._end(fetch)
        self._begin(_Fetch(job, job.source, job.frontend, now, fetch.pieces, fetch.received, fetch.received))

    def release(self, job: EncodeJob) -> None:
        """Forget a job that is over, or whose file isn't needed any more; call ``advance`` afterwards."""
        if ticket := self._tickets.pop(job, None):
            self._waiting.remove(ticket)
        if fetch := self._of_job.get(job):
            self._end(fetch)
        if account := self._held.pop(job, None):
            self._held_bytes[account] -= job.size
            if not self._held_bytes[account]:
                del self._held_bytes[account]

    @property
    def held_bytes(self) -> int:
        """Size of all files in memory, as announced."""
        return self._held_bytes.total()

    def __len__(self) -> int:
        """Number of files that are being fetched or wait for it."""
        return len(self._tickets) + len(self._fetches)

    def _has_room(self, job: EncodeJob) -> bool:
        return self._held_bytes[job.frontend, job.long] < self._limits[job.long]

    def _begin(self, fetch: _Fetch) -> None:
        self._fetches[fetch.source] = self._of_job[fetch.job] = fetch

    def _end(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.source], self._of_job[fetch.job]

    def _ask(self, frontend: Address, now: float) -> None:
        """Ask a frontend for the next pieces, within its window. Short items' files go before long ones'."""
        fetches = [fetch for fetch in self._fetches.values() if fetch.frontend == frontend]
        room = WINDOW_BYTES - sum(fetch.asked - fetch.received for fetch in fetches)
        for fetch in sorted(fetches, key=lambda one: one.job.long):
            while room > 0 and fetch.asked < fetch.job.size:
                length = _piece(fetch.job, fetch.asked)
                self._send(frontend, FetchMedia(fetch.source, fetch.asked, length, self._address))
                fetch.asked += length
                fetch.progressed = now
                room -= length


def _piece(job: EncodeJob, offset: int) -> int:
    """Return the size of the piece at an offset."""
    return min(MEDIA_PIECE_BYTES, job.size - offset)
