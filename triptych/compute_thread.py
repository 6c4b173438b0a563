"""An instance's compute thread, which keeps the instance's loop responsive to messages.

All multi-core work runs on it, including loading. OpenMP keeps a thread team for every thread that has used it. If a
process has more OpenMP threads than cores, each synchronization in a step goes through the kernel (decision 3).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, Protocol, TypeVar

from triptych.clock import Clock
from triptych.errors import InstanceBroken
from triptych.job_faults import Culprit, culprit_of

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT = 0.01
"""Maximum seconds that ``submit`` waits for a job to start; only reached on a machine with other load."""
ANSWER_TIMEOUT = 1.0
"""Seconds within which a device must answer after a job has failed."""


class Device(Protocol):
    """What jobs compute on."""

    def begin_job(self) -> None:
        """Called before every job, which fails with what this raises."""

    def ask(self) -> None:
        """Compute a little, and wait for the result. Raises whatever keeps the device from it; may never return."""


class ComputeThread:
    """Runs jobs one at a time, in order. An instance with several stages submits one job at a time for each, so that
    they take turns on the same cores."""

    device: Device | None = None
    """Asked after each job that fails, unless it is known to be another's fault. None until there is one."""

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        on_done: Callable[[], None],
        on_broken: Callable[[InstanceBroken], None] = lambda _: None,
    ) -> None:
        """``executor`` has one thread, which is this one's.

        ``on_done`` is called on the compute thread after every job. ``on_broken`` is called on it when the device
        doesn't answer, before the end of the job that has failed, which then raises the same."""
        self._worked: tuple[float, float | None] = 0.0, None
        """Run time of the jobs that have ended, and when the running one began. Replaced as a whole, since another
        thread reads it."""
        self._asked: float | None = None
        """Since when the device owes an answer."""
        self._on_done = on_done
        self._on_broken = on_broken
        self._num_submitted = self._num_ended = 0  # each counted by one thread
        self._executor = executor
        self._clock = clock
        self._begun = threading.Event()

    @property
    def busy_seconds(self) -> float:
        """Total run time of all jobs so far, the running one included: one may take seconds."""
        ended, began = self._worked
        return ended if began is None else ended + self._clock.monotonic() - began

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a job, and wait until it has started if no other job is queued. Without the wait, the calling thread
        may occupy the core that the job needs, while other cores are idle."""
        alone, begun = self._num_submitted == self._num_ended, self._begun
        self._num_submitted += 1
        if alone:
            begun.clear()  # every other job has ended

        def timed() -> T:
            ended, began = self._worked[0], self._clock.monotonic()
            self._worked = ended, began
            begun.set()
            try:
                if self.device is not None:
                    self.device.begin_job()
                return job(*args, **kwargs)
            except Exception as error:
                if culprit_of(error) is Culprit.UNCLEAR:
                    self._ask(error)
                raise
            finally:
                self._worked = ended + self._clock.monotonic() - began, None

        future = self._executor.submit(timed)
        future.add_done_callback(self._end)
        if alone:
            begun.wait(START_TIMEOUT)
        return future

    def _end(self, _: "Future[Any]") -> None:
        self._num_ended += 1
        self._on_done()

    def ask(self, error: BaseException) -> None:
        """Ask the device after an error on another thread, once the queued jobs have ended. Waits for the answer for up
        to ``ANSWER_TIMEOUT``. Raises InstanceBroken if the device can't answer."""
        if self.device is None:
            return
        with suppress(TimeoutError):
            self.submit(self._ask, error).result(ANSWER_TIMEOUT)

    @property
    def is_stuck(self) -> bool:
        """Whether the device has owed an answer for longer than ``ANSWER_TIMEOUT``."""
        asked = self._asked
        return asked is not None and self._clock.now() - asked > ANSWER_TIMEOUT

    def close(self) -> None:
        """Drop the queued jobs, and wait for the running one to finish, unless the device is stuck."""
        self._executor.shutdown(wait=not self.is_stuck, cancel_futures=True)

    def _ask(self, error: BaseException) -> None:
        if self.device is None:
            return
        self._asked = self._clock.now()
        try:
            self.device.ask()
        except Exception as answer:  # noqa: BLE001 - whatever it is, the device doesn't compute
            reason = f"the device doesn't answer after a failed job: {_first_line(answer)}"
            broken = InstanceBroken(f"{reason} (the job: {_first_line(error)})")
            self._on_broken(broken)
            raise broken from error
        finally:
            self._asked = None


def _first_line(error: BaseException) -> str:
    """Return an error's first line: CUDA's have many."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
