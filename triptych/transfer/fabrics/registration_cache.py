"""Registration cache for the sources of writes: network fabrics send from registered memory."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from triptych.transfer.memory import Bytes

Registration = TypeVar("Registration")


@dataclass(eq=False)
class CachedRegistration(Generic[Registration]):
    """A registered range of addresses."""

    owner: "weakref.ref[Bytes]"
    start: int
    end: int
    registration: Registration
    users: int = 0
    """Number of writes that read from it now."""

    def covers(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.end

    def overlaps(self, other: "CachedRegistration[Registration]") -> bool:
        return self.start < other.end and other.start < self.end


class RegistrationCache(Generic[Registration]):
    """Registers whole arrays instead of the slices that are written, and keeps them registered while they exist.

    The rows of one item are written in many slices, one write after another, and network cards pin memory by the page.
    A write that holds a registration must also hold its array. Freed arrays are deregistered by the next call.
    """

    def __init__(self, register: Callable[[int, int], Registration], deregister: Callable[[Registration], None]):
        self._register = register  # address and bytes
        self._deregister = deregister
        self._registrations: list[CachedRegistration[Registration]] = []

    def acquire(self, arrays: Iterable[tuple[Bytes, int]]) -> list[CachedRegistration[Registration]]:
        """Return registrations that cover the arrays, which are given with their addresses. They are released together.
        Raises what registering raises, and then nothing is held."""
        self._drop_freed()
        held: list[CachedRegistration[Registration]] = []
        try:
            for array, start in arrays:
                if not any(entry.covers(start, start + array.nbytes) for entry in held):
                    entry = self._find(array, start)
                    entry.users += 1
                    held.append(entry)
        except BaseException:
            self.release(held)
            raise
        return held

    def _find(self, array: Bytes, start: int) -> CachedRegistration[Registration]:
        for entry in self._registrations:
            if entry.covers(start, start + array.nbytes):
                return entry
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        first, end = np.lib.array_utils.byte_bounds(owner)
        entry = CachedRegistration(weakref.ref(owner), first, end, self._register(first, end - first))
        self._registrations.append(entry)
        return entry

    def release(self, held: Iterable[CachedRegistration[Registration]]) -> None:
        for entry in held:
            entry.users -= 1
        self._drop_freed()

    def _drop_freed(self) -> None:
        """Deregister freed arrays, except those that overlap a registration in use, because a library may use either of
        the two for a write."""
        freed = [entry for entry in self._registrations if not entry.users and entry.owner() is None]
        if freed:
            busy = [entry for entry in self._registrations if entry.users]
            for entry in freed:
                if not any(map(entry.overlaps, busy)):
                    self._registrations.remove(entry)
                    self._deregister(entry.registration)
