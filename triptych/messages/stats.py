"""What instances tell of themselves with each heartbeat. Fields that count only grow for as long as a process lives."""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict

from triptych.types import Count

Seconds = Annotated[float, Meta(ge=0.0)]


class _Counters(Struct):
    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in asdict(self).items())


class SenderCounters(_Counters):
    """What the producer's end of transfers has done so far. ``retries`` counts writes that failed and were tried
    again."""

    grants: Count = 0
    bytes: Count = 0
    retries: Count = 0
    completed: Count = 0
    aborted: Count = 0


class ReceiverCounters(_Counters):
    """What the consumer's end has done so far. ``resumes`` counts grants that start beyond row 0, ``waits`` how often a
    transfer came up in line and found no free block, ``revoked`` how often landed rows were taken back for the head of
    the line, ``resent`` grants that were repeated because rows arrived garbled, ``relocated`` how often the buffer
    had to move."""

    grants: Count = 0
    resumes: Count = 0
    waits: Count = 0
    revoked: Count = 0
    resent: Count = 0
    relocated: Count = 0
    rows: Count = 0
    bytes: Count = 0
    completed: Count = 0


class ReceivePool(Struct):
    """The blocks that rows land in, now; ``kind`` is a ``RowKind``."""

    kind: str
    blocks: Count
    used: Count
    counters: ReceiverCounters


class Pool(Struct, frozen=True):
    """How much of something that is bounded is in use, and how much is ``kept``, which is there for who asks for it but
    gives way when room is needed. In pages, blocks or bytes, as the name says."""

    name: str
    size: Count
    used: Count
    kept: Count = 0


class Load(Struct, frozen=True):
    """What an instance has in hand: requests or items it works on, those that wait for their turn, and its pools."""

    running: Count = 0
    waiting: Count = 0
    pools: list[Pool] = []


class EncodeStats(Struct):
    """Items that wait for preprocessing or the tower, and that are in the tower, now; those that went through it so
    far. The row cache: look-ups and finds so far, bytes now and at most."""

    waiting: Count
    running: Count
    encoded: Count
    cache_queries: Count
    cache_hits: Count
    cache_bytes: Count
    cache_max_bytes: Count


class LanguageStats(Struct):
    """Sequences by what they do, those ``waiting`` for their turn, pages, media or KV; and pages of the KV cache, of
    which somebody holds some and others are only kept for their key, now. ``prefix_queries`` counts the
    prompt tokens that the prefix cache was asked for so far, ``prefix_hits`` those that it knew."""

    waiting: Count
    prefilling: Count
    decoding: Count
    kv_pages: Count
    kv_pages_used: Count
    kv_pages_cached: Count
    prefix_queries: Count
    prefix_hits: Count
    preemptions: Count
    steps: Count
    computed_tokens: Count


class InstanceStats(Struct):
    """Each host of the instance fills in its part. ``busy_seconds`` is how long its compute thread has worked,
    ``resident_bytes`` what its process has in memory now."""

    encode: EncodeStats | None = None
    language: LanguageStats | None = None
    received: ReceivePool | None = None
    sent: SenderCounters | None = None
    busy_seconds: Seconds = 0.0
    resident_bytes: Count = 0

    @property
    def load(self) -> Load:
        """What of it matters at a glance: what the instance has in hand, and its pools."""
        running = waiting = 0
        pools: list[Pool] = []
        if (encode := self.encode) is not None:
            running, waiting = encode.running, encode.waiting
            pools.append(Pool("encode_cache_bytes", encode.cache_max_bytes, 0, encode.cache_bytes))
        if (language := self.language) is not None:
            running += language.prefilling + language.decoding
            waiting += language.waiting
            pools.append(Pool("kv_pages", language.kv_pages, language.kv_pages_used, language.kv_pages_cached))
        if (received := self.received) is not None:
            pools.append(Pool(f"{received.kind}_blocks", received.blocks, received.used))
        return Load(running, waiting, pools)
