"""Models with random weights for ``bench/gpu.py``, without files."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.make_checkpoint import PRESETS
from tests.support.random_checkpoint import Sizes, model_config, weight_shapes
from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.engine.page_tables import PageTable
from triptych.engine.request import Request
from triptych.engine.sampler import SamplingInput
from triptych.messages.work import SamplingParams
from triptych.types import RequestId

MODELS = {
    "tiny": Sizes(
        hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocabulary=264, mrope_section=(4, 2, 2),
        vision_depth=3, vision_hidden=32, vision_heads=2, vision_intermediate=48, vision_positions=64, deepstack=(0, 2),
    ),
    "mid": PRESETS["mid"],
    "2b": Sizes(
        hidden=2048, layers=28, heads=16, kv_heads=8, intermediate=6144, vision_depth=24, vision_hidden=1024,
        vision_heads=16, vision_intermediate=4096, deepstack=(5, 11, 17),
    ),
    "8b": Sizes(
        hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12288, tied=False, vision_depth=27,
        vision_hidden=1152, vision_heads=16, vision_intermediate=4304, deepstack=(8, 16, 24),
    ),
}  # fmt: skip
"""``2b`` and ``8b``: sizes like those of the published models."""


class RandomCheckpoint(Checkpoint):
    """A checkpoint whose tensors are random and created on the device when they are read."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = Path("random")
        self.on_read = None
        self.quantization = None
        self._dtype, self._device = dtype, device
        name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
        self.tensors = {
            key: TensorInfo(self.folder, name, shape, torch.Size(shape).numel() * dtype.itemsize)
            for key, shape in weight_shapes(model_config(sizes)).items()
        }

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        return {key: self._random(self.info(key).shape) for key in keys}

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        fan_in = torch.Size(shape[1:]).numel()
        return torch.randn(shape, dtype=self._dtype, device=self._device) * fan_in**-0.5


def made_up(index: int, num_tokens: int, pages: Iterable[int]) -> Request:
    """Return a request with ``num_tokens`` tokens in these pages."""
    tokens = [(31 * index + place) % 200 for place in range(num_tokens)]
    positions = np.broadcast_to(np.arange(num_tokens, dtype=np.float64), (3, num_tokens))
    greedy = SamplingParams(max_tokens=1, temperature=0)
    request = Request(RequestId(str(index)), tokens, positions, num_tokens, [], greedy, frozenset())
    request.tables = [PageTable(pages=list(pages))]
    return request


def draws(requests: Iterable[Request]) -> list[SamplingInput]:
    return [SamplingInput(one.sampling, one.history, frozenset()) for one in requests]
