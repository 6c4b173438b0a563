"""What supervisors say of the processes that they keep running. Callers pass the time."""

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState, SparePlace
from triptych.topology import Stage
from triptych.types import Address

FRESH_SECONDS = 5.0
"""Age up to which a report counts; supervisors send one every half second."""
MAX_LAUNCHERS = 64
"""Supervisors that are remembered: one for each machine, more than a service has."""

STAGE_NAMES = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}


@dataclass
class LauncherView:
    """The last report of each supervisor."""

    _reports: dict[Address, tuple[LauncherReport, float]] = field(default_factory=dict)
    """With the time at which it came, the latest last."""
    """Reports so far."""

    def update(self, report: LauncherReport, now: float) -> list[LaunchedInstance]:
        """Take a report, which replaces the supervisor's earlier one. Return the processes whose end it is the first to
        tell: they are started again, or have been given up."""
        earlier, _ = self._reports.pop(report.launcher, (None, 0.0))
        known = {(one.name, one.incarnation, one.state) for one in (earlier.instances if earlier else ())}
        self._reports[report.launcher] = report, now
        if len(self._reports) > MAX_LAUNCHERS:
            del self._reports[next(iter(self._reports))]
        ended = [one for one in report.instances if one.state in (LaunchState.RESTARTING, LaunchState.FAILED)]
        return [one for one in ended if (one.name, one.incarnation, one.state) not in known]

    @property
    def stopping(self) -> bool:
        """Whether a supervisor ends the service."""
        return any(report.stopping for report, _ in self._reports.values())

    @property
    def standby(self) -> bool:
        """Whether another frontend still serves, by what a supervisor says."""
        return any(report.standby for report, _ in self._reports.values())

    def finishing(self, now: float) -> list[Address]:
        """Return the frontends that have been replaced, and finish their requests."""
        return [one for report, _ in self._recent(now) for one in report.finishing]

    def launchers(self, now: float) -> list[Address]:
        """Return the supervisors that sent a report recently."""
        return [launcher for launcher, (_, received) in self._reports.items() if now - received <= FRESH_SECONDS]

    def change(self, now: float) -> str:
        """Return the changes of processes in progress, and what they do; empty if there is none."""
        return "; ".join(report.change for report, _ in self._recent(now) if report.change)

    def keeps(self, name: str, incarnation: int, now: float) -> bool:
        """Return whether a supervisor has that process run, so that only the supervisor ends it."""
        return any(
            (one.name, one.incarnation) == (name, incarnation)
            and one.state in (LaunchState.STARTING, LaunchState.READY, LaunchState.DRAINING)
            for one in self.processes(now)
        )

    def ended(self, name: str, incarnation: int, now: float) -> LaunchedInstance | None:
        """Return an instance whose end a supervisor has seen, and its lease doesn't show yet; None if it hasn't."""
        return next(
            (
                one
                for one in self.processes(now)
                if (one.name, one.incarnation) == (name, incarnation)
                and one.state in (LaunchState.RESTARTING, LaunchState.FAILED)
            ),
            None,
        )

    def returning(self, stage: Stage, now: float) -> dict[str, float]:
        """Return the instances of a stage that are coming back, by name: the seconds until they are started, 0 for
        those that are loading. They join some time after that."""
        return {
            one.name: one.restart_in
            for one in self.processes(now)
            if one.role is not None
            and stage in one.role.stages
            and one.state in (LaunchState.STARTING, LaunchState.RESTARTING)
        }

    def has_served(self, stage: Stage, now: float) -> bool:
        """Return whether a stage's instances that are coming back have served before: only such are started again."""
        returning = self.returning(stage, now)
        return any(one.restarts and one.name in returning for one in self.processes(now))

    def why_missing(self, stage: Stage, now: float) -> str:
        """Describe a stage that has no instance: ``no encode instance: e0 restarts in 2 s``."""
        returning = sorted(self.returning(stage, now).items(), key=lambda item: item[1])
        when = (
            f"{name} restarts in {math.ceil(left)} s" if left else f"{name} is starting" for name, left in returning
        )
        return f"no {STAGE_NAMES[stage]} instance" + "".join(f": {words}" for words in [", ".join(when)] if words)

    def processes(self, now: float) -> list[LaunchedInstance]:
        """Return all processes of recent reports, with the seconds left from now on."""
        return [
            msgspec.structs.replace(one, restart_in=max(0.0, one.restart_in - (now - received)))
            for report, received in self._recent(now)
            for one in report.instances
        ]

    def spares(self, now: float) -> list[SparePlace]:
        """Return the places of recent reports that are kept free, or waited for."""
        return [one for report, _ in self._recent(now) for one in report.spares]

    def _recent(self, now: float) -> list[tuple[LauncherReport, float]]:
        """Reports that still say what is, and when each came."""
        return [one for one in self._reports.values() if now - one[1] <= FRESH_SECONDS]

    def restarts(self) -> Counter[tuple[str, str]]:
        """Return how often processes were started again, by name and reason. Older reports count, too: a counter must
        not go back."""
        counts: Counter[tuple[str, str]] = Counter()
        for report, _ in self._reports.values():
            for one in report.instances:
                counts.update({(one.name, reason): count for reason, count in one.reasons.items()})
        return counts
