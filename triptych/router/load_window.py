"""Samples of a service's load over the last seconds."""

from collections import deque

from triptych.clock import Clock
from triptych.messages.stats import InstanceStats
from triptych.observe.request_history import client_name
from triptych.router.instance import Instance
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.load_sample import PREEMPTION_SECONDS, FrontendSample, InstanceSample, LoadSample, StageQueue
from triptych.router.membership import Membership
from triptych.router.request_state import RequestPhase
from triptych.topology import Stage

INTERVAL = 0.5
"""Seconds between two samples."""
WINDOW = 3.0
"""Seconds that a window spans, as long as those that rates are means of."""


def take_sample(membership: Membership, lifecycle: RequestLifecycle, now: float, busy: float) -> LoadSample:
    """Return the load now. ``now`` is by the router's clock, ``busy`` the frontend's share. Looks at each instance,
    client and request once."""
    requests = lifecycle.requests
    client, num_of_client = requests.largest_client()
    return LoadSample(
        instances=tuple(_instance(instance) for instance in membership if instance.takes_work),
        frontend=FrontendSample(busy, lifecycle.admission.in_preparation(now)),
        queues={stage: stage_queue(membership, lifecycle, stage, now) for stage in Stage},
        num_in={phase: requests.num_in(phase) for phase in RequestPhase},
        num_clients=requests.num_clients,
        largest_client=client_name(client),
        largest_share=num_of_client / len(requests) if len(requests) else 0.0,
    )


def stage_queue(membership: Membership, lifecycle: RequestLifecycle, stage: Stage, now: float) -> StageQueue:
    """Return what waits at the frontend for an instance of a stage."""
    length, began = 0, list[float | None]()
    if stage is Stage.ENCODE:
        length, began = len(lifecycle.encodes), [lifecycle.encodes.oldest()]
    elif stage is queued_stage(membership):
        length, began = len(lifecycle.admission), [lifecycle.admission.oldest()]
    if stage is Stage.PREFILL:
        waiting = lifecycle.requests.waiting_for_prefill
        length += len(waiting)
        began += [one.entered for one in waiting]
    since = min((one for one in began if one is not None), default=None)
    return StageQueue(length, 0.0 if since is None else max(0.0, now - since))


def queued_stage(membership: Membership) -> Stage:
    """Return the stage that queued requests wait for: decode if all that they lack is an instance which decodes what
    others have prefilled, else prefill."""
    apart = membership.prefill_instances() and not any(one.role.prefills for one in membership.decode_instances())
    return Stage.DECODE if apart else Stage.PREFILL


def busy_share(instance: Instance) -> float:
    """Return the share of the last seconds in which an instance's compute thread worked, 0 to 1."""
    return min(1.0, instance.history.rate(lambda stats: stats.busy_seconds))


def step_seconds(instance: Instance) -> float:
    """Return the mean time of an instance's steps or items in the last seconds; 0 without one."""
    return instance.history.ratio(lambda stats: stats.busy_seconds, _steps) or 0.0


class LoadWindow:
    """Samples of the last seconds, taken by ``tick``."""

    def __init__(self, membership: Membership, lifecycle: RequestLifecycle, clock: Clock) -> None:
        self._membership = membership
        self._lifecycle = lifecycle
        self._clock = clock
        self._samples: deque[LoadSample] = deque(maxlen=round(WINDOW / INTERVAL))
        self._processor: deque[tuple[float, float]] = deque(maxlen=self._samples.maxlen)
        """Times at which samples were taken, and the process's processor time then."""
        self._due = float("-inf")

    def tick(self, now: float) -> None:
        """Take a sample if one is due. ``now`` is by the router's clock."""
        if now >= self._due:
            self._due = now + INTERVAL
            self._processor.append((now, self._clock.processor()))
            (first, then), (last, latest) = self._processor[0], self._processor[-1]
            busy = min(1.0, (latest - then) / (last - first)) if last > first else 0.0
            self._samples.append(take_sample(self._membership, self._lifecycle, now, busy))

    @property
    def samples(self) -> list[LoadSample]:
        """The latest last."""
        return list(self._samples)


def _instance(instance: Instance) -> InstanceSample:
    encode, language = instance.stats.encode, instance.stats.language
    return InstanceSample(
        name=instance.name,
        role=instance.role,
        busy=busy_share(instance),
        encode_waiting=encode.waiting if encode else 0,
        waiting=language.waiting if language else 0,
        running=language.prefilling + language.decoding if language else 0,
        max_running=instance.capacity.max_num_seqs if instance.role.has_decoder else 0,
        kv_fill=max((pages.used / pages.pages for pages in language.kv_cache if pages.pages), default=0.0)
        if language
        else 0.0,
        preemptions=round(instance.history.growth(_preemptions, PREEMPTION_SECONDS)[0]),
        step_seconds=step_seconds(instance),
    )


def _steps(stats: InstanceStats) -> float:
    return (stats.language.steps if stats.language else 0) + (stats.encode.encoded if stats.encode else 0)


def _preemptions(stats: InstanceStats) -> float:
    return stats.language.preemptions if stats.language else 0
