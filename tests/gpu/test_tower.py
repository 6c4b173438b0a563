"""The vision tower on a GPU against the CPU's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import load_adapter
from tests.support.forward import random_input
from tests.support.recordable import RECORDABLE, recordable_inputs
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.executor import started_executor
from triptych.layers.linear import CUDA_FORMATS, WEIGHT_FORMATS
from triptych.models.shared.encoder import recordable_calls

IMAGES = [random_input((1, 4, 6), 1), random_input((1, 2, 2), 2), random_input((1, 8, 4), 3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.5)])
def test_rows(checkpoint_folder: Callable[..., Path], gpu: torch.device, dtype: str, tolerance: float) -> None:
    runner = pytest.importorskip("triptych.encode.runner", reason="an instance's libraries aren't all installed")
    folder = checkpoint_folder()
    adapter, checkpoint = load_adapter(folder), Checkpoint(folder)
    expected = adapter.load_encoder(checkpoint, WEIGHT_FORMATS["float32"], torch.device("cpu")).encode(IMAGES)
    activations = CUDA_FORMATS[dtype].activations
    compute = runner.ComputeThread(started_executor(1, "compute"), SystemClock(), lambda: None)
    made = runner.EncoderRunner(adapter.load_encoder(checkpoint, CUDA_FORMATS[dtype], gpu), activations, compute)
    for found, rows in zip(made.encode(IMAGES), expected, strict=True):
        assert found.dtype == np.uint8
        values = torch.from_numpy(found).view(activations).float()
        torch.testing.assert_close(values, rows, atol=tolerance, rtol=tolerance)
    compute.close()


@pytest.mark.parametrize("name", RECORDABLE)
def test_recorded_towers(tmp_path: Path, gpu: torch.device, name: str) -> None:
    """In fp32, launched and replayed. Launching and replaying inputs of a known shape never wait for the GPU."""
    runner = pytest.importorskip("triptych.encode.runner", reason="an instance's libraries aren't all installed")
    folder = make_tiny(tmp_path, name)
    adapter, checkpoint = load_adapter(folder), Checkpoint(folder)
    on_cpu = adapter.load_encoder(checkpoint, WEIGHT_FORMATS["float32"], torch.device("cpu"))
    on_gpu = adapter.load_encoder(checkpoint, CUDA_FORMATS["float32"], gpu)
    [calls] = recordable_calls(on_gpu)
    for launched in (True, False):
        if not launched:
            runner.record_towers(on_gpu, gpu)
        for seed in range(4):
            inputs = recordable_inputs(on_cpu, seed)
            if seed == 3:
                torch.cuda.set_sync_debug_mode("error")
            try:
                found = on_gpu.encode(inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for rows, expected in zip(found, on_cpu.encode(inputs), strict=True):
                torch.testing.assert_close(rows.cpu(), expected, atol=1e-3, rtol=1e-3)
        assert (calls.num_recorded == 0) == launched
