"""``bench.first_token`` measures each part of a stage, or refuses to divide it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.first_token import IN_ONE_CALL, check, in_encode, in_prefill, in_preprocess, measured
from tests.support.checkpoints import make_checkpoint
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.layers import native
from triptych.server.model_bundle import ModelBundle

REST = "norms, rotation, activations and sums of layers"


@pytest.mark.skipif(native.library() is None, reason="it measures compiled kernels")
def test_all_parts_are_measured(tmp_path: Path) -> None:
    """Also where one call runs all layers, as this decoder's."""
    torch.set_num_threads(1)
    model = ModelBundle(Checkpoint(make_checkpoint(tmp_path)), EngineConfig(device="cpu", dtype="float32", threads=1))
    with torch.inference_mode():
        preprocess, part = in_preprocess(model, 2)
        encode, rows = in_encode(model, part, 2)
        prefill = in_prefill(model, rows, 16, 2)
    assert {REST, "mergers"} <= encode.keys()
    assert {REST, "head", IN_ONE_CALL} <= prefill.keys()
    products = {"products of layers", "attention of layers"}
    for parts, names in (
        (preprocess, {"decode the JPEG"}),
        (encode, products | {"mergers", "patch projection"}),
        (prefill, products | {"head"}),
    ):
        assert all(parts[name] > 0 for name in names)


def test_modules_that_are_not_called_are_refused() -> None:
    """Their time would be missing, and that of what remains wrong."""
    first, second = nn.Identity(), nn.Identity()
    with pytest.raises(SystemExit, match="layers: 1 calls of 2 modules"):
        measured(lambda: first(1), {"layers": [first, second]}, 1)
    assert measured(lambda: second(first(1)), {"layers": [first, second]}, 1).keys() == {"layers", "all"}


def test_negative_parts_are_refused() -> None:
    check({"products": 99.0, "rest": -4.0, IN_ONE_CALL: -20.0, "all": 100.0})
    with pytest.raises(SystemExit, match=r"rest: -68.2 of 120.9 ms"):
        check({"rest": -68.2, "all": 120.9})
