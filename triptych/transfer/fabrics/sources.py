"""Registers what writes read from: network fabrics send from registered memory."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from triptych.transfer.memory import Bytes

Registration = TypeVar("Registration")


@dataclass(eq=False)
class Source(Generic[Registration]):
    """A registered range of addresses. ``users`` are the writes that read it now."""

    owner: "weakref.ref[Bytes]"
    start: int
    end: int
    registration: Registration
    users: int = 0

    def covers(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.end

    def overlaps(self, other: "Source[Registration]") -> bool:
        return self.start < other.end and other.start < self.end


class Sources(Generic[Registration]):
    """Registers whole arrays rather than the slices that writes name, and keeps them registered while they exist: the
    rows of one item are written in many slices, one write after another, and a network card pins memory by the page
    (without a card, registering measures 10 µs whatever the size).

    Whoever holds a source holds its array as well. What has been freed is deregistered by the next call.
    """

    def __init__(self, register: Callable[[int, int], Registration], deregister: Callable[[Registration], None]):
        self._register = register  # address and bytes
        self._deregister = deregister
        self._sources: list[Source[Registration]] = []

    def acquire(self, arrays: Iterable[tuple[Bytes, int]]) -> list[Source[Registration]]:
        """Sources that cover all of the arrays, given with their addresses; to be released together. Raises what
        registering raises; then nothing is held."""
        self._drop_freed()
        held: list[Source[Registration]] = []
        try:
            for array, start in arrays:
                if not any(source.covers(start, start + array.nbytes) for source in held):
                    source = self._find(array, start)
                    source.users += 1
                    held.append(source)
        except BaseException:
            self.release(held)
            raise
        return held

    def _find(self, array: Bytes, start: int) -> Source[Registration]:
        for source in self._sources:
            if source.covers(start, start + array.nbytes):
                return source
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        first, end = np.lib.array_utils.byte_bounds(owner)
        source = Source(weakref.ref(owner), first, end, self._register(first, end - first))
        self._sources.append(source)
        return source

    def release(self, held: Iterable[Source[Registration]]) -> None:
        for source in held:
            source.users -= 1
        self._drop_freed()

    def _drop_freed(self) -> None:
        """Where registrations overlap, a library may have picked either for a write under way, so that one stays with
        the other."""
        freed = [source for source in self._sources if not source.users and source.owner() is None]
        if freed:
            busy = [source for source in self._sources if source.users]
            for source in freed:
                if not any(map(source.overlaps, busy)):
                    self._sources.remove(source)
                    self._deregister(source.registration)
