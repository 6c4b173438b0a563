"""What may happen to a running service: faults, and what its operator does. The list of faults and walks share it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import StartError
from triptych.measure.chaos.clocks import set_ahead
from triptych.measure.chaos.connections import take_messages
from triptych.measure.chaos.disks import SMALL_DISK
from triptych.measure.chaos.target import Ranked, Target, Victim
from triptych.topology import Role

STOPPED_SECONDS = 10.0
"""Seconds for which a process stands still."""
BETWEEN_SECONDS = 1.0
"""Seconds between two signals in a row."""
SLOW_STOPPED, SLOW_RUNNING = 0.09, 0.03
"""Seconds for which a slow process stands still and runs, in turns."""
ROLE_SECONDS = 20.0
"""Seconds that an instance gets to finish its work before its role changes."""


@dataclass(frozen=True)
class Act:
    """Something that happens to a service, once. It is over, and undone where it lasts, when ``do`` returns."""

    what: str
    """What a plan shows."""
    do: Callable[[Target], Coroutine[Any, Any, None]]
    """Raises TriptychError when it can't be done."""
    models: Sequence[Path] = ()
    """The checkpoints that are served one after the other, the last of them from then on; empty if none changes."""


def signals(number: signal.Signals, *victims: Victim) -> Act:
    """Send a signal to each of these processes, at the same moment."""

    async def do(target: Target) -> None:
        for victim in victims:
            target.send(victim, number)

    return Act(f"{number.name} to {' and '.join(map(str, victims))}", do)


def in_a_row(number: signal.Signals, *victims: Victim, seconds: float = BETWEEN_SECONDS) -> Act:
    """Send a signal to these processes, one after the other."""

    async def do(target: Target) -> None:
        for index, victim in enumerate(victims):
            if index:
                await asyncio.sleep(seconds)
            target.send(victim, number)

    return Act(f"{number.name} to {', then '.join(map(str, victims))}", do)


def stands_still(victim: Victim, seconds: float = STOPPED_SECONDS) -> Act:
    """Stop a process for some time."""

    async def do(target: Target) -> None:
        process = target.send(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            process.send(signal.SIGCONT)

    return Act(f"stop {victim} for {seconds:.3g} s", do)


def slows(victim: Victim, seconds: float) -> Act:
    """Let a process run for a part of the time only."""

    async def do(target: Target) -> None:
        process = target.find(victim)
        target.mark(f"{process.name} is slow")
        try:
            for _ in range(round(seconds / (SLOW_STOPPED + SLOW_RUNNING))):
                process.send(signal.SIGSTOP)
                await asyncio.sleep(SLOW_STOPPED)
                process.send(signal.SIGCONT)
                await asyncio.sleep(SLOW_RUNNING)
        finally:
            process.send(signal.SIGCONT)

    return Act(f"slow down {victim} for {seconds:.3g} s", do)


def loses_messages(victim: Victim, seconds: float) -> Act:
    """Stop an instance or a frontend for some time, and take what the others have sent to it meanwhile, with the
    connections."""

    async def do(target: Target) -> None:
        process = target.send(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
            target.mark(f"{take_messages(process.pid)} bytes to {process.name} are lost")
        finally:
            process.send(signal.SIGCONT)

    return Act(f"stop {victim} for {seconds:.3g} s, and lose what was sent to it", do)


def fills(folder: Path, seconds: float) -> Act:
    """Leave no space on a small disk for some time."""

    async def do(target: Target) -> None:
        disk = os.statvfs(folder)
        if disk.f_blocks * disk.f_frsize > SMALL_DISK:
            raise StartError(f"{folder} is on a disk that others may need")
        target.mark(f"{folder} is full")
        file = folder / "full"
        try:
            with contextlib.suppress(OSError), file.open("wb", buffering=0) as full:
                while True:
                    full.write(bytes(2**12))
            await asyncio.sleep(seconds)
        finally:
            file.unlink(missing_ok=True)

    return Act(f"fill {folder} for {seconds:.1f} s", do)


def steps_clock(folder: Path, ahead: int, seconds: float) -> Act:
    """Set the wall clock of ``settable_clock`` forward or back by ``ahead`` seconds, and right again after a while."""

    async def do(target: Target) -> None:
        target.mark(f"the clock is set {ahead:+} s")
        set_ahead(folder, ahead)
        try:
            await asyncio.sleep(seconds)
        finally:
            set_ahead(folder, 0)

    return Act(f"clock {ahead:+} s for {seconds:.1f} s", do)


def rolls_out(*models: Path) -> Act:
    """Replace all processes one by one: by those of each of these checkpoints in turn, or else of the same one."""

    async def do(target: Target) -> None:
        for model in models or ("",):
            target.mark("rollout begins")
            await target.roll_out(str(model))

    names = " and ".join(dict.fromkeys(model.name for model in models))
    return Act(f"rollout to {names}" if models else "rollout", do, models)


def scales(role: Role, count: int) -> Act:
    """Add instances of a role, or remove some, until there are that many."""

    def scale(target: Target) -> None:
        with target.operating() as client:
            for _ in client.scale({role: count}):
                pass

    async def do(target: Target) -> None:
        target.mark(f"scale {role}={count}")
        await asyncio.to_thread(scale, target)

    return Act(f"scale {role}={count}", do)


def changes_role(victim: Ranked, role: Role) -> Act:
    """Let an instance continue in another role."""

    def change(target: Target, name: str) -> None:
        with target.operating() as client:
            client.set_role(name, role, ROLE_SECONDS)

    async def do(target: Target) -> None:
        name = target.find(victim).name
        target.mark(f"{name} becomes {role}")
        await asyncio.to_thread(change, target, name)

    return Act(f"set the role of {victim} to {role}", do)


async def _nothing(_: Target) -> None:
    """The load itself is the fault."""


NOTHING = Act("nothing", _nothing)
