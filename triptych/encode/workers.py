"""Preprocessing in sandboxed workers, so that a damaged or hostile file can only harm a worker's decoder."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.errors import DecodeFailed, InternalError
from triptych.models.base import EncoderInput, Parts, Preprocessor
from triptych.models.registry import family_of, resolve
from triptych.sandbox.child import Handler
from triptych.sandbox.protocol import Limits, WorkerSpec
from triptych.sandbox.workers import WorkerPool
from triptych.types import ItemPlan


class _Task(msgspec.Struct, frozen=True):
    """What is asked of a preprocessor besides its data."""

    plan: ItemPlan
    parts: Sequence[int] | None


class _PartHeader(msgspec.Struct, frozen=True):
    """An ``EncoderInput`` without its patches, which come as bulk."""

    name: str
    shape: tuple[int, int]
    """Shape of the patches, which are float32."""
    grid: tuple[int, int, int]
    tower: str
    layout: tuple[int, ...]


class PreprocessWorkers:
    """``models.base.Preprocessor`` that runs in ``number`` processes. May be called from up to ``number`` threads."""

    def __init__(self, folder: Path, number: int, limits: Limits) -> None:
        """Start the processes without waiting for them. Each loads the preprocessor of the checkpoint in ``folder``."""
        self.number = number
        spec = WorkerSpec("triptych.encode.workers:serve", str(folder), limits)
        self._workers = WorkerPool(spec, number, DecodeFailed)

    def wait_until_ready(self) -> None:
        """Wait until all processes are ready. Raises StartError when one can't start."""
        self._workers.wait_until_ready()

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield an item's parts, of these numbers; each is preprocessed when it is asked for.

        Raises what the family's preprocessor raises, and DecodeFailed when a worker dies while processing the item or
        exceeds its time or memory.
        """
        for payload, values in self._workers.results(msgspec.msgpack.encode(_Task(plan, parts)), data):
            header = msgspec.msgpack.decode(payload, type=_PartHeader)
            if values is None or len(values) != 4 * math.prod(header.shape):
                raise InternalError("a worker returned an invalid result")
            array = np.frombuffer(values, np.float32).reshape(header.shape)
            yield EncoderInput(array, header.grid, header.name, header.tower, header.layout)

    @property
    def pids(self) -> list[int]:
        return self._workers.pids

    def close(self) -> None:
        self._workers.close()


def serve(folder: str) -> Handler:
    """Return the handler that the workers run, for a checkpoint folder."""
    config, path = load_config(Path(folder)), Path(folder)
    family = family_of(config)
    preprocessor: Preprocessor = resolve(family.preprocessor or "")(
        config, load_preprocessor_config(path), load_video_config(path)
    )

    def handle(request: bytes, data: bytes) -> Iterator[tuple[bytes, Sequence[memoryview]]]:
        task = msgspec.msgpack.decode(request, type=_Task)
        for part in preprocessor(data, task.plan, task.parts):
            rows, values = part.patches.shape
            payload = msgspec.msgpack.encode(_PartHeader(part.name, (rows, values), part.grid, part.tower, part.layout))
            yield payload, [np.ascontiguousarray(part.patches, np.float32).data]

    return handle
