"""Which stage binds, and why: a policy over samples of the last seconds. Holds no device and no socket.

A stage binds when work waits for it and its instances have no time, no slots or no memory left. Causes that explain a
queue better than a busy stage does are looked for first: a full KV cache, one slow instance, one client's load.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from triptych.observe.pipeline import Verdict
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.load_sample import PREEMPTION_SECONDS, FrontendSample, InstanceSample, LoadSample, StageQueue
from triptych.router.request_state import RequestPhase
from triptych.topology import Role, Stage

BUSY = 0.8
"""Mean busy share from which a stage has no time left: what comes unevenly leaves gaps."""
FULL = 0.9
"""Fill of a KV cache from which requests wait for pages: one needs several at once."""
WAITING = 0.5
"""Mean length of a queue from which it counts."""
LONG_WAIT = 0.5
"""Seconds of waiting that need an explanation even where no instance is busy."""
SLOW = 2.0
"""Times that an instance's steps take longer than the others' if it is the slow one."""
ONE_CLIENT = 0.8
"""Share of the requests in flight from which one client's load is the cause of a queue."""
CLIENT_QUEUE = 4.0
"""Mean number of waiting requests below which no client's load is a cause."""
FRONTEND = "frontend"
"""What a verdict calls it, beside the stages."""
MAX_NAMES = 3
"""Instances that a sentence names."""


@dataclass(frozen=True)
class _Member:
    """One instance: rates of the last seconds, and means of what it had over the window."""

    name: str
    role: Role
    busy: float
    encode_waiting: float
    waiting: float
    running: float
    max_running: int
    kv_fill: float
    preemptions: int
    step_seconds: float


@dataclass(frozen=True)
class _Load:
    """Means over the window."""

    members: list[_Member]
    frontend: FrontendSample
    queues: dict[Stage, StageQueue]
    """Lengths are whole; 0 means that there was none most of the time."""
    last: LoadSample
    waits_for_rows: float
    """Share of the time in which requests waited for embeddings, and none was prefilled."""
    encoding: float
    prefilling: float
    decoding: float

    def of(self, stage: Stage) -> list[_Member]:
        return [one for one in self.members if stage in one.role.stages]

    def busy(self, stage: Stage) -> float:
        return fmean(one.busy for one in self.of(stage)) if self.of(stage) else 0.0

    def waiting(self, stage: Stage) -> float:
        """Work that waits for a stage: at the frontend and, items alone, at its instances. Requests wait there for
        much else."""
        at = sum(one.encode_waiting for one in self.of(stage)) if stage is Stage.ENCODE else 0.0
        return self.queues[stage].length + at


def verdict(window: Sequence[LoadSample], control: str = "HOST:PORT") -> Verdict:
    """Return which stage binds, from samples of the last seconds, the latest last. ``control`` is the frontend's
    control address, for the commands in the advice."""
    if not window:
        return Verdict("", "Nothing binds: nothing has been measured yet.", "")
    load = _means(window)
    rules: tuple[Callable[[_Load, str], Verdict | None], ...] = (
        _missing_stage,
        _full_cache,
        _one_client,
        _slow_instance,
        _busy_frontend,
        _busy_stage,
        _slow_queue,
    )
    found = (rule(load, control) for rule in rules)
    return next((one for one in found if one is not None), None) or _nothing(load)


# ── rules, in the order in which they are tried ──────────────────────────────────────────────────────────────────


def _missing_stage(load: _Load, control: str) -> Verdict | None:
    """A stage has no instance, and work waits for it now: means would hide the first seconds after a loss."""
    for stage in Stage:
        queue = load.last.queues.get(stage, StageQueue())
        if not load.of(stage) and queue.length:
            sentence = f"no instance takes work, and {_queued(stage, queue, queue.length)}"
            return Verdict(
                STAGE_NAMES[stage], _binds(stage, sentence), f"triptych status --control {control} says why."
            )
    return None


def _full_cache(load: _Load, control: str) -> Verdict | None:
    """Pages are full, and requests wait for some or have lost theirs."""
    full = [
        one
        for one in load.members
        if one.role.has_decoder and (one.preemptions or one.waiting >= WAITING) and one.kv_fill >= FULL
    ]
    if not full or (load.busy(Stage.ENCODE) >= BUSY and load.waiting(Stage.ENCODE) >= WAITING):
        return None
    stage = Stage.DECODE if any(one.role.decodes for one in full) else Stage.PREFILL
    waiting, preemptions = sum(one.waiting for one in full), sum(one.preemptions for one in full)
    facts = [f"the KV cache of {_names(full)} is {_percent(fmean(one.kv_fill for one in full))} full"]
    facts += [f"{_count(waiting, 'request')} wait for its pages"] if waiting >= WAITING else []
    facts += [f"{_count(preemptions, 'preemption')} in the last {PREEMPTION_SECONDS:g} s"] if preemptions else []
    return Verdict(
        STAGE_NAMES[stage],
        _binds(stage, ", ".join(facts)),
        f"A larger KV cache (--kv-cache-memory) or a smaller format of it (--kv-cache-dtype), or another instance: "
        f"{_scale(load, stage, control)}.",
    )


def _one_client(load: _Load, control: str) -> Verdict | None:
    """Nearly all that waits is one client's, while others have requests, too."""
    waiting = sum(load.waiting(stage) for stage in Stage)
    last = load.last
    if waiting < CLIENT_QUEUE or last.num_clients < 2 or last.largest_share < ONE_CLIENT:
        return None
    stage = max(Stage, key=load.waiting)
    busy = f"{STAGE_NAMES[stage]} is {_percent(load.busy(stage))} busy"
    return Verdict(
        "client",
        f"One client binds: {last.largest_client} has {_percent(last.largest_share)} of the requests in flight, "
        f"{_queued(stage, load.queues[stage], load.waiting(stage))}, and {busy}.",
        "Fair queueing lets the other clients go first; --max-queue-per-client limits one, and another instance serves "
        f"all: {_scale(load, stage, control)}.",
    )


def _slow_instance(load: _Load, control: str) -> Verdict | None:
    """One of several instances that decode takes much longer for a step than the others."""
    for role in Role:
        group = [one for one in load.members if one.role is role and role.decodes and one.running and one.step_seconds]
        if len(group) < 2:
            continue
        slow = max(group, key=lambda one: one.step_seconds)
        others = [one for one in group if one is not slow]
        usual = median(one.step_seconds for one in others)
        if slow.step_seconds < SLOW * usual or slow.busy < BUSY:
            continue
        share = slow.running / sum(one.running for one in group)
        return Verdict(
            STAGE_NAMES[Stage.DECODE],
            f"Decode binds: a step takes {_seconds(slow.step_seconds)} at {slow.name} and {_seconds(usual)} at "
            f"{_names(others)}, and {slow.name} has {_percent(share)} of the requests that run.",
            f"Look for other load on the machine of {slow.name}, or replace it: triptych rollout --control {control}.",
        )
    return None


def _busy_frontend(load: _Load, control: str) -> Verdict | None:
    """Requests wait for their preparation at a frontend that has no time left, longer than others for a busy stage."""
    queue, busy = load.frontend.preparing, load.frontend.busy
    stages = [load.queues[stage].wait for stage in Stage if load.busy(stage) >= BUSY and load.queues[stage].length]
    if busy < BUSY or not queue.length or max(stages, default=0.0) > queue.wait:
        return None
    return Verdict(
        FRONTEND,
        f"Frontend binds: it is {_percent(busy)} busy, and {_prepared(queue)}.",
        "Several frontends can share the port: --frontends 2.",
    )


def _busy_stage(load: _Load, control: str) -> Verdict | None:
    """Work waits for a stage whose instances have no time left."""
    stages = [stage for stage in Stage if load.busy(stage) >= BUSY and _has_backlog(load, stage)]
    if not stages:
        return None
    stage = max(stages, key=lambda one: (load.queues[one].wait, load.waiting(one)))
    facts = [_busy(load.of(stage)), _queued(stage, load.queues[stage], load.waiting(stage))]
    sentence = ", ".join(fact for fact in facts if fact)
    if stage is Stage.ENCODE and load.waits_for_rows:
        sentence += f"; prefill waits for embeddings {_percent(load.waits_for_rows)} of the time"
    return Verdict(STAGE_NAMES[stage], _binds(stage, sentence), f"Another instance: {_scale(load, stage, control)}.")


def _has_backlog(load: _Load, stage: Stage) -> bool:
    """Return whether work waits for a stage rather than for another one that its instances also run."""
    if stage is Stage.ENCODE:
        return load.waiting(stage) >= WAITING
    queued = load.waiting(Stage.PREFILL) + load.waiting(Stage.DECODE)
    combined = all(one.role.prefills and one.role.decodes for one in load.of(stage))
    if not combined:
        return load.waiting(stage) >= WAITING or (stage is Stage.PREFILL and load.prefilling >= len(load.of(stage)) + 1)
    if load.encoding > max(load.prefilling, load.decoding) and load.waits_for_rows >= 0.5:
        return False
    prefills = load.prefilling >= load.decoding
    return queued >= WAITING and prefills is (stage is Stage.PREFILL)


def _slow_queue(load: _Load, control: str) -> Verdict | None:
    """Work waits long, though the stage's instances have time left: something else of it is short."""
    preparing = load.frontend.preparing
    if preparing.length and preparing.wait >= LONG_WAIT:
        return Verdict(
            FRONTEND,
            f"Frontend binds: {_prepared(preparing)}, though it is {_percent(load.frontend.busy)} busy: media are "
            "fetched first.",
            "Look at the hosts that media come from; --media-fetch-timeout bounds the time.",
        )
    served = [one for one in Stage if load.of(one)]
    stages = [one for one in served if load.waiting(one) >= WAITING and load.queues[one].wait >= LONG_WAIT]
    if not stages:
        return None
    stage = stages[0]  # what waits for an earlier stage holds the slots of the later ones
    members, queued = load.of(stage), _queued(stage, load.queues[stage], load.waiting(stage))
    if stage is Stage.ENCODE:
        return Verdict(
            STAGE_NAMES[stage],
            _binds(stage, f"{queued}, though {_busy(members)}: media are fetched, decoded and prepared first"),
            f"More processes that decode media (--decode-workers), or an instance: {_scale(load, stage, control)}.",
        )
    running, most = sum(one.running + one.waiting for one in members), sum(one.max_running for one in members)
    return Verdict(
        STAGE_NAMES[stage],
        _binds(stage, f"{queued}, and {running:.0f} requests are in the {most} slots of {_names(members)}"),
        f"More slots (--max-num-seqs), or another instance: {_scale(load, stage, control)}.",
    )


def _nothing(load: _Load) -> Verdict:
    busiest = max(load.members, key=lambda one: one.busy, default=None)
    waiting = {stage: load.last.queues.get(stage, StageQueue()) for stage in Stage}
    queued = [_queued(stage, queue, queue.length) for stage, queue in waiting.items() if queue.length]
    queued += [_prepared(load.last.frontend.preparing)] if load.last.frontend.preparing.length else []
    facts = queued or ["nothing waits"]
    facts.append(f"{_busy([busiest])}, the most of all" if busiest else "no instance has joined")
    return Verdict("", f"Nothing binds: {', and '.join(facts)}.", "")


# ── means over the window ────────────────────────────────────────────────────────────────────────────────────────


def _means(window: Sequence[LoadSample]) -> _Load:
    samples: dict[str, list[InstanceSample]] = {one.name: [] for one in window[-1].instances}
    for sample in window:
        for one in sample.instances:
            if one.name in samples:
                samples[one.name].append(one)
    hungry = [
        bool(one.num_in.get(RequestPhase.ENCODING)) and not one.num_in.get(RequestPhase.PREFILLING) for one in window
    ]
    return _Load(
        members=[_member(of) for of in samples.values()],
        frontend=FrontendSample(window[-1].frontend.busy, _queue([one.frontend.preparing for one in window])),
        queues={stage: _queue([one.queues.get(stage, StageQueue()) for one in window]) for stage in Stage},
        last=window[-1],
        waits_for_rows=fmean(hungry),
        encoding=fmean(one.num_in.get(RequestPhase.ENCODING, 0) for one in window),
        prefilling=fmean(one.num_in.get(RequestPhase.PREFILLING, 0) for one in window),
        decoding=fmean(one.num_in.get(RequestPhase.DECODING, 0) for one in window),
    )


def _member(of: Sequence[InstanceSample]) -> _Member:
    last = of[-1]
    return _Member(
        name=last.name,
        role=last.role,
        busy=last.busy,
        encode_waiting=fmean(one.encode_waiting for one in of),
        waiting=fmean(one.waiting for one in of),
        running=fmean(one.running for one in of),
        max_running=last.max_running,
        kv_fill=fmean(one.kv_fill for one in of),
        preemptions=last.preemptions,
        step_seconds=last.step_seconds,
    )


def _queue(queues: Sequence[StageQueue]) -> StageQueue:
    """Return the mean of a queue; empty if it was so most of the time."""
    filled = [one for one in queues if one.length]
    if 2 * len(filled) <= len(queues):
        return StageQueue()
    return StageQueue(round(fmean(one.length for one in filled)), fmean(one.wait for one in filled))


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _binds(stage: Stage, why: str) -> str:
    return f"{STAGE_NAMES[stage].capitalize()} binds: {why}."


def _queued(stage: Stage, queue: StageQueue, waiting: float) -> str:
    what = "item" if stage is Stage.ENCODE else "request"
    if waiting < WAITING:
        return ""
    wait = f", the first for {_seconds(queue.wait)}" if queue.length else ""
    return f"{_count(waiting, what)} {'waits' if round(waiting) == 1 else 'wait'}{wait}"


def _prepared(queue: StageQueue) -> str:
    verb = "is" if queue.length == 1 else "are"
    return f"{_count(queue.length, 'request')} {verb} being prepared, the first for {_seconds(queue.wait)}"


def _busy(members: Sequence[_Member]) -> str:
    share = _percent(fmean(one.busy for one in members))
    return f"{_names(members)} {'is' if len(members) == 1 else 'are'} {share} busy"


def _names(members: Sequence[_Member]) -> str:
    if len(members) > MAX_NAMES:
        return f"{len(members)} instances"
    names = [one.name for one in members]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _scale(load: _Load, stage: Stage, control: str) -> str:
    """Return the command that adds an instance of the role that most instances of a stage have."""
    roles: Iterable[Role] = (one.role for one in load.of(stage))
    counts = Counter(roles) or Counter({Role(stage.value): 0})
    role, count = counts.most_common(1)[0]
    return f"triptych scale --control {control} {role}={count + 1}"


def _count(number: float, what: str) -> str:
    return f"{round(number)} {what}{'' if round(number) == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
