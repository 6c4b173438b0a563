"""The vision tower on a GPU against the CPU's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import load_family
from tests.models.driving import random_input
from triptych.models.checkpoint import Checkpoint

IMAGES = [random_input((1, 4, 6), 1), random_input((1, 2, 2), 2), random_input((1, 8, 4), 3)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.5)], ids=str
)
def test_rows(checkpoint_folder: Callable[..., Path], gpu: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    build = pytest.importorskip("triptych.roles.build", reason="an instance's libraries aren't all installed")
    folder = checkpoint_folder()
    family, checkpoint = load_family(folder), Checkpoint(folder)
    expected = family.load_tower(checkpoint, torch.float32, torch.device("cpu")).encode(IMAGES)
    encoder = build.TowerEncoder(family.load_tower(checkpoint, dtype, gpu), dtype)
    for found, rows in zip(encoder(IMAGES), expected, strict=True):
        assert found.dtype == np.uint8
        values = torch.from_numpy(found).view(dtype).float()
        torch.testing.assert_close(values, rows, atol=tolerance, rtol=tolerance)
