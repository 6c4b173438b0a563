"""What instances report with their heartbeats, as Prometheus collects it: read from the leases when it is asked for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.messages.stats import EncodeStats, InstanceStats, LanguageStats, ReceivePool, SenderCounters
from triptych.observe.metrics import PREFIX
from triptych.router.registry import InstanceLease, Registry

Value = tuple[str, float]
"""The value of the series' own label, where it has one, and the sample."""


@dataclass(frozen=True)
class Series:
    """One metric over all instances. ``label`` is what it has besides the instance's name and role."""

    name: str
    meaning: str
    counts: bool
    values: Callable[[InstanceLease], Iterable[Value]]
    label: str = ""


def _encode(of: Callable[[EncodeStats], float]) -> Callable[[InstanceLease], Iterable[Value]]:
    return lambda lease: [("", of(lease.stats.encode))] if lease.stats.encode else []


def _language(of: Callable[[LanguageStats], float]) -> Callable[[InstanceLease], Iterable[Value]]:
    return lambda lease: [("", of(lease.stats.language))] if lease.stats.language else []


def _received(of: Callable[[ReceivePool], float]) -> Callable[[InstanceLease], Iterable[Value]]:
    return lambda lease: [(pool.kind, of(pool))] if (pool := lease.stats.received) else []


def _sent(of: Callable[[SenderCounters], float]) -> Callable[[InstanceLease], Iterable[Value]]:
    return lambda lease: [("", of(lease.stats.sent))] if lease.stats.sent else []


def _of_all(of: Callable[[InstanceStats], float]) -> Callable[[InstanceLease], Iterable[Value]]:
    return lambda lease: [("", of(lease.stats))]


def _running(lease: InstanceLease) -> Iterator[Value]:
    if encode := lease.stats.encode:
        yield "encode", encode.running
    if language := lease.stats.language:
        if lease.role.prefills:
            yield "prefill", language.prefilling
        if lease.role.decodes:
            yield "decode", language.decoding + (0 if lease.role.prefills else language.prefilling)


def _waiting(lease: InstanceLease) -> Iterator[Value]:
    if encode := lease.stats.encode:
        yield "encode", encode.waiting
    if language := lease.stats.language:
        yield "prefill" if lease.role.prefills else "decode", language.waiting


SERIES = [
    Series("num_requests_running", "requests (items, for encode) that a stage works on", False, _running, "stage"),
    Series("num_requests_waiting", "requests (items, for encode) that wait for a stage", False, _waiting, "stage"),
    Series(
        "kv_cache_usage_perc", "share of the KV cache's pages that are held, 0 to 1", False,
        _language(lambda language: language.kv_pages_used / max(1, language.kv_pages)),
    ),
    Series("kv_cache_pages", "pages of the KV cache", False, _language(lambda language: language.kv_pages)),
    Series("prefix_cache_queries", "prompt tokens looked up", True, _language(lambda one: one.prefix_queries)),
    Series("prefix_cache_hits", "prompt tokens found", True, _language(lambda one: one.prefix_hits)),
    Series("num_preemptions", "sequences that lost their pages", True, _language(lambda one: one.preemptions)),
    Series("engine_steps", "forward passes", True, _language(lambda one: one.steps)),
    Series("engine_computed_tokens", "tokens computed in them", True, _language(lambda one: one.computed_tokens)),
    Series("mm_cache_queries", "parts of media looked up", True, _encode(lambda one: one.cache_queries)),
    Series("mm_cache_hits", "parts of media found", True, _encode(lambda one: one.cache_hits)),
    Series("mm_cache_bytes", "embedding rows remembered, in bytes", False, _encode(lambda one: one.cache_bytes)),
    Series("mm_items_encoded", "media items that went through the tower", True, _encode(lambda one: one.encoded)),
    Series(
        "receive_pool_usage_perc", "share of the receive pool's blocks that are taken, 0 to 1", False,
        _received(lambda pool: pool.used / max(1, pool.blocks)), "kind",
    ),
    Series("transfer_received_bytes", "bytes landed", True, _received(lambda pool: pool.counters.bytes), "kind"),
    Series("transfer_received", "transfers completed", True, _received(lambda pool: pool.counters.completed), "kind"),
    Series("transfer_resent", "grants of garbled rows", True, _received(lambda pool: pool.counters.resent), "kind"),
    Series("transfer_revoked", "rows taken back", True, _received(lambda pool: pool.counters.revoked), "kind"),
    Series("transfer_relocated", "moves of the pool", True, _received(lambda pool: pool.counters.relocated), "kind"),
    Series("transfer_waits", "waits for a block", True, _received(lambda pool: pool.counters.waits), "kind"),
    Series("transfer_sent_bytes", "bytes written to others", True, _sent(lambda sent: sent.bytes)),
    Series("transfer_sent", "transfers that were sent whole", True, _sent(lambda sent: sent.completed)),
    Series("transfer_retries", "writes that failed and were repeated", True, _sent(lambda sent: sent.retries)),
    Series("transfer_aborted", "transfers that the sender gave up", True, _sent(lambda sent: sent.aborted)),
    Series("engine_busy_seconds", "time spent on computing and loading", True, _of_all(lambda one: one.busy_seconds)),
    Series("engine_resident_bytes", "memory of rank 0's process", False, _of_all(lambda one: one.resident_bytes)),
    Series("engine_outstanding", "cost of the work given and not done: tokens, or the tower's multiplications", False,
           lambda lease: [("", lease.outstanding)]),
]  # fmt: skip


class InstanceCollector(Collector):
    """The samples of all instances that hold a lease; names of instances are their operator's choice."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        leases = list(self._registry)
        for series in SERIES:
            labels = ["engine", "role", *([series.label] if series.label else [])]
            family: type[CounterMetricFamily | GaugeMetricFamily] = (
                CounterMetricFamily if series.counts else GaugeMetricFamily
            )
            metric = family(PREFIX + series.name, series.meaning, labels=labels)
            for lease in leases:
                for value, sample in series.values(lease):
                    metric.add_metric([lease.name, lease.role.value, *([value] if series.label else [])], sample)
            yield metric
