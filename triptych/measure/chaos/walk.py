"""Plans a walk: what happens to a service at which moment, decided by a number before it begins."""

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.measure.chaos.acts import (
    Act,
    changes_role,
    fills,
    loses_messages,
    rolls_out,
    scales,
    signals,
    slows,
    stands_still,
    steps_clock,
)
from triptych.measure.chaos.target import Kin, Ranked
from triptych.topology import Role, Topology

FIRST_SECONDS = 3.0
"""Seconds before the first moment."""
PAUSE_SECONDS = (5.0, 12.0)
"""Seconds between two moments."""
AT_ONCE = (2, 2, 3)
"""How much happens at one moment."""
SPREAD_SECONDS = 1.5
"""Seconds over which that is spread."""
STOP_SECONDS = (0.3, 1.0, 2.5, 6.0)
"""Shorter and longer than a lease."""
CLOCK_STEPS = (-86_400, -3600, -5, 5, 3600, 86_400)
"""Seconds by which the wall clock is set forward or back."""
DEVICE_BREAKS = signal.SIGUSR1
"""What breaks the device of an instance that has the setting ``inject_faults`` of ``walking``."""
TOPOLOGIES = ("1EPD", "1E1PD", "2E1P2D")
"""Without a topology, one of these is walked on."""


@dataclass(frozen=True)
class Ground:
    """What a walk needs besides a service."""

    topology: Topology
    model: Path
    other: Path
    """A checkpoint of the same architecture."""
    disks: Sequence[Path]
    """Folders on small disks, which may be filled."""
    clock: Path
    """Folder of a clock that may be set (``settable_clock``)."""


@dataclass(frozen=True)
class TimedAct:
    """Something that happens."""

    at: float
    """In seconds since the walk began."""
    act: Act

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.act.what}"


Draw = Callable[[random.Random, Ground], Act]


def plan_walk(seed: int, ground: Ground, seconds: float) -> list[TimedAct]:
    """Return the steps of the walk of that number, in the order of their times. The same number, topology and time
    always give the same ones."""
    rng = random.Random(seed)
    draws, weights = zip(*_CHOICES, strict=True)
    steps: list[TimedAct] = []
    at, models = FIRST_SECONDS, [ground.other, ground.model]
    while at < seconds:
        for draw in rng.choices(draws, weights, k=rng.choice(AT_ONCE)):
            moment = round(at + rng.uniform(0, SPREAD_SECONDS), 1)
            act = draw(rng, ground)
            if act.models:  # each rollout to a model brings the one that isn't served
                act = rolls_out(models[0])
                models.reverse()
            steps.append(TimedAct(moment, act))
        at += rng.uniform(*PAUSE_SECONDS)
    return sorted(steps, key=lambda step: step.at)


def _ranked(*groups: Kin) -> Callable[[random.Random], Ranked]:
    return lambda rng: Ranked(rng.choice(groups), rng.randrange(12))


def _ends(number: signal.Signals, *groups: Kin) -> Draw:
    victim = _ranked(*groups)
    return lambda rng, _: signals(number, victim(rng))


def _stops(rng: random.Random, _: Ground) -> Act:
    return stands_still(_instance_or_frontend(rng), rng.choice(STOP_SECONDS))


def _slows(rng: random.Random, _: Ground) -> Act:
    return slows(_instance_or_frontend(rng), rng.uniform(2.0, 8.0))


def _loses(rng: random.Random, _: Ground) -> Act:
    return loses_messages(_instance_or_frontend(rng), rng.choice((0.05, 0.3, 1.0)))


def _fills(rng: random.Random, ground: Ground) -> Act:
    return fills(rng.choice(ground.disks), rng.uniform(2.0, 10.0))


def _steps_clock(rng: random.Random, ground: Ground) -> Act:
    return steps_clock(ground.clock, rng.choice(CLOCK_STEPS), rng.uniform(0.5, 10.0))


def _rolls_out(_: random.Random, __: Ground) -> Act:
    return rolls_out()


def _brings_in(_: random.Random, ground: Ground) -> Act:
    return rolls_out(ground.other)


def _scales(rng: random.Random, ground: Ground) -> Act:
    role, count = rng.choice(ground.topology.groups)
    return scales(role, rng.choice((count, count + 1)))


def _changes_role(rng: random.Random, _: Ground) -> Act:
    return changes_role(Ranked(Kin.INSTANCE, rng.randrange(12)), rng.choice((Role.P, Role.D, Role.PD)))


_instance_or_frontend = _ranked(Kin.INSTANCE, Kin.INSTANCE, Kin.FRONTEND)
_CHOICES: Sequence[tuple[Draw, int]] = (
    (_ends(signal.SIGKILL, Kin.INSTANCE), 4),
    (_ends(signal.SIGTERM, Kin.INSTANCE), 2),
    (_ends(signal.SIGKILL, Kin.FRONTEND), 1),
    (_ends(signal.SIGTERM, Kin.FRONTEND), 1),
    (_ends(signal.SIGKILL, Kin.DECODER, Kin.FORK_SERVER), 2),
    (_ends(DEVICE_BREAKS, Kin.INSTANCE), 2),
    (_stops, 3),
    (_slows, 2),
    (_loses, 3),
    (_fills, 2),
    (_steps_clock, 2),
    (_rolls_out, 1),
    (_brings_in, 2),
    (_scales, 2),
    (_changes_role, 2),
)
"""What may happen, and how often in proportion."""
