"""Measures a model on this machine, part by part, and fits a form to each."""

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from triptych import __version__, running_time
from triptych.checkpoint.config_files import load_config
from triptych.clock import SystemClock
from triptych.config import InstanceSpec, ServeConfig
from triptych.costs.fitting import fitted, linear, quartiles
from triptych.costs.forms import Factor
from triptych.costs.profile import (
    AtThreads,
    Cost,
    Interference,
    Item,
    Machine,
    Model,
    Point,
    Profile,
    Quartiles,
    Stage,
)
from triptych.errors import StartError
from triptych.measure.machine import machine
from triptych.measure.profile.frontend import FrontendCosts, measure_frontend
from triptych.measure.profile.plan import BATCH_TERMS, FORMATS, FRONTEND_TERMS, STEP_TERMS, ProfilePlan
from triptych.measure.profile.process import StageProcess
from triptych.measure.profile.work import (
    DecodeGaps,
    Facts,
    Image,
    ItemGaps,
    ItemSizes,
    Plans,
    PreprocessWork,
    RequestGaps,
    Timed,
    Work,
)
from triptych.measure.transfer.ends import Pair, Payload, PoolSpec
from triptych.measure.transfer.measure import FABRICS
from triptych.messages.channel import Channel
from triptych.models.registry import family_of, identity_of
from triptych.topology import Role, Topology
from triptych.types import Address

Show = Callable[[str], None]
"""Shows a line of progress."""
SETTINGS = (
    "dtype", "quantization", "encoder_quantization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens",
    "page_size", "encode_batch_patches", "encode_latency_ms", "decode_workers",
)  # fmt: skip
"""Those that costs, or what they are multiplied with, depend on."""
PINGS = 50
GAP_STEPS, GAP_RUNS, GAP_REQUESTS, GAP_ITEMS = 24, 3, 8, 8


@dataclass
class ProfileBench:
    """Measures one model. Its parts may be called in any order, but once each."""

    config: ServeConfig
    name: str
    """The model's name in requests."""
    plan: ProfilePlan
    show: Show
    cores: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    skipped: list[str] = field(default_factory=list)
    """What couldn't be measured, and why."""

    def __post_init__(self) -> None:
        self._family = family_of(load_config(self.config.model))
        self._began = time.monotonic()

    def run(self) -> Profile:
        """Measure everything. Raises StartError when the model can't be loaded or its requests fail."""
        before = machine()
        counts = sorted({1, max(1, len(self.cores) // 2), len(self.cores)})
        parts = []
        with ExitStack() as stack:
            sink = Sink(stack)
            for threads in counts:
                parts.append(self._alone(threads, sink, whole=threads == counts[0]))
        alone = parts[0]
        assert alone.step_overhead is not None
        transfers, hop = self._transfers(alone.facts)
        frontend = self._frontend()
        interference = tuple(self._interference())
        items = tuple(
            Item(
                image.width,
                image.height,
                frontend.item_tokens.get((image.width, image.height), sizes.rows),
                sizes.rows,
                sizes.patches,
                sizes.parts,
            )
            for image, sizes in alone.items
        )
        return Profile(
            kind="triptych-profile",
            version=1,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            triptych=__version__,
            seconds=time.monotonic() - self._began,
            machine=Machine(**before),
            model=self._model(alone.facts),
            settings=self._settings(alone.facts),
            items=items,
            preprocess=alone.preprocess,
            encode=tuple(AtThreads(one.threads, one.encode) for one in parts if one.encode is not None),
            steps=tuple(AtThreads(one.threads, one.steps) for one in parts),
            step_overhead=alone.step_overhead,
            request_overhead=alone.request_overhead,
            frontend=fitted(frontend.points, FRONTEND_TERMS),
            transfers=transfers,
            hop=hop,
            interference=interference,
        )

    # ── one instance alone ───────────────────────────────────────────────────────────────────────────────────

    def _spec(self, threads: int, num_instances: int = 1) -> InstanceSpec:
        role = Role.EPD if self._family.takes_media else Role.PD
        config = replace(self.config, engine=replace(self.config.engine, threads=threads))
        return config.instances(Topology(((role, num_instances),)), "127.0.0.1:1")[0]

    def _alone(self, threads: int, sink: "Sink", *, whole: bool) -> "_Alone":
        """Measure an instance with these threads; with ``whole``, also what doesn't depend on them."""
        self._next(f"loading the model, {threads} thread{'s' * (threads > 1)}")
        # where the threads are fewer than the cores, they have cores of their own, as beside other instances
        with StageProcess(self._spec(threads), frozenset(self.cores), sink.address) as process:
            facts = process.wait()
            found = _Alone(threads, facts, self._steps(process, facts))
            if self._family.takes_media:
                found.encode, largest = self._batches(process)
                if whole:
                    images = [image for image in self.plan.images() if image.pixels <= largest]
                    sizes: list[ItemSizes] = process.ask(Plans(tuple(images)))
                    found.items = list(zip(images, sizes, strict=True))
                    found.preprocess = self._preprocess(process, images)
            if whole:
                found.step_overhead, found.request_overhead = self._overheads(process, sink)
            return found

    def _steps(self, process: StageProcess, facts: Facts) -> Cost:
        self._next("steps: prefill, decode, and both")
        works = self.plan.steps(facts.max_tokens, self.config.engine.max_num_seqs)
        return fitted(list(self._points(process, works)), STEP_TERMS)

    def _batches(self, process: StageProcess) -> tuple[Cost, int]:
        """Return the encoder's cost, and the pixels of the largest image that isn't too slow."""
        self._next("encoder batches")
        points, largest = list[Point](), 0
        for batch in self.plan.batches():
            points += self._points(process, iter([batch]))
            largest = max(largest, *(image.pixels for image in batch.images))
            if points[-1].seconds.median > self.plan.slow:
                break
        return fitted(points, BATCH_TERMS), largest

    def _preprocess(self, process: StageProcess, images: list[Image]) -> dict[str, Cost]:
        self._next("preprocessing")
        return {
            name: fitted(
                list(self._points(process, (PreprocessWork(replace(image, format=of)) for image in images))),
                linear("pixels"),
            )
            for name, of in FORMATS.items()
        }

    def _points(self, process: StageProcess, works: Iterator[Work]) -> Iterator[Point]:
        for work in works:
            if (timed := process.measure(work, self.plan.repeats)) is not None:
                yield Point(timed.values, quartiles(timed.seconds))

    def _overheads(self, process: StageProcess, sink: "Sink") -> tuple[Cost, dict[Stage, Cost]]:
        self._next("the loops of engine and encoder")
        points = []
        for count in [one for one in self.plan.sequences if one <= self.config.engine.max_num_seqs]:
            gaps: list[float] = process.ask(DecodeGaps(count, GAP_STEPS, GAP_RUNS))
            points.append(Point({"sequences": count, "chunks": 0}, quartiles(gaps)))
            sink.drain()
        overhead = fitted(points, linear("sequences"))
        between, requests = overhead.seconds(sequences=0.0), []
        for tokens in (16, self.plan.chunks[-1]):
            gaps = process.ask(RequestGaps(tokens, GAP_REQUESTS))
            seconds = [max(0.0, gap - between) for gap in gaps]
            requests.append(Point({"requests": 1, "prompt_tokens": tokens}, quartiles(seconds)))
            sink.drain()
        found: dict[Stage, Cost] = {"prefill": fitted(requests, [(Factor("requests"),), (Factor("prompt_tokens"),)])}
        if self._family.takes_media:
            gaps = process.ask(ItemGaps(self.plan.images()[0], GAP_ITEMS))
            found["encode"] = fitted([Point({"items": 1}, quartiles(gaps))], [(Factor("items"),)])
            sink.drain()
        return overhead, found

    # ── between processes ────────────────────────────────────────────────────────────────────────────────────

    def _transfers(self, facts: Facts) -> tuple[dict[str, dict[str, Cost]], Quartiles]:
        widths = {"kv": facts.kv_row_bytes}
        if self._family.takes_media:
            widths["embeddings"] = facts.embedding_row_bytes
        found: dict[str, dict[str, Cost]] = {}
        hops: list[float] = []
        for fabric in FABRICS:
            self._next(f"transfers over {fabric}")
            try:
                with Pair(fabric) as pair:
                    hops = hops or [pair.ping() for _ in range(PINGS)]
                    found[fabric] = {kind: self._transfer(pair, row_bytes) for kind, row_bytes in widths.items()}
            except StartError as error:
                self.skipped.append(f"transfers over {fabric}: {error}")
        if not hops:
            raise StartError(f"no fabric works here: {'; '.join(self.skipped)}")
        return found, quartiles(hops)

    def _transfer(self, pair: Pair, row_bytes: int) -> Cost:
        points = []
        block_rows = self.config.engine.receive_block_rows
        for size in self.plan.bytes:
            payload = Payload(max(1, size // row_bytes), row_bytes // 2)
            pair.configure(payload, PoolSpec(-(-payload.rows // block_rows), block_rows))
            pair.transfer()
            landed = [pair.transfer().landed for _ in range(self.plan.transfers)]
            points.append(Point({"bytes": payload.num_bytes}, quartiles(landed)))
        return fitted(points, linear("bytes"))

    def _frontend(self) -> FrontendCosts:
        self._next("the frontend of a service")
        # one thread: the frontend's own cost doesn't depend on it, and others of the machine disturb it least
        config = self.config.having({"port": 0, "control_port": 0, "threads": 1})
        topology = "1EPD" if self._family.takes_media else "1PD"
        return running_time.run(measure_frontend(config, self.name, topology, self.plan))

    # ── stages beside each other ─────────────────────────────────────────────────────────────────────────────

    def _interference(self) -> Iterator[Interference]:
        """Measure each stage beside each, on cores of their own, if there are two, and on one core."""
        half = len(self.cores) // 2
        if half:
            own = frozenset(self.cores[:half]), frozenset(self.cores[half : 2 * half])
            yield from self._pairs("own", half, own)
        one = frozenset(self.cores[:1])
        yield from self._pairs("shared", 1, (one, one))

    def _pairs(
        self, cores: Literal["own", "shared"], threads: int, sets: tuple[frozenset[int], frozenset[int]]
    ) -> Iterator[Interference]:
        self._next(f"two stages at once, cores: {cores}")
        stages = self.plan.stages(takes_media=self._family.takes_media)
        try:
            with ExitStack() as stack:
                first, second = (stack.enter_context(StageProcess(self._spec(threads, 2), chosen)) for chosen in sets)
                first.wait()
                second.wait()
                for stage, work in stages.items():
                    for beside, other in stages.items():
                        alone = first.measure(work, self.plan.beside)
                        second.spin(other)
                        disturbed = first.measure(work, self.plan.beside)
                        second.measure(other, replace(self.plan.beside, least=1, most=1, warm_up=0))  # ends its loop
                        if alone is None or disturbed is None:
                            continue
                        yield Interference(stage, beside, cores, threads, _ratios(alone, disturbed))
        except StartError as error:
            self.skipped.append(f"two stages at once, cores: {cores}: {error}")

    # ── what was measured ────────────────────────────────────────────────────────────────────────────────────

    def _model(self, facts: Facts) -> Model:
        from triptych.checkpoint.reader import Checkpoint
        from triptych.server.model_bundle import ModelBundle

        bundle = ModelBundle(Checkpoint(Path(self.config.model)), self.config.engine)
        return Model(
            name=self.name,
            identity=identity_of(self.config.model),
            takes_media=self._family.takes_media,
            kv_rows_per_token=facts.kv_rows_per_token,
            kv_row_bytes=facts.kv_row_bytes,
            embedding_row_bytes=facts.embedding_row_bytes,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            num_layers=facts.num_layers,
            page_size=facts.page_size,
            weight_bytes=dict(bundle.adapter.weight_bytes_by_stage(bundle.checkpoint.tensors)),
        )

    def _settings(self, facts: Facts) -> dict[str, str | int | float | bool]:
        groups = self.config.engine, self.config.encode
        found = {name: getattr(group, name) for name in SETTINGS for group in groups if hasattr(group, name)}
        # no more than all requests can hold: a simulation keeps a record of each page
        most = self.config.engine.max_num_seqs * facts.context_length
        return found | {"kv_cache_tokens": min(facts.cache_tokens, most)}

    def _next(self, what: str) -> None:
        self.show(f"{time.monotonic() - self._began:4.0f} s  {what}")


@dataclass
class _Alone:
    """What an instance with some threads comes to."""

    threads: int
    facts: Facts
    steps: Cost
    encode: Cost | None = None
    items: list[tuple[Image, ItemSizes]] = field(default_factory=list)
    preprocess: dict[str, Cost] = field(default_factory=dict)
    step_overhead: Cost | None = None
    request_overhead: dict[Stage, Cost] = field(default_factory=dict)


class Sink:
    """Receives what the loops of measured instances send, and drops it."""

    def __init__(self, stack: ExitStack) -> None:
        self._channel = Channel(SystemClock())
        stack.callback(self._channel.close)
        self.address: Address = self._channel.address

    def drain(self) -> None:
        while self._channel.receive(0.0):
            pass


def _ratios(alone: Timed, disturbed: Timed) -> Quartiles:
    """Return the quartiles of times beside another stage, relative to the median alone."""
    median = max(statistics.median(alone.seconds), 1e-9)
    return quartiles([seconds / median for seconds in disturbed.seconds])
