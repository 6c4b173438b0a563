"""Whose fault it is that a job failed, and when an instance has failed too often. Holds no device and no socket."""

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from triptych.errors import HelperFailed, InstanceBroken, MediaError, PlanMismatch, StartError, TriptychError

MAX_IN_A_ROW = 3
"""Failures without a success in between after which an instance is broken."""


class Culprit(enum.StrEnum):
    """Whose fault it is that a job failed: what follows depends on that alone."""

    REQUEST = "request"
    """The request's: it ends with the error, which it would end in anywhere."""
    ITEM = "item"
    """One of its media items': likewise."""
    HELPER = "helper"
    """That of a process or thread that helps the instance: the request goes elsewhere, or there again."""
    UNCLEAR = "unclear"
    """The request's or the instance's, although its device answers: as HELPER, but the same request proves nothing by
    failing again."""
    DEVICE = "device"
    """The device's, which doesn't answer any more, or that of a process that computes a part: the instance ends, and
    its work goes elsewhere."""

    @property
    def ends_request(self) -> bool:
        """Whether the request ends with the error."""
        return self in (Culprit.REQUEST, Culprit.ITEM)


def culprit_of(error: BaseException) -> Culprit:
    """Return whose fault an error is. If it is unclear, the compute thread has asked the device already."""
    match error:
        case StartError():  # InstanceBroken, or a rank has ended
            return Culprit.DEVICE
        case HelperFailed():
            return Culprit.HELPER
        case MediaError() | PlanMismatch():
            return Culprit.ITEM
        case TriptychError():
            return Culprit.REQUEST
        case _:
            return Culprit.UNCLEAR


@dataclass
class FailureRow:
    """The failures of one stage of an instance since it last succeeded."""

    _helpers: int = 0
    _unclear: set[Hashable] = field(default_factory=set)
    """What the jobs were of whose failure is unclear."""

    def succeeded(self) -> None:
        """A job of the stage has done its work."""
        self._helpers = 0
        self._unclear.clear()

    def failed(self, error: BaseException, work: Hashable) -> Culprit:
        """Return whose fault an error is. ``work`` is equal for jobs that would fail alike. Raises InstanceBroken if
        the instance has failed too often: its supervisor can start a new one."""
        culprit = culprit_of(error)
        if culprit is Culprit.HELPER:
            self._helpers += 1
        elif culprit is Culprit.UNCLEAR:
            self._unclear.add(work)
        if (number := self._helpers + len(self._unclear)) >= MAX_IN_A_ROW and not culprit.ends_request:
            reason = f"{number} unlike jobs have failed in a row; the last one: {error!r}"
            raise InstanceBroken(reason, suspect=bool(self._unclear)) from error
        return culprit
