"""Steps on a device that breaks for good, or that one request alone can't be computed on."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.clock import SystemClock
from triptych.compute_thread import ComputeThread
from triptych.config.injected_faults import InjectedFaults
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.step_batch import StepBatch
from triptych.engine.step_executor import StepExecutor, StepResult
from triptych.errors import InstanceBroken
from triptych.executor import started_executor
from triptych.layers.torch_device import TorchDevice
from triptych.server.faulty_device import FaultyDevice

NUM_REQUESTS = 8
BAD = "its prompt can't be computed"


class CountingRunner:
    """Counts its steps. One with the request ``bad`` raises."""

    states = None

    def __init__(self, bad: int | None = None) -> None:
        self.num_steps = 0
        self._bad = bad

    def job(self, chunks: Any, *_: object) -> Callable[[], str]:
        return partial(self._run, [chunk.request.id for chunk in chunks])

    def prepare(self, chunks: object) -> None: ...

    def _run(self, batch: list[int]) -> str:
        self.num_steps += 1
        if self._bad in batch:
            raise RuntimeError(BAD)
        return "output"


def chunk(number: int) -> Any:
    request = SimpleNamespace(id=number, wants_prompt_logprobs=False)
    return SimpleNamespace(request=request, length=1, start=0, samples=True, num_scored=0)


@pytest.fixture
def broken() -> list[InstanceBroken]:
    return []


@pytest.fixture
def compute(broken: list[InstanceBroken]) -> Iterator[ComputeThread]:
    thread = ComputeThread(started_executor(1, "compute"), SystemClock(), lambda: None, broken.append)
    yield thread
    thread.close()


def run(runner: Any, compute: ComputeThread) -> list[StepResult]:
    """All results of a step of eight requests, and of what is repeated of it."""
    executor, results = StepExecutor(runner, compute, SystemClock()), list[StepResult]()
    todo = [StepBatch([chunk(number) for number in range(NUM_REQUESTS)], MediaEmbeddings.none(4, torch.float32))]
    while todo:
        executor.start(todo.pop(), [], None)
        compute.submit(lambda: None).exception(10)  # the step before it has ended, too
        if (result := executor.collect()) is not None:
            results.append(result)
        if not executor.busy and (retry := executor.next_retry(lambda _: False)) is not None:
            todo.append(retry)
    return results


def test_a_broken_device_costs_one_job_and_no_request(compute: ComputeThread, broken: list[InstanceBroken]) -> None:
    device = FaultyDevice(TorchDevice(torch.device("cpu")), InjectedFaults(device=0.0), "pd0")
    compute.device, runner = device, CountingRunner()
    assert [str(one.output) for one in run(runner, compute)] == ["output"]
    device.break_now()
    assert run(runner, compute) == []
    assert len(broken) >= 1
    assert runner.num_steps == 1


def test_a_request_that_can_not_be_computed_is_found_where_the_device_answers(
    compute: ComputeThread, broken: list[InstanceBroken]
) -> None:
    compute.device = TorchDevice(torch.device("cpu"))
    results = run(CountingRunner(bad=5), compute)
    ended = {str(one.request.id): str(result.output) for result in results for one in result.chunks}
    assert ended == {str(number): BAD if number == 5 else "output" for number in range(NUM_REQUESTS)}
    assert broken == []


def test_devices_break_at_a_random_job_each_at_its_own() -> None:
    def jobs_until_broken(name: str) -> int:
        device = FaultyDevice(TorchDevice(torch.device("cpu")), InjectedFaults(device=0.1), name)
        for number in range(1000):
            try:
                device.begin_job()
            except RuntimeError:
                with pytest.raises(RuntimeError, match="CUDA error"):
                    device.ask()
                return number
        raise AssertionError("it never broke")

    assert len({jobs_until_broken(f"pd{number}") for number in range(8)}) > 3
