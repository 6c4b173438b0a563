"""The parts of an instance that are measured, as the product builds them: engine, encoder, workers and loops."""

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.config import InstanceSpec
from triptych.costs.profile import batch_values, step_values
from triptych.encode.loop import EncodeLoop
from triptych.engine.loop import EngineLoop
from triptych.engine.request import Request, make_request
from triptych.engine.sampler import SamplingInput
from triptych.engine.scheduler import Chunk
from triptych.errors import StartError
from triptych.heap import keep_freed_memory, share_heap
from triptych.measure.load.pictures import picture
from triptych.measure.profile.work import (
    BatchWork,
    DecodeGaps,
    Facts,
    Image,
    ItemGaps,
    ItemSizes,
    Plans,
    PreprocessWork,
    Repeats,
    RequestGaps,
    StepWork,
    Timed,
    Work,
)
from triptych.messages.channel import Channel
from triptych.messages.work import MEDIA_PIECE_BYTES, Encode, Generate, MediaBytes, SamplingParams
from triptych.models.base import EncoderInput
from triptych.prompt.probe import probe_image
from triptych.server.build import build_instance
from triptych.server.components import Components
from triptych.server.model_bundle import ModelBundle
from triptych.types import Address, ItemPlan, RequestId, TransferId

Seconds = Callable[[], float]
"""Does work once, and returns the seconds that it took."""
DECODED = 5
"""A token that requests which decode have generated; any does."""
LOOP_PAUSE = 1.0
"""Most seconds that a loop waits for the end of a step."""
JPEG_QUALITY = 90


class Stages:
    """An instance that has no frontend."""

    def __init__(self, spec: InstanceSpec, sink: str) -> None:
        """Load the model. Messages of its loops go to the address ``sink``. Raises StartError and CheckpointError."""
        share_heap()
        torch.set_num_threads(spec.engine.threads)
        self._channel = Channel(SystemClock(), spec.cluster.cluster_host, secret=spec.cluster.secret())
        self._sink = Address(sink)
        try:
            self._model = ModelBundle(Checkpoint(Path(spec.model)), spec.engine)
            self._instance = build_instance(spec, model=self._model, channel=self._channel, clock=SystemClock())
        except BaseException:
            self._channel.close()
            raise
        torch.set_num_threads(1)  # as in an instance: the compute thread has its own number
        keep_freed_memory()
        built = self._instance.loop_builder
        assert isinstance(built, Components) and built.engine is not None, "the role has a decoder"
        self._core = built.engine.engine
        self._engine = next(loop for loop in self._instance.loops if isinstance(loop, EngineLoop))
        self._encode = next((loop for loop in self._instance.loops if isinstance(loop, EncodeLoop)), None)
        self._number = 0

    def __enter__(self) -> "Stages":
        return self

    def __exit__(self, *_: object) -> None:
        self._instance.compute.close()
        for loop in self._instance.loops:
            loop.close()
        self._instance.close_parts()
        self._channel.close()

    def facts(self) -> Facts:
        model, core = self._model, self._core
        pools = core.scheduler.cache.pools[: len(core.scheduler.cache.windows)]
        return Facts(
            context_length=core.context_length,
            vocab_size=core.vocab_size,
            num_layers=model.adapter.decoder_config.num_layers,
            page_size=model.page_size,
            kv_rows_per_token=model.kv_rows.in_all_layers,
            kv_row_bytes=model.kv_layout.row_bytes,
            embedding_row_bytes=model.row_layout.row_bytes,
            max_tokens=core.scheduler.max_num_batched_tokens,
            cache_tokens=model.page_size * min(pool.num_pages for pool in pools),
        )

    # ── pieces of work ───────────────────────────────────────────────────────────────────────────────────────

    def measure(self, work: Work, repeats: Repeats) -> Timed | None:
        """Return the times of work; None if it doesn't fit in the KV cache, or in the context."""
        if isinstance(work, StepWork) and not self._fits(work):
            return None
        with self.prepared(work) as (values, run):
            for _ in range(repeats.warm_up):
                run()
            found: list[float] = []
            ends = time.monotonic() + repeats.seconds
            while len(found) < repeats.least or (len(found) < repeats.most and time.monotonic() < ends):
                found.append(run())
        return Timed(values, found)

    @contextlib.contextmanager
    def prepared(self, work: Work) -> Iterator[tuple[dict[str, float], Seconds]]:
        """Yield the variables of work, and a function that does it."""
        match work:
            case StepWork(chunks):
                with self._requests(chunks) as made:
                    yield step_values(chunks), self._step(made)
            case BatchWork(images):
                inputs = [part for image in images for part in self._parts(image)]
                runner = self._encoder().runner
                yield batch_values([len(part.patches) for part in inputs]), self._timed(lambda: runner.encode(inputs))
            case PreprocessWork(image):
                yield {"pixels": image.pixels}, self._preprocess(image)

    def _timed(self, job: Callable[[], object]) -> Seconds:
        """Return a function that does a job on the compute thread, and returns the thread's seconds."""
        compute = self._instance.compute

        def run() -> float:
            before = compute.busy_seconds
            compute.submit(job).result()
            return compute.busy_seconds - before

        return run

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def _fits(self, step: StepWork) -> bool:
        cache, lengths = self._core.scheduler.cache, [length + before for length, before in step.chunks]
        empty = cache.new_tables()
        missing = [cache.missing(empty, tokens) for tokens in lengths]
        return max(lengths) < self._core.context_length and cache.fits([sum(one) for one in zip(*missing, strict=True)])

    @contextlib.contextmanager
    def _requests(self, chunks: Sequence[tuple[int, int]]) -> Iterator[list[Chunk]]:
        """Yield chunks of requests that hold pages for all of their tokens. What the pages hold doesn't matter."""
        cache, made = self._core.scheduler.cache, list[Chunk]()
        try:
            for length, before in chunks:
                request = self._request(length, before)
                request.tables = cache.new_tables()
                cache.allocate(request.tables, cache.missing(request.tables, length + before))
                made.append(Chunk(request, before, length))
            yield made
        finally:
            for chunk in made:
                cache.release(chunk.request.tables)

    def _request(self, length: int, before: int) -> Request:
        decodes = length == 1 and before > 0
        message = self._generate(before if decodes else before + length, 2)
        core = self._core
        return make_request(
            message,
            [DECODED] if decodes else [],
            core.context_length,
            core.vocab_size,
            core.length_rule,
            core.loras,
            step_tokens=core.scheduler.max_num_batched_tokens,
            has_second_weights=core.has_second_weights,
        )

    def _generate(self, prompt_tokens: int, max_tokens: int) -> Generate:
        """Return a text request that is new to the prefix cache."""
        self._number += 1
        random = np.random.default_rng(self._number)
        tokens = random.integers(0, self._core.vocab_size, prompt_tokens).tolist()
        positions = np.broadcast_to(np.arange(prompt_tokens, dtype="<f8"), (3, prompt_tokens)).tobytes()
        return Generate(
            request=RequestId(f"profile-{self._number}"),
            tokens=tokens,
            positions=positions,
            next_position=float(prompt_tokens),
            items=[],
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            eos_token_ids=[],
            reply_to=self._sink,
        )

    def _step(self, chunks: list[Chunk]) -> Seconds:
        core = self._core
        batch = core.runner.batch(chunks, core.no_media)
        inputs = [
            SamplingInput(chunk.request.sampling, chunk.request.history, chunk.request.end_token_ids, None)
            for chunk in chunks
        ]
        return self._timed(lambda: core.runner.run(batch, inputs))

    # ── media ────────────────────────────────────────────────────────────────────────────────────────────────

    def _encoder(self) -> EncodeLoop:
        if self._encode is None:
            raise StartError("the model takes no images")
        return self._encode

    def _plan(self, image: Image) -> ItemPlan:
        return self._model.planner.plan(probe_image(file_of(image)))

    def _parts(self, image: Image) -> list[EncoderInput]:
        return list(self._encoder().preprocessing.preprocessors(file_of(image), self._plan(image)))

    def _preprocess(self, image: Image) -> Seconds:
        file, plan, workers = file_of(image), self._plan(image), self._encoder().preprocessing.preprocessors

        def run() -> float:
            began = time.monotonic()
            for _ in workers(file, plan):
                pass
            return time.monotonic() - began

        return run

    # ── loops ────────────────────────────────────────────────────────────────────────────────────────────────

    def gaps(self, command: Any) -> Any:
        """Do what a command of the other kinds asks for."""
        match command:
            case DecodeGaps():
                return [self._decode_gap(command) for _ in range(command.runs)]
            case RequestGaps():
                return [self._request_gap(command.prompt_tokens) for _ in range(command.count)]
            case ItemGaps(image, count):
                return [
                    self._item_gap(Image(image.width, image.height, image.format, seed)) for seed in range(1, count + 1)
                ]
            case Plans(images):
                plans = [(self._plan(image), len(file_of(image))) for image in images]
                return [ItemSizes(plan.rows, plan.patches, plan.num_parts, size) for plan, size in plans]

    def _turn(self) -> None:
        self._channel.receive(LOOP_PAUSE)
        for loop in self._instance.loops:
            loop.advance()

    def _decode_gap(self, command: DecodeGaps) -> float:
        """Return the seconds between two steps, on average over a run of them."""
        engine, compute = self._engine, self._instance.compute
        messages = [self._generate(16, command.steps + 8) for _ in range(command.sequences)]
        for message in messages:
            engine.handlers[Generate](message)
        self._turn_now()
        requests = [request for request in engine.scheduler if request.id in {one.request for one in messages}]
        while min(request.num_generated for request in requests) < 2:
            self._turn()
        steps, began, busy = engine.num_steps, time.monotonic(), compute.busy_seconds
        while engine.num_steps < steps + command.steps:
            self._turn()
        seconds, spent = time.monotonic() - began, compute.busy_seconds - busy
        while not engine.idle:
            self._turn()
        return max(0.0, seconds - spent) / command.steps

    def _request_gap(self, prompt_tokens: int) -> float:
        engine, compute = self._engine, self._instance.compute
        message = self._generate(prompt_tokens, 1)
        began, busy = time.monotonic(), compute.busy_seconds
        engine.handlers[Generate](message)
        self._turn_now()
        while not engine.idle:
            self._turn()
        return max(0.0, time.monotonic() - began - (compute.busy_seconds - busy))

    def _item_gap(self, image: Image) -> float:
        loop, compute, file, plan = self._encoder(), self._instance.compute, file_of(image), self._plan(image)
        alone = min(self._preprocess(image)() for _ in range(2))
        self._number += 1
        transfer = TransferId(f"profile-{self._number}")
        began, busy = time.monotonic(), compute.busy_seconds
        loop.handlers[Encode](
            Encode(
                transfer, self._sink, self._sink, f"{self._number:064x}", plan, len(file), list(range(plan.num_parts))
            )
        )
        self._turn_now()
        for offset in range(0, len(file), MEDIA_PIECE_BYTES):
            loop.handlers[MediaBytes](MediaBytes(transfer, offset, file[offset : offset + MEDIA_PIECE_BYTES]))
        self._turn_now()
        while not loop.idle:
            self._turn()
        gap = time.monotonic() - began - (compute.busy_seconds - busy) - alone
        loop.sender.abort(transfer, "it was only measured")
        return max(0.0, gap)

    def _turn_now(self) -> None:
        for loop in self._instance.loops:
            loop.advance()


@lru_cache(maxsize=64)
def file_of(image: Image) -> bytes:
    """Return the image's file."""
    png = picture(image.seed, image.width, image.height)
    if image.format == "PNG":
        return png
    from PIL import Image as Pillow

    written = io.BytesIO()
    with Pillow.open(io.BytesIO(png)) as opened:
        opened.save(written, image.format, quality=JPEG_QUALITY)
    return written.getvalue()
