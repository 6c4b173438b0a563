"""The compute thread by itself."""

import threading
from collections.abc import Iterator

import pytest

from triptych import compute_thread
from triptych.compute_thread import ComputeThread


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
