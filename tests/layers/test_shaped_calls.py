"""Which calls are recorded, and that their outputs are those of calls that aren't. Here a recording launches its work
again; ``tests/gpu/test_tower.py`` records CUDA graphs."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import load_adapter
from tests.support.recordable import RECORDABLE, recordable_inputs
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.layers import shaped_calls
from triptych.layers.cuda_graphs import Record
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.shaped_calls import AGE, MAX_GRAPHS, MAX_ROWS, MAX_SHAPES, Call, ShapedCalls
from triptych.models.shared.encoder import recordable_calls

CPU = torch.device("cpu")


class Recorder:
    """Counts recordings, and replays, which write to the same tensors."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        self.recordings += 1
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def calls(record: Record | None) -> tuple[ShapedCalls[int], list[int]]:
    """Return calls that multiply by their shape, and the list of prepared shapes."""
    prepared: list[int] = []

    def prepare(shape: int) -> Call:
        prepared.append(shape)
        output = torch.empty(0)

        def call(rows: Tensor) -> list[Tensor]:
            return [torch.mul(rows, shape, out=output.resize_(rows.shape)), rows + shape]

        return call

    made = ShapedCalls(prepare)
    made.record = record
    return made, prepared


def test_outputs_are_those_of_each_input() -> None:
    recorder = Recorder()
    made, prepared = calls(recorder)
    inputs = torch.arange(24.0).view(4, 3, 2)
    outputs = [made(3, rows) for rows in inputs]
    for rows, (product, total) in zip(inputs[1:], outputs[1:], strict=True):
        assert torch.equal(product, rows * 3)
        assert torch.equal(total, rows + 3)
    assert prepared == [3]
    assert (recorder.recordings, recorder.replays) == (1, 3)


def test_without_a_recorder_nothing_is_recorded() -> None:
    made, prepared = calls(None)
    for _ in range(4):
        made(3, torch.ones(2, 2))
    assert made.num_recorded == 0
    assert prepared == [3]


@pytest.mark.parametrize("rows", [0, MAX_ROWS + 1])
def test_inputs_that_gain_nothing_are_not_recorded(rows: int) -> None:
    made, _ = calls(Recorder())
    for _ in range(4):
        made(3, torch.ones(rows, 1))
    assert made.num_recorded == 0


def test_more_frequent_shapes_take_the_graphs() -> None:
    recorder = Recorder()
    made, _ = calls(recorder)
    for shape in range(MAX_GRAPHS):
        for _ in range(3 + shape):
            made(shape, torch.ones(1, 1))
    assert recorder.recordings == MAX_GRAPHS
    for _ in range(5):
        made(100, torch.ones(1, 1))
    assert recorder.recordings == MAX_GRAPHS  # shape 0 was used three times
    made(100, torch.ones(1, 1))
    assert (recorder.recordings, made.num_recorded) == (MAX_GRAPHS + 1, MAX_GRAPHS)
    before = recorder.replays
    made(0, torch.ones(1, 1))
    assert recorder.replays == before
    made(1, torch.ones(1, 1))
    assert recorder.replays == before + 1


def test_shapes_that_take_turns_are_not_recorded_again_and_again() -> None:
    recorder = Recorder()
    made, _ = calls(recorder)
    for _ in range(20):
        for shape in range(MAX_GRAPHS + 4):
            made(shape, torch.ones(1, 1))
    assert recorder.recordings == MAX_GRAPHS


@pytest.mark.parametrize("shapes", [2 * MAX_GRAPHS, 2 * MAX_SHAPES])
def test_nor_are_shapes_that_come_at_random(shapes: int) -> None:
    recorder = Recorder()
    made, _ = calls(recorder)
    draw = random.Random(0)
    for _ in range(3000):
        made(draw.randrange(shapes), torch.ones(1, 1))
    assert MAX_GRAPHS <= recorder.recordings < 5 * MAX_GRAPHS
    assert recorder.replays > 3000 * MAX_GRAPHS // shapes // 2


def test_shapes_of_a_new_load_take_the_graphs_of_the_last_one() -> None:
    recorder = Recorder()
    made, _ = calls(recorder)
    for load in range(2):
        for _ in range(20 * AGE):
            for shape in range(MAX_GRAPHS):
                made(100 * load + shape, torch.ones(1, 1))
        assert recorder.recordings == (1 + load) * MAX_GRAPHS


def test_the_least_recent_shape_is_forgotten() -> None:
    made, prepared = calls(None)
    for shape in range(MAX_SHAPES):
        made(shape, torch.ones(1, 1))
    made(0, torch.ones(1, 1))
    made(MAX_SHAPES, torch.ones(1, 1))
    assert prepared == list(range(MAX_SHAPES + 1))
    made(0, torch.ones(1, 1))
    made(1, torch.ones(1, 1))
    assert prepared[MAX_SHAPES + 1 :] == [1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_without_recordings_calls_go_on(caplog: pytest.LogCaptureFixture, error: type[Exception]) -> None:
    def record(work: Callable[[], object]) -> Callable[[], object]:
        raise error("none")

    made, _ = calls(record)
    for _ in range(4):
        product, _ = made(3, torch.ones(2, 2))
        assert torch.equal(product, torch.full((2, 2), 3.0))
    assert [one.name for one in caplog.records] == [shaped_calls.__name__]


@pytest.mark.parametrize("name", RECORDABLE)
def test_recorded_towers(tmp_path: Path, name: str) -> None:
    """Rows are those of towers that aren't recorded."""
    folder = make_tiny(tmp_path, name)
    adapter, checkpoint = load_adapter(folder), Checkpoint(folder)
    plain, recorded = (adapter.load_encoder(checkpoint, WEIGHT_FORMATS["float32"], CPU) for _ in range(2))
    recorder = Recorder()
    [made] = recordable_calls(recorded)
    made.record = recorder
    for seed in range(3):
        inputs = recordable_inputs(plain, seed)
        for found, expected in zip(recorded.encode(inputs), plain.encode(inputs), strict=True):
            assert torch.equal(found, expected)
    assert (recorder.recordings, recorder.replays) == (1, 2)
