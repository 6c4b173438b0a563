"""What a stage reads of a checkpoint, beside what follows from its config."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tests.support.checkpoints import load_adapter
from triptych.checkpoint.outline import META, Outline
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.encoder import ModelAdapter
from triptych.layers.linear import WEIGHT_FORMATS, PlainFormat

FP32 = WEIGHT_FORMATS["float32"]


class Counted(Checkpoint):
    """Counts the bytes of the tensors that are read, each once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen = set[str]()

    def num_bytes(self) -> int:
        return sum(self.info(key).num_bytes for key in self.seen)

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        names = list(keys)
        self.seen.update(names)
        return super().read(names)


def check_outline(folder: Path) -> None:
    """Each stage reads as many bytes as follow from the folder's config alone."""
    adapter: ModelAdapter = load_adapter(folder)
    stored = Counted(folder).tensors
    stages = ["encoder", "decoder"] if adapter.encoder_keys(stored) else ["decoder"]
    for stage in stages:
        real, outline = Counted(folder), Outline(folder)
        getattr(adapter, f"load_{stage}")(real, FP32, torch.device("cpu"))
        getattr(adapter, f"load_{stage}")(outline, PlainFormat(torch.float32), META)
        assert sum(info.num_bytes for info in outline.tensors.values()) == real.num_bytes() > 0
