"""The compute thread by itself."""

import threading
from collections.abc import Iterator

import pytest

from triptych import compute_thread
from triptych.compute_thread import ComputeThread, started_executor


@pytest.fixture
def thread() -> Iterator[ComputeThread]:
    one = ComputeThread(lambda: None)
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
