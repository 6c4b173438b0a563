"""A device that breaks for good, for tests of what an instance then does."""

import logging
import random
import threading

from triptych.compute_thread import Device
from triptych.config.injected_faults import InjectedFaults

log = logging.getLogger(__name__)


class FaultyDevice:
    """Wraps a device, which breaks at a random job, or at the next one once it is told to. From then on every job
    fails, and so does the device when it is asked, or it never answers."""

    def __init__(self, device: Device, faults: InjectedFaults, name: str) -> None:
        """``name`` differs between processes, so that they don't break at the same job."""
        self._device = device
        self._faults = faults
        self._random = random.Random(f"{faults.seed} {name}")
        self._breaks = False
        self.broken = False

    def break_now(self) -> None:
        """Break with the next job. May be called from a signal handler."""
        self._breaks = True

    def begin_job(self) -> None:
        """Raise RuntimeError if the device is broken, as CUDA's errors are in PyTorch."""
        if not self.broken and (self._breaks or self._random.random() < (self._faults.device or 0.0)):
            log.warning("injected fault: the device breaks")
            self.broken = True
        self._fail_if_broken()
        self._device.begin_job()

    def ask(self) -> None:
        """Raise RuntimeError if the device is broken, or never return; ask the wrapped one otherwise."""
        if self.broken and self._faults.hang:
            threading.Event().wait()
        self._fail_if_broken()
        self._device.ask()

    def _fail_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError("injected fault: CUDA error: an illegal memory access was encountered")
