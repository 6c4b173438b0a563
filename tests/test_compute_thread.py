"""The compute thread by itself."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from triptych import compute_thread
from triptych.clock import SystemClock
from triptych.compute_thread import ComputeThread
from triptych.errors import DecodeFailed, InstanceBroken
from triptych.executor import started_executor


@pytest.fixture
def thread() -> Iterator[ComputeThread]:
    one = ComputeThread(started_executor(1, "compute"), SystemClock(), lambda: None)
    yield one
    one.close()


def test_a_single_job_has_started_when_submit_returns(thread: ComputeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "START_TIMEOUT", 60.0)
    for _ in range(50):
        end = threading.Event()
        future = thread.submit(end.wait)
        assert future.running()
        end.set()
        assert future.result(10)


def test_submit_does_not_wait_for_a_job_behind_another(thread: ComputeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "START_TIMEOUT", 60.0)  # the test's own time runs out before
    end = threading.Event()
    first = thread.submit(end.wait)
    second = thread.submit(end.is_set)
    assert first.running()
    assert not second.running()
    end.set()
    assert second.result(10)


def test_a_job_counts_as_busy_while_it_runs(thread: ComputeThread) -> None:
    end = threading.Event()
    future = thread.submit(end.wait)
    times = [thread.busy_seconds for _ in range(1000)]
    assert times == sorted(times)
    assert times[-1] > times[0]
    end.set()
    assert future.result(10)
    thread.close()
    assert thread.busy_seconds == thread.busy_seconds >= times[-1]


def test_the_threads_of_an_executor_run_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started_executor(3, "early")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    together = threading.Barrier(3)
    assert sorted(executor.map(lambda _: together.wait(5), range(3))) == [0, 1, 2]
    executor.shutdown()


@dataclass
class AskedDevice:
    """A device of which each answer is the next of ``answers``, and otherwise a good one."""

    answers: list[Callable[[], object]] = field(default_factory=list)
    num_asked: int = 0

    def begin_job(self) -> None: ...

    def ask(self) -> None:
        self.num_asked += 1
        if self.answers:
            self.answers.pop(0)()


def fail(error: BaseException) -> None:
    raise error


@pytest.fixture
def broken() -> list[InstanceBroken]:
    """What the thread has reported."""
    return []


@pytest.fixture
def asking(broken: list[InstanceBroken]) -> Iterator[ComputeThread]:
    one = ComputeThread(started_executor(1, "compute"), SystemClock(), lambda: None, broken.append)
    one.device = AskedDevice()
    yield one
    one.close()


def test_a_device_is_asked_after_a_failure_that_may_be_its_own(asking: ComputeThread) -> None:
    device = asking.device = AskedDevice()
    assert asking.submit(lambda: 1).result(10) == 1
    for error in (DecodeFailed("an item's"), RuntimeError("anyone's")):
        assert asking.submit(fail, error).exception(10) is error
    assert device.num_asked == 1


def test_a_job_after_which_the_device_does_not_answer_says_so_first(
    asking: ComputeThread, broken: list[InstanceBroken]
) -> None:
    error = RuntimeError("illegal\nmemory access")
    asking.device = AskedDevice([lambda: fail(RuntimeError("illegal again"))])
    raised = asking.submit(fail, error).exception(10)
    assert broken == [raised]
    assert raised is not None
    assert raised.__cause__ is error
    assert "illegal again" in str(raised)
    assert "\n" not in str(raised)


def test_a_device_that_never_answers_is_stuck_and_delays_no_end(
    asking: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_thread, "ANSWER_TIMEOUT", 0.05)
    end = threading.Event()
    asking.device = AskedDevice([end.wait])
    assert not asking.is_stuck
    future = asking.submit(fail, RuntimeError("a job"))
    deadline = time.monotonic() + 10
    while not asking.is_stuck and time.monotonic() < deadline:
        time.sleep(0.005)
    assert asking.is_stuck
    asking.close()
    assert not future.done()
    end.set()
    assert isinstance(future.exception(10), RuntimeError), "an answer that comes late is one"


def test_it_is_asked_after_errors_of_other_threads(asking: ComputeThread, broken: list[InstanceBroken]) -> None:
    asking.ask(RuntimeError("good"))
    asking.device = AskedDevice([lambda: fail(RuntimeError("bad"))])
    with pytest.raises(InstanceBroken, match="bad"):
        asking.ask(RuntimeError("of a stream"))
    assert len(broken) == 1
