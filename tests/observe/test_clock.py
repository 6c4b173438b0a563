"""Durations of requests while the wall clock is set."""

import time

import pytest
from prometheus_client import generate_latest

from triptych.clock import SystemClock
from triptych.observe.metrics import Metrics
from triptych.observe.request_history import view_of
from triptych.observe.requests import RequestRecord


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_changes_no_duration(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, record = Metrics(), RequestRecord("r", "POST", SystemClock())
    choice = record.begin_choice(3, [])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    metrics.received_tokens(choice, 1)
    metrics.received_tokens(choice, 1)
    choice.finish_reason = "stop"
    metrics.ended(choice)
    record.ended = record.now()
    view = view_of(record, record.ended)
    assert view.time_to_first_token is not None
    assert 0 <= view.time_to_first_token <= view.seconds < 5
    assert 0 <= record.seconds_spent < 5
    sums = {}
    for line in generate_latest(metrics.registry).decode().splitlines():
        if "seconds_sum" in line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums[name] = float(value)
    assert len(sums) == 4
    assert all(0 <= value < 5 for value in sums.values()), sums
