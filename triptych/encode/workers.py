"""Preprocessing in sandboxed workers: whatever a damaged or hostile file does to a decoder, it does it there."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.errors import DecodeFailed, InternalError
from triptych.models.base import EncoderInput, Preprocessor
from triptych.models.registry import family_of, resolve
from triptych.sandbox.child import Handler
from triptych.sandbox.protocol import Limits, WorkerSpec
from triptych.sandbox.workers import Workers
from triptych.types import ItemPlan


class _Patches(msgspec.Struct, frozen=True):
    """A tower input without its values, float32 of ``shape``."""

    name: str
    shape: tuple[int, int]
    grid: tuple[int, int, int]
    tower: str


class PreprocessWorkers:
    """Satisfies ``families.base.Preprocessor`` with a number of processes. May be called from as many threads."""

    def __init__(self, folder: Path, number: int, limits: Limits) -> None:
        """Starts the processes, each with the preprocessor of a checkpoint folder, and doesn't wait for them."""
        self.number = number
        spec = WorkerSpec("triptych.encode.workers:serve", str(folder), limits)
        self._workers = Workers(spec, number, DecodeFailed)

    def wait_until_ready(self) -> None:
        """Raises StartError when they can't run."""
        self._workers.wait_until_ready()

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """Part by part, each when it is asked for. Raises as the family's preprocessor does, and DecodeFailed when a
        worker dies of the item, or would take more time for a part, or more memory, than it may."""
        for about, values in self._workers.results(msgspec.msgpack.encode(plan), data):
            patches = msgspec.msgpack.decode(about, type=_Patches)
            if values is None or len(values) != 4 * math.prod(patches.shape):
                raise InternalError("a worker's result makes no sense")
            array = np.frombuffer(values, np.float32).reshape(patches.shape)
            yield EncoderInput(patches=array, grid=patches.grid, name=patches.name, tower=patches.tower)

    @property
    def pids(self) -> list[int]:
        return self._workers.pids

    def close(self) -> None:
        self._workers.close()


def serve(folder: str) -> Handler:
    """What the workers run."""
    config, path = load_config(Path(folder)), Path(folder)
    family = family_of(config)
    if "video" in family.modalities:
        import torch  # before memory is limited: importing it takes more address space than an item may

        torch.set_num_threads(1)
    preprocessor: Preprocessor = resolve(family.preprocessor or "")(
        config, load_preprocessor_config(path), load_video_config(path)
    )

    def handle(request: bytes, data: bytes) -> Iterator[tuple[bytes, Sequence[memoryview]]]:
        for part in preprocessor(data, msgspec.msgpack.decode(request, type=ItemPlan)):
            rows, values = part.patches.shape
            about = msgspec.msgpack.encode(_Patches(part.name, (rows, values), part.grid, part.tower))
            yield about, [np.ascontiguousarray(part.patches, np.float32).data]

    return handle
