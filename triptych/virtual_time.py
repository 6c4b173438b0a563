"""Virtual time: a clock that is told to go on, and threads that are none.

Whatever is built on these does the same each time it is run: everything happens on one thread, in the order of time,
and of scheduling where times are equal.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from triptych.running_time import STILL_SECONDS

P = ParamSpec("P")
T = TypeVar("T")


class VirtualClock:
    """A ``Clock`` whose time passes from event to event. Its epoch is when it was 0."""

    def __init__(self, seconds: float = 100.0) -> None:
        self._time = seconds
        self._stood_still = 0.0
        """Seconds of it that don't count as running time."""
        self._worked = 0.0
        self._spent: float | None = None
        """Seconds that the job in progress has taken; None without one."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.monotonic() - self._stood_still

    def monotonic(self) -> float:
        return self._time + (self._spent or 0.0)

    def wall(self) -> float:
        return self.monotonic()

    def processor(self) -> float:
        return self._worked

    def work(self, seconds: float) -> None:
        """Count processor time that the process has used."""
        self._worked += seconds

    def sleep(self, seconds: float) -> None:
        """In a job: it takes that much longer. Elsewhere: the time passes."""
        if self._spent is not None:
            self._spent += seconds
        else:
            self.advance(seconds)

    def call_at(self, when: float, event: Callable[[], object]) -> None:
        """Have an event happen at a time of ``monotonic``; one that is past is now."""
        heapq.heappush(self._events, (max(when, self._time), next(self._numbers), event))

    def advance(self, seconds: float) -> None:
        """Let time pass, with the events in it."""
        self.run_until(self._time + seconds)

    def run_until(self, when: float) -> None:
        """Let time pass until then, with the events in it."""
        while self._events and self._events[0][0] <= when:
            self.step()
        self._time = max(self._time, when)

    def step(self) -> bool:
        """Go on to the next event. Returns False if there is none."""
        if not self._events:
            return False
        self._time, _, event = heapq.heappop(self._events)
        event()
        return True

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which the process is stopped: nothing happens, and little of it counts as running time."""
        self._time += seconds
        self._stood_still += max(0.0, seconds - STILL_SECONDS)

    def start_executor(self, threads: int, name: str, *, stack_bytes: int = 0, niceness: int = 0) -> Executor:
        """Return what runs jobs in virtual time. A ``StartExecutor``."""
        return _VirtualExecutor(self, threads)

    def run(self, job: Callable[[], T]) -> tuple[T, float]:
        """Run a job, which takes as long as it sleeps. Returns what it returns, and when it ends. One that begins
        within another, on another thread, begins at that one's present and takes none of its time."""
        outer = self._spent
        self._spent = outer or 0.0
        try:
            return job(), self.monotonic()
        finally:
            self._spent = outer


class _VirtualExecutor(Executor):
    """Runs each job at once when it begins; its result comes when it ends. So what it does besides is seen too early by
    what looks meanwhile, though with the right times."""

    def __init__(self, clock: VirtualClock, threads: int) -> None:
        self._clock = clock
        self._num_idle = threads
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, job: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        self._waiting.append((future, partial(job, *args, **kwargs)))
        self._begin()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what hasn't begun, if told to. What has goes on to its end."""
        while cancel_futures and self._waiting:
            self._waiting.popleft()[0].cancel()

    def _begin(self) -> None:
        while self._num_idle and self._waiting:
            future, job = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                self._num_idle -= 1
                self._run(future, job)

    def _run(self, future: "Future[Any]", job: Callable[[], Any]) -> None:
        def ended() -> Callable[[], None]:
            try:
                return partial(future.set_result, job())
            except Exception as error:  # noqa: BLE001 - it is the future's
                return partial(future.set_exception, error)

        end, when = self._clock.run(ended)
        self._clock.call_at(when, partial(self._end, end))

    def _end(self, end: Callable[[], None]) -> None:
        self._num_idle += 1
        end()
        self._begin()
