"""Statistics that instances report with each heartbeat. Counters grow for as long as the process lives."""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict

from triptych.types import Count

Seconds = Annotated[float, Meta(ge=0.0)]


class _Counters(Struct):
    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in asdict(self).items())


class SenderCounters(_Counters):
    """Counters of the producer's side of transfers."""

    grants: Count = 0
    bytes: Count = 0
    retries: Count = 0
    """Writes that failed and were retried."""
    completed: Count = 0
    aborted: Count = 0


class ReceiverCounters(_Counters):
    """Counters of the consumer's side of transfers."""

    grants: Count = 0
    resumes: Count = 0
    """Grants that start after row 0."""
    waits: Count = 0
    """Times that a transfer at the head of the queue found no free block."""
    revoked: Count = 0
    """Times that landed rows were revoked in favour of the head of the queue."""
    resent: Count = 0
    """Grants that were repeated because the rows arrived corrupted."""
    relocated: Count = 0
    """Times that the buffer was relocated because a write could not be cancelled."""
    rows: Count = 0
    bytes: Count = 0
    completed: Count = 0


class ReceivePool(Struct):
    """Current use of the blocks that rows land in."""

    kind: str
    """A ``RowKind``."""
    blocks: Count
    used: Count
    counters: ReceiverCounters


class PoolUsage(Struct, frozen=True):
    """Usage of a bounded pool."""

    name: str
    """For display. Its last word is the unit: pages, blocks or bytes."""
    size: Count
    used: Count
    cached: Count = 0
    """Not in use but kept for reuse, and evicted when space is needed."""


class Load(Struct, frozen=True):
    """Summary of an instance's load."""

    running: Count = 0
    """Requests or items that it works on."""
    waiting: Count = 0
    """Requests or items that wait there."""
    pools: list[PoolUsage] = []


class CacheTier(Struct):
    """Statistics of one tier of an encoder cache."""

    name: str
    """``memory``, ``shm``, ``disk`` or ``pool``."""
    hits: Count
    """Parts that this instance has found there so far."""
    bytes: Count
    """Size of the embeddings there. Instances on a machine have the tiers after the first in common."""
    max_bytes: Count = 0
    """Size that it may have; 0 if unknown."""


LATEST_PARTS = 64
"""Parts that a heartbeat names: about what an instance encodes between two."""


class KeptPart(Struct, frozen=True, array_like=True):
    """A part in an encoder cache."""

    name: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """See ``kept_name``."""
    bytes: Count
    """Size of its rows."""


class EncodeStats(Struct):
    """Statistics of an encode loop and its encoder cache."""

    waiting: Count
    """Items that wait for preprocessing or the tower."""
    running: Count
    """Items in the tower."""
    encoded: Count
    """Items encoded so far."""
    cache_queries: Count
    """Parts looked up in the encoder cache so far."""
    cache_hits: Count
    """Parts found there so far."""
    cache_bytes: Count
    cache_max_bytes: Count
    fetched_bytes: Count = 0
    """Bytes of media files fetched from frontends so far."""
    patches: Count = 0
    """Patches encoded so far."""
    batches: Count = 0
    """Batches encoded so far."""
    cost: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cost of the parts encoded so far, in the unit of ``ItemPlan.cost``."""
    tower_seconds: Seconds = 0.0
    """Seconds for which batches were in the tower, or waited for the compute thread."""
    busy_seconds: Seconds = 0.0
    """Seconds of the compute thread that batches took: a part of ``InstanceStats.busy_seconds``."""
    tiers: list[CacheTier] = []
    """Tiers of the encoder cache, in the order in which they are tried."""
    latest: Annotated[list[KeptPart], Meta(max_length=LATEST_PARTS)] = []
    """Parts that it was asked for last, and keeps if it can; the oldest first. For frontends that didn't ask."""


class PageUsage(Struct, frozen=True):
    """Pages of the KV cache for one group of layers."""

    layers: str
    """Which layers: ``full`` for those that keep all tokens, ``window 512`` for those with that sliding window."""
    pages: Count
    used: Count
    """Pages that requests hold."""
    cached: Count
    """Pages that no request holds, kept for the prefix cache."""


class LanguageStats(Struct):
    """Statistics of an engine loop and its KV cache."""

    waiting: Count
    """Requests that wait for a slot, pages, media or KV."""
    prefilling: Count
    decoding: Count
    kv_cache: list[PageUsage]
    """By group of layers."""
    prefix_queries: Count
    """Prompt tokens looked up in the prefix cache so far."""
    prefix_hits: Count
    """Prompt tokens found there so far."""
    preemptions: Count
    steps: Count
    computed_tokens: Count
    state_slots: Count = 0
    """Slots for requests' states; 0 for a model without state."""
    state_slots_used: Count = 0
    state_snapshots: Count = 0
    """Snapshots of states that have room."""
    state_snapshots_cached: Count = 0
    """Snapshots kept for the prefix cache, without those that requests hold."""


class InstanceStats(Struct):
    """All statistics of an instance; each stage loop fills in its part."""

    encode: EncodeStats | None = None
    language: LanguageStats | None = None
    received: ReceivePool | None = None
    sent: SenderCounters | None = None
    busy_seconds: Seconds = 0.0
    """Total run time of its compute thread so far."""
    resident_bytes: Count = 0
    """Memory of its process."""

    @property
    def load(self) -> Load:
        """A summary: requests or items running and waiting, and the pools."""
        running = waiting = 0
        pools: list[PoolUsage] = []
        if (encode := self.encode) is not None:
            running, waiting = encode.running, encode.waiting
            pools.append(PoolUsage("encode_cache_bytes", encode.cache_max_bytes, 0, encode.cache_bytes))
        if (language := self.language) is not None:
            running += language.prefilling + language.decoding
            waiting += language.waiting
            groups = language.kv_cache
            pages, used = sum(group.pages for group in groups), sum(group.used for group in groups)
            pools.append(PoolUsage("kv_pages", pages, used, sum(group.cached for group in groups)))
            if language.state_slots:
                pools.append(PoolUsage("state_slots", language.state_slots, language.state_slots_used))
        if (received := self.received) is not None:
            pools.append(PoolUsage(f"{received.kind}_blocks", received.blocks, received.used))
        return Load(running, waiting, pools)
