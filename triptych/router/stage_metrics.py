"""Prometheus metrics of the stages, by which autoscalers decide how many instances each should have."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.observe.metrics import PREFIX
from triptych.router.instance import Instance, WorkKind
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.membership import Membership
from triptych.topology import Stage

SATURATION = "stage_saturation"
OUTSTANDING = "stage_outstanding"
STAGE_SERIES = {
    SATURATION: "share of the work that a stage's instances may have at a time which they have, 0 to 1; 1 without any "
    "instance that takes work",
    OUTSTANDING: "cost of a stage's work in flight, queued or assigned: the plans' cost of items for encode, tokens of "
    "prompts without an answer yet for prefill, the forecast cost of requests for decode",
}
"""The metrics and their meanings. All are gauges."""
STAGE_LABELS = ("stage",)


def saturation(membership: Membership, stage: Stage) -> float:
    """Return the mean over a stage's instances of the share that each has of the work that it may have, 0 to 1. Those
    that drain, or change their role, don't count. 1 if there is none."""
    shares = [_share(one, stage) for one in membership if stage in one.role.stages and one.takes_work]
    return sum(shares) / len(shares) if shares else 1.0


def _share(instance: Instance, stage: Stage) -> float:
    limits = _encode_limits(instance) if stage is Stage.ENCODE else _language_limits(instance)
    return min(1.0, max((used / most for used, most in limits if most), default=0.0))


def _encode_limits(instance: Instance) -> Iterator[tuple[int, int]]:
    """Yield what an instance has of each kind of work, and the most that it may have."""
    yield instance.account.patches, instance.credit.patches
    yield instance.account.num(WorkKind.LONG_ITEM), instance.credit.long_items


def _language_limits(instance: Instance) -> Iterator[tuple[int, int]]:
    language = instance.stats.language
    if instance.role.sends_kv:  # prompts go to one whatever it has
        yield (language.prefilling + language.waiting if language else 0), instance.capacity.max_num_seqs
    else:
        has = max(instance.account.num(WorkKind.READY), instance.account.num(WorkKind.MAY_STALL))
        yield has, instance.credit.requests
    for pages in language.kv_cache if language else ():
        yield pages.used, pages.pages


class StageCollector(Collector):
    """Collects the samples of all stages."""

    def __init__(self, membership: Membership, lifecycle: RequestLifecycle, *, expects_encoders: bool) -> None:
        self._membership = membership
        self._lifecycle = lifecycle
        self._expects_encoders = expects_encoders

    def collect(self) -> Iterator[Metric]:
        encodes = self._expects_encoders or bool(self._membership.encode_instances(begun=True))
        stages = [stage for stage in Stage if encodes or stage is not Stage.ENCODE]
        yield _gauge(SATURATION, {stage: saturation(self._membership, stage) for stage in stages})
        yield _gauge(OUTSTANDING, {stage: self._outstanding(stage) for stage in stages})

    def _outstanding(self, stage: Stage) -> float:
        match stage:
            case Stage.ENCODE:
                return self._lifecycle.encodes.outstanding
            case Stage.PREFILL:
                return self._lifecycle.requests.prompt_tokens_ahead
            case Stage.DECODE:
                return self._lifecycle.requests.cost


def _gauge(name: str, samples: Mapping[Stage, float]) -> Metric:
    metric = GaugeMetricFamily(PREFIX + name, STAGE_SERIES[name], labels=STAGE_LABELS)
    for stage, sample in samples.items():
        metric.add_metric([STAGE_NAMES[stage]], sample)
    return metric
