"""What stands for an instance's devices in virtual time: it takes as long as its work costs, and computes nothing.

Rows have no content: one byte stands for each.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from triptych.costs.profile import Stage
from triptych.engine.cache_rows import DeviceEvent
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.service import GrammarService
from triptych.engine.kv_rows import KVRun, TokenRows
from triptych.engine.page_tables import PageTables
from triptych.engine.runner import MediaEmbeddings, Runner, StepOutput
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk
from triptych.errors import InvalidRequest
from triptych.layers.cache_spec import CacheFormat, CacheSpec
from triptych.layers.decoder import AfterLayer
from triptych.layers.encoder import PreprocessedPart
from triptych.messages.rows import RegionHandle, RowKind
from triptych.models.base import EncoderInput, Parts, chosen
from triptych.simulate.costs import InstanceCosts, ServiceCosts
from triptych.simulate.machine import SharedMachine
from triptych.transfer.fabrics.base import CompletedWrite, Copy
from triptych.transfer.memory import Bytes, Memory
from triptych.types import ItemPlan
from triptych.virtual_time import VirtualClock

LAYERS = 2
"""Layers by which KV is sent: while the last one is sent, nothing is computed any more."""
TOKEN_ROWS = TokenRows([CacheSpec(1, (1, 1), CacheFormat("uint8", 1))] * LAYERS)
"""Rows of a token, of one byte each."""

Note = Callable[..., None]
"""Is told what happens."""


@dataclass
class WorkPace:
    """Makes an instance's work take its time."""

    clock: VirtualClock
    machine: SharedMachine
    process: str
    threads: int
    costs: InstanceCosts
    rng: random.Random
    note: Note
    speed: float = 1.0
    """Below 1 for a straggler."""

    def seconds(self, stage: Stage, seconds: float) -> float:
        """Return how long some work takes now, given its cost."""
        if self.costs.spread:
            seconds *= self.rng.lognormvariate(0.0, self.costs.spread)
        if stage == "preprocess":
            return self._on_machine(f"{self.process} workers", stage, 1, seconds)
        return self._on_machine(self.process, stage, self.threads, seconds)

    def in_loop(self, seconds: float) -> float:
        """Return how long the instance's loop takes for something, a frontend's kind of work. Compute threads that wait
        for their next work meanwhile keep their cores."""
        return self._on_machine(self.process, "frontend", self.threads, seconds) if seconds else 0.0

    def _on_machine(self, process: str, stage: Stage, threads: int, seconds: float) -> float:
        return self.machine.seconds(process, stage, threads, seconds / self.speed, self.clock.monotonic())


FIRST_TOKEN = SampledToken(0)
"""What is sampled always."""


class CostRunner(Runner):
    """Runs steps that take time. Every next token is the first of the vocabulary."""

    states = None

    def __init__(self, pace: WorkPace) -> None:
        self._pace = pace

    def job(
        self,
        chunks: Sequence[Chunk],
        media: MediaEmbeddings,
        sampling_inputs: Sequence[SamplingInput],
        after_layer: AfterLayer | None,
    ) -> Callable[[], StepOutput]:
        pace, work = self._pace, [(chunk.length, chunk.start) for chunk in chunks]
        pace.note("step", [(length, start + length) for length, start in work])
        pace.clock.sleep(pace.in_loop(pace.costs.gap(work)))
        prefills = any(length > 1 for length, _ in work)
        output = StepOutput([FIRST_TOKEN] * len(sampling_inputs))

        def run() -> StepOutput:
            stage: Stage = "prefill" if prefills else "decode"
            seconds = pace.seconds(stage, pace.costs.step(work))
            for layer in range(LAYERS):
                pace.clock.sleep(seconds / LAYERS)
                if after_layer is not None:
                    after_layer(layer)
            return output

        return run


class CostTower:
    """A tower that takes time. A part's patches are an array without values, whose second axis is its rows."""

    embedding_width = 1

    def __init__(self, pace: WorkPace) -> None:
        self._pace = pace

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[torch.Tensor]:
        patches = [len(part.patches) for part in inputs]
        pace = self._pace
        pace.note("batch", patches)
        pace.clock.sleep(pace.seconds("encode", pace.costs.batch(patches)))
        return [torch.zeros(part.patches.shape[1], 1, dtype=torch.uint8) for part in inputs]


_NOTHING = np.zeros((1, 1), np.float32)


class CostPreprocessors:
    """Preprocessors that take time. A part's name is its file's content with its number."""

    def __init__(self, pace: WorkPace, number: int) -> None:
        self._pace = pace
        self.number = number

    @property
    def pids(self) -> list[int]:
        return []

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        of_item = self._pace.costs.preprocess(plan)
        for number in chosen(plan, parts):
            patches = plan.parts[number].patches
            self._pace.clock.sleep(self._pace.seconds("preprocess", of_item * patches / plan.patches))
            shape = np.broadcast_to(_NOTHING, (patches, plan.rows_of(number)))
            name = f"{blake3(data).hexdigest()} {number}"
            yield EncoderInput(shape, (1, 1, patches), name, plan.parts[number].tower)

    def close(self) -> None:
        """Do nothing: there are no processes."""


class NoGrammars(GrammarService):
    """Grammars of a model without tokenizer."""

    def __init__(self) -> None: ...

    def start(self, text: str, end_tokens: frozenset[int], generated: Sequence[int] = ()) -> Matching:
        raise InvalidRequest("simulated answers follow no grammar")


class _Past:
    def query(self) -> bool:
        return True


class CostRows:
    """``CacheRows`` without content."""

    of_token = TOKEN_ROWS
    num_layers = LAYERS

    def event(self) -> DeviceEvent:
        return _Past()

    def read(self, runs: Iterable[KVRun], tables: PageTables, after: DeviceEvent) -> Iterator[tuple[int, Bytes]]:
        for run in runs:
            yield run.first_row, np.zeros((run.num_rows, 1), np.uint8)

    def read_state(self, slot: int, after: DeviceEvent) -> Bytes:
        raise AssertionError("simulated requests have no state")

    def read_event(self) -> DeviceEvent:
        return _Past()

    def write(self, run: KVRun, tables: PageTables, rows: Bytes) -> None:
        """Do nothing: rows have no content."""

    def write_state(self, slot: int, first_row: int, rows: Bytes) -> None:
        raise AssertionError("simulated requests have no state")

    def finish_writes(self) -> None:
        """Do nothing: nothing is written."""


class CostFabric:
    """A fabric that takes time, in the turn of the instance that sends, as copies into shared memory do."""

    name = "simulated"
    scope = ""
    checksums = False

    def __init__(
        self, clock: VirtualClock, costs: ServiceCosts, kind: RowKind, row_bytes: dict[RowKind, float]
    ) -> None:
        """``kind`` is that of the rows that this instance receives, and ``row_bytes`` what a row stands for."""
        self._clock = clock
        self._costs = costs
        self._kind = kind
        self._row_bytes = row_bytes
        self._num_regions = 0

    def register(self, memory: Memory) -> RegionHandle:
        self._num_regions += 1
        return RegionHandle(self.name, f"{self._kind.value} {self._num_regions}", memory.bytes.nbytes)

    def deregister(self, region: RegionHandle) -> None:
        """Do nothing: nothing is written to regions."""

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> CompletedWrite:
        kind = RowKind(region.location.split()[0])
        rows = sum(copy.source.nbytes for copy in copies)
        self._clock.sleep(self._costs.write(kind, round(rows * self._row_bytes[kind])))
        return CompletedWrite()

    def release(self, region: RegionHandle) -> None:
        """Do nothing: no region is opened."""

    def close(self) -> None:
        """Do nothing: no region is open."""
