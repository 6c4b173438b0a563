"""Fabric that injects faults into the writes of another fabric, for tests."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from triptych.clock import Clock
from triptych.config.injected_faults import InjectedFaults
from triptych.errors import TransferError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import Copy, Fabric, Write
from triptych.transfer.memory import Memory


class FaultyFabric:
    """Wraps a fabric and injects faults into its writes. ``injected`` counts the faults by name."""

    def __init__(self, fabric: Fabric, faults: InjectedFaults, clock: Clock) -> None:
        self.name = fabric.name
        self.scope = fabric.scope
        self.checksums = True  # as over the network that it simulates
        self.injected: dict[str, int] = dict.fromkeys(faults.probabilities, 0)
        self._fabric = fabric
        self._faults = faults
        self._clock = clock
        self._random = random.Random(faults.seed)

    def register(self, memory: Memory) -> RegionHandle:
        return self._fabric.register(memory)

    def deregister(self, region: RegionHandle) -> None:
        self._fabric.deregister(region)

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        fault = self._draw()
        if fault is None:
            return self._fabric.write(region, copies)
        self.injected[fault] += 1
        stages = self._stages(fault, region, copies)
        ready_at = self._clock.monotonic() + (self._faults.seconds if fault == "delay" else 0.0)
        return _FaultyWrite(stages, ready_at, self._clock, fails=fault == "half")

    def release(self, region: RegionHandle) -> None:
        self._fabric.release(region)

    def close(self) -> None:
        self._fabric.close()

    def _draw(self) -> str | None:
        left = self._random.random()
        for name, probability in self._faults.probabilities.items():
            left -= probability
            if left < 0:
                return name
        return None

    def _stages(self, fault: str, region: RegionHandle, copies: Sequence[Copy]) -> list[Callable[[], Write]]:
        """Return the writes to make, one after the other."""
        written = list(copies)
        match fault:
            case "drop":
                return []
            case "duplicate":
                return [lambda: self._fabric.write(region, copies)] * 2
            case "reorder":
                self._random.shuffle(written)
                return [lambda copy=copy: self._fabric.write(region, [copy]) for copy in written]  # type: ignore[misc]
            case "corrupt":
                index = self._random.randrange(len(written))
                written[index] = self._corrupted(written[index])
            case "half":
                written = written[: (len(written) + 1) // 2]
                written[-1] = Copy(written[-1].source[: -(-written[-1].source.nbytes // 2)], written[-1].offset)
        return [lambda: self._fabric.write(region, written)]

    def _corrupted(self, copy: Copy) -> Copy:
        source = np.array(copy.source)
        source[self._random.randrange(source.nbytes)] ^= 1 << self._random.randrange(8)
        return Copy(source, copy.offset)


class _FaultyWrite:
    def __init__(self, stages: list[Callable[[], Write]], ready_at: float, clock: Clock, *, fails: bool) -> None:
        self._stages = stages
        self._ready_at = ready_at
        self._clock = clock
        self._fails = fails
        self._current: Write | None = None

    def done(self) -> bool:
        if self._clock.monotonic() < self._ready_at:
            return False
        while True:
            if self._current is not None and not self._current.done():
                return False
            self._current = None
            if not self._stages:
                break
            self._current = self._stages.pop(0)()
        if self._fails:
            raise TransferError("injected fault: the write failed halfway")
        return True

    def cancel(self) -> None:
        """Skip the writes that haven't started."""
        self._stages.clear()
        self._ready_at = 0.0
        if self._current is not None:
            self._current.cancel()
