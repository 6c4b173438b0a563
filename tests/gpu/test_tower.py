"""The vision tower on a GPU against the CPU's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import load_adapter
from tests.support.forward import random_input
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import CUDA_FORMATS, WEIGHT_FORMATS

IMAGES = [random_input((1, 4, 6), 1), random_input((1, 2, 2), 2), random_input((1, 8, 4), 3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.5)])
def test_rows(checkpoint_folder: Callable[..., Path], gpu: torch.device, dtype: str, tolerance: float) -> None:
    build = pytest.importorskip("triptych.server.build_encoder", reason="an instance's libraries aren't all installed")
    folder = checkpoint_folder()
    adapter, checkpoint = load_adapter(folder), Checkpoint(folder)
    expected = adapter.load_encoder(checkpoint, WEIGHT_FORMATS["float32"], torch.device("cpu")).encode(IMAGES)
    activations = CUDA_FORMATS[dtype].activations
    encoder = build.EncoderRunner(adapter.load_encoder(checkpoint, CUDA_FORMATS[dtype], gpu), activations)
    for found, rows in zip(encoder(IMAGES), expected, strict=True):
        assert found.dtype == np.uint8
        values = torch.from_numpy(found).view(activations).float()
        torch.testing.assert_close(values, rows, atol=tolerance, rtol=tolerance)
