"""Prometheus metrics of the instances, from the statistics in their heartbeats."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.clock import Clock
from triptych.messages.stats import (
    CacheTier,
    EncodeStats,
    InstanceStats,
    LanguageStats,
    PageUsage,
    ReceivePool,
    SenderCounters,
)
from triptych.observe.metrics import PREFIX
from triptych.router.instance import Instance
from triptych.router.launcher_view import LauncherView
from triptych.router.membership import Membership

Value = tuple[str, float]
"""The value of the series' own label, empty if it has none, and the sample."""


@dataclass(frozen=True)
class Series:
    """One metric of all instances."""

    name: str
    """Without the prefix."""
    meaning: str
    counts: bool
    """Whether it is a counter; otherwise it is a gauge."""
    values: Callable[[Instance], Iterable[Value]]
    label: str = ""
    """Its label besides the instance's name and role; empty if it has none."""


def _encode(of: Callable[[EncodeStats], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: [("", of(instance.stats.encode))] if instance.stats.encode else []


def _tiers(of: Callable[[CacheTier], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: (
        [(one.name, of(one)) for one in instance.stats.encode.tiers] if instance.stats.encode else []
    )


def _language(of: Callable[[LanguageStats], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: [("", of(instance.stats.language))] if instance.stats.language else []


def _pages(of: Callable[[PageUsage], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: (
        [(one.layers, of(one)) for one in instance.stats.language.kv_cache] if instance.stats.language else []
    )


def _received(of: Callable[[ReceivePool], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: [(pool.kind, of(pool))] if (pool := instance.stats.received) else []


def _sent(of: Callable[[SenderCounters], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: [("", of(instance.stats.sent))] if instance.stats.sent else []


def _of_all(of: Callable[[InstanceStats], float]) -> Callable[[Instance], Iterable[Value]]:
    return lambda instance: [("", of(instance.stats))]


def _running(instance: Instance) -> Iterator[Value]:
    if encode := instance.stats.encode:
        yield "encode", encode.running
    if language := instance.stats.language:
        if instance.role.prefills:
            yield "prefill", language.prefilling
        if instance.role.decodes:
            yield "decode", language.decoding + (0 if instance.role.prefills else language.prefilling)


def _waiting(instance: Instance) -> Iterator[Value]:
    if encode := instance.stats.encode:
        yield "encode", encode.waiting
    if language := instance.stats.language:
        yield "prefill" if instance.role.prefills else "decode", language.waiting


SERIES = [
    Series("num_requests_running", "requests (items, for encode) running in a stage", False, _running, "stage"),
    Series("num_requests_waiting", "requests (items, for encode) waiting for a stage", False, _waiting, "stage"),
    Series(
        "kv_cache_usage_perc", "share of the KV cache's pages in use, 0 to 1, by the layers that they are for: full, "
        "or for example window 512", False, _pages(lambda one: one.used / max(1, one.pages)), "layers",
    ),
    Series("kv_cache_pages", "pages of the KV cache, by layers", False, _pages(lambda one: one.pages), "layers"),
    Series(
        "prefix_cache_queries", "prompt tokens looked up in the prefix cache", True,
        _language(lambda one: one.prefix_queries),
    ),
    Series(
        "prefix_cache_hits", "prompt tokens found in the prefix cache", True, _language(lambda one: one.prefix_hits)
    ),
    Series(
        "state_slots", "slots for the states of requests, in models with state", False,
        _language(lambda one: one.state_slots),
    ),
    Series("state_slots_used", "slots that hold a request's state", False, _language(lambda one: one.state_slots_used)),
    Series(
        "state_snapshots_cached", "snapshots of states in the prefix cache", False,
        _language(lambda one: one.state_snapshots_cached),
    ),
    Series("num_preemptions", "requests preempted", True, _language(lambda one: one.preemptions)),
    Series("instance_steps", "forward passes", True, _language(lambda one: one.steps)),
    Series(
        "instance_computed_tokens", "tokens computed in forward passes", True,
        _language(lambda one: one.computed_tokens),
    ),
    Series("mm_cache_queries", "parts looked up in the encoder cache", True, _encode(lambda one: one.cache_queries)),
    Series("mm_cache_hits", "parts found in the encoder cache", True, _encode(lambda one: one.cache_hits)),
    Series("mm_cache_bytes", "embeddings in the encoder cache, in bytes", False, _encode(lambda one: one.cache_bytes)),
    Series(
        "mm_cache_tier_hits", "parts found in the encoder cache, by tier", True, _tiers(lambda one: one.hits), "tier"
    ),
    Series(
        "mm_cache_tier_bytes", "embeddings in the encoder cache, in bytes, by tier; instances may have shm and disk in "
        "common", False, _tiers(lambda one: one.bytes), "tier",
    ),
    Series("mm_patches_encoded", "patches encoded; of audio, frames", True, _encode(lambda one: one.patches)),
    Series("mm_batches_encoded", "batches encoded", True, _encode(lambda one: one.batches)),
    Series(
        "mm_encode_seconds", "time for which batches were encoded, or waited for the compute thread", True,
        _encode(lambda one: one.tower_seconds),
    ),
    Series(
        "mm_fetched_bytes", "bytes of media files fetched from frontends", True, _encode(lambda one: one.fetched_bytes)
    ),
    Series("mm_items_encoded", "images, videos and clips encoded", True, _encode(lambda one: one.encoded)),
    Series(
        "receive_pool_usage_perc", "share of the receive pool's blocks in use, 0 to 1", False,
        _received(lambda pool: pool.used / max(1, pool.blocks)), "kind",
    ),
    Series("transfer_received_bytes", "bytes received", True, _received(lambda pool: pool.counters.bytes), "kind"),
    Series("transfer_received", "transfers received", True, _received(lambda pool: pool.counters.completed), "kind"),
    Series(
        "transfer_resent", "grants repeated after a checksum error", True,
        _received(lambda pool: pool.counters.resent), "kind",
    ),
    Series("transfer_revoked", "landed rows revoked", True, _received(lambda pool: pool.counters.revoked), "kind"),
    Series(
        "transfer_relocated", "relocations of the receive pool", True, _received(lambda pool: pool.counters.relocated),
        "kind",
    ),
    Series("transfer_waits", "waits for a free block", True, _received(lambda pool: pool.counters.waits), "kind"),
    Series("transfer_sent_bytes", "bytes sent", True, _sent(lambda sent: sent.bytes)),
    Series("transfer_sent", "transfers sent completely", True, _sent(lambda sent: sent.completed)),
    Series("transfer_retries", "failed writes that were retried", True, _sent(lambda sent: sent.retries)),
    Series("transfer_aborted", "transfers aborted by the sender", True, _sent(lambda sent: sent.aborted)),
    Series("instance_busy_seconds", "time spent computing and loading", True, _of_all(lambda one: one.busy_seconds)),
    Series("instance_resident_bytes", "memory of rank 0's process", False, _of_all(lambda one: one.resident_bytes)),
    Series("instance_outstanding", "cost of assigned, unfinished work: tokens, or the plans' cost of items", False,
           lambda instance: [("", instance.outstanding)]),
]  # fmt: skip


class InstanceCollector(Collector):
    """Collects the samples of all registered instances."""

    def __init__(self, membership: Iterable[Instance]) -> None:
        self._membership = membership

    def collect(self) -> Iterator[Metric]:
        # while an instance is replaced, two have its name: a series may have one sample
        by_age = sorted(self._membership, key=lambda one: one.incarnation)
        instances = {one.name: one for one in by_age}.values()
        for series in SERIES:
            labels = ["instance_name", "role", *([series.label] if series.label else [])]
            family: type[CounterMetricFamily | GaugeMetricFamily] = (
                CounterMetricFamily if series.counts else GaugeMetricFamily
            )
            metric = family(PREFIX + series.name, series.meaning, labels=labels)
            for instance in instances:
                for value, sample in series.values(instance):
                    metric.add_metric([instance.name, instance.role.value, *([value] if series.label else [])], sample)
            yield metric


NUM_INSTANCES = "num_instances"
NUM_INSTANCES_MEANING = (
    "instances by role and state: serving, draining (it finishes its work, to leave or to change its role), or as the "
    "supervisor says: starting, restarting, failed"
)
NUM_INSTANCES_LABELS = ("role", "state")


class TopologyCollector(Collector):
    """Collects how many instances there are."""

    def __init__(self, membership: Membership, clock: Clock) -> None:
        self._membership = membership
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        metric = GaugeMetricFamily(PREFIX + NUM_INSTANCES, NUM_INSTANCES_MEANING, labels=NUM_INSTANCES_LABELS)
        counts = Counter((str(instance.role), instance.state) for instance in self._membership)
        counts.update((str(one.role), str(one.state)) for one in self._membership.expected(self._clock.now()))
        for (role, state), count in counts.items():
            metric.add_metric([role, state], count)
        yield metric


RESTARTS = "instance_restarts"
RESTARTS_MEANING = "times that the supervisor has started an instance or the frontend again, by why it ended"
RESTARTS_LABELS = ("process", "reason")  # not "instance": Prometheus gives that label to each target


class RestartCollector(Collector):
    """Collects how often processes were started again."""

    def __init__(self, view: LauncherView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(PREFIX + RESTARTS, RESTARTS_MEANING, labels=RESTARTS_LABELS)
        for (name, reason), count in self._view.restarts().items():
            metric.add_metric([name, reason], count)
        yield metric
