"""Slots of requests' states, and snapshots of states in the prefix cache.

A model with state, such as one with gated delta nets, keeps a record of fixed size for each request
(``layers/state_spec.py``). A request takes a slot for it together with its first pages, and releases it with them. A
state can't go back: what is behind it has to be computed again, from the beginning or from a *snapshot*, a copy of a
state after whole pages. Snapshots are cached under the hash of the last of these pages, and evicted apart from pages.

Slots and snapshots have pools, as groups of layers have pools of pages; the last three of a request's tables are for
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.engine.kv_cache import PagePool
from triptych.engine.page_tables import PageTable, PageTables


@dataclass(frozen=True)
class StateTables:
    """A request's tables in the pools of ``StateSlots``, each with one entry at most."""

    slot: PageTable
    loading: PageTable
    """The snapshot that the request's first step begins with, held until that step has ended."""
    saving: PageTable
    """The snapshot that the running step ends with."""

    @classmethod
    def of(cls, tables: PageTables) -> "StateTables":
        return cls(*tables[-NUM_TABLES:])


NUM_TABLES = 3


class StateSlots:
    """Slots and snapshots, and when to take these. Numbers of snapshots follow those of slots."""

    def __init__(self, num_slots: int, num_snapshots: int, interval: int, page_size: int) -> None:
        """A snapshot is taken every ``interval`` tokens, rounded up to whole pages, and after the last whole page of a
        prompt that its last token doesn't belong to."""
        self.slots = PagePool(num_slots, page_size)
        self.snapshots = PagePool(num_snapshots, page_size)
        self.pools = [self.slots, self.snapshots, self.snapshots]
        self._page_size = page_size
        self._interval = -(-interval // page_size) * page_size

    def missing(self, tables: PageTables) -> list[int]:
        """Return how many entries a request lacks in each pool."""
        return [1 - len(StateTables.of(tables).slot.pages), 0, 0]

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────

    def longest(self, page_hashes: Sequence[bytes]) -> int:
        """Return the number of pages of the longest prefix with these hashes that has a snapshot."""
        lengths = range(len(page_hashes), 0, -1)
        return next((length for length in lengths if page_hashes[length - 1] in self.snapshots), 0)

    def hold(self, tables: PageTables, page_hash: bytes) -> None:
        """Have the request begin with the snapshot under this hash."""
        StateTables.of(tables).loading.pages = self.snapshots.lookup([page_hash])

    def next_position(self, position: int, num_prompt: int) -> int:
        """Return the next position after ``position`` to take a snapshot at, in a request with a prompt of
        ``num_prompt`` tokens."""
        regular = (position // self._interval + 1) * self._interval
        last = (num_prompt - 1) // self._page_size * self._page_size
        return min(regular, last) if last > position else regular

    def plan(self, tables: PageTables, page_hash: bytes) -> None:
        """Have the next step end with a snapshot, unless there is one under this hash already or all are held. A
        request whose last step failed may have one to fill."""
        saving = StateTables.of(tables).saving
        if not saving.pages and page_hash not in self.snapshots and self.snapshots.num_free:
            saving.pages = self.snapshots.allocate(1)

    def planned(self, tables: PageTables) -> bool:
        """Whether a step is to end with a snapshot."""
        return bool(StateTables.of(tables).saving.pages)

    def computed(self, tables: PageTables, page_hash: bytes | None) -> None:
        """Record that a step has run; the snapshot that it ended with is cached under ``page_hash``, if given."""
        own = StateTables.of(tables)
        for page in own.saving.pages if page_hash is not None else []:
            assert page_hash is not None
            self.snapshots.cache(page, page_hash)
        for table in (own.loading, own.saving):
            self.snapshots.release(table.pages)
            table.pages = []


def can_restart(tables: PageTables, position: int) -> bool:
    """Whether a step that begins at ``position`` can be repeated although a failed attempt has changed the state."""
    return position == 0 or bool(StateTables.of(tables).loading.pages)


def slot_of(tables: PageTables) -> int:
    """Return the slot of a request's state, which has one."""
    return StateTables.of(tables).slot.pages[0]
