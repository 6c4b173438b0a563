"""A profile: what a model's work costs on a machine. ``triptych profile`` writes it as JSON, and plans and simulations
read it.

All times are in seconds, sizes in bytes. A cost is measured with nothing else at work, on cores of its own;
``Interference`` says what changes when two stages work at once.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.costs.forms import Form, Name, NotNegative
from triptych.errors import ConfigError
from triptych.messages.identity import ModelIdentity

VERSION = 1
MAX_BYTES = 16 * 2**20
"""Largest profile that is read."""
MAX_ENTRIES = 4096
MAX_PAGES = 2**22
"""Pages of a simulated instance's KV cache."""

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1, le=2**24)]
Rows = Annotated[int, Meta(ge=0, le=2**24)]
Bytes = Annotated[int, Meta(ge=0, le=2**40)]
Pixels = Annotated[int, Meta(ge=1, le=2**20)]
Parts = Annotated[int, Meta(ge=0, le=2**12)]
Threads = Annotated[int, Meta(ge=1, le=2**16)]
Stage = Literal["preprocess", "encode", "prefill", "decode", "frontend"]
STAGES: tuple[Stage, ...] = ("preprocess", "encode", "prefill", "decode", "frontend")


class Quartiles(Struct, frozen=True, forbid_unknown_fields=True):
    """The spread of repeated measurements."""

    low: NotNegative
    """First quartile."""
    median: NotNegative
    high: NotNegative
    """Third quartile."""
    count: Positive


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured at one place."""

    values: Annotated[dict[Name, NotNegative], Meta(max_length=16)]
    """The value of each variable."""
    seconds: Quartiles


class FitError(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a form is from the medians of points, relative to them: 0.1 is 10 %."""

    median: NotNegative
    largest: NotNegative
    left_out: NotNegative
    """Median over the points of the error at a point that a fit without it makes."""


class Cost(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of work: points, and the form fitted to their medians."""

    form: Form
    error: FitError
    noise: NotNegative
    """Median over the points of half the distance between quartiles, relative to the median. For a normal distribution
    the standard deviation is 1.48 times that."""
    points: Annotated[tuple[Point, ...], Meta(max_length=MAX_ENTRIES)]

    def seconds(self, **values: float) -> float:
        """Return the seconds for values of the form's variables."""
        return self.form.seconds(values)


class AtThreads(Struct, frozen=True, forbid_unknown_fields=True):
    """A cost with that number of compute threads."""

    threads: Threads
    cost: Cost


@dataclass(frozen=True)
class BetweenThreads:
    """A cost with a number of threads between two that were measured: logarithms of seconds are on a line over those
    of threads."""

    fewer: Cost
    more: Cost
    share: float
    """How far it is from ``fewer`` to ``more``, 0 to 1."""

    @property
    def noise(self) -> float:
        return max(self.fewer.noise, self.more.noise)

    def seconds(self, values: Mapping[str, float]) -> float:
        """Return the seconds for values of the forms' variables."""
        seconds = self.fewer.form.seconds(values)
        if self.share and seconds:
            seconds *= (self.more.form.seconds(values) / seconds) ** self.share
        return seconds


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    """What an image of a size becomes."""

    width: Pixels
    height: Pixels
    tokens: Rows
    """In the prompt, all of the item's: markers as well as rows."""
    rows: Rows
    """Embeddings that are sent to prefill."""
    patches: Rows
    """Inputs of the encoder, over all parts."""
    parts: Parts


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """The model that was measured."""

    name: str
    """The last part of its path."""
    identity: ModelIdentity
    takes_media: bool
    kv_rows_per_token: Rows
    """Rows that prefill sends to decode, over all layers."""
    kv_row_bytes: Bytes
    embedding_row_bytes: Bytes
    context_length: Tokens
    vocab_size: Tokens
    num_layers: Positive
    page_size: Tokens
    """Tokens in a page of the KV cache."""
    weight_bytes: dict[str, Count]
    """By part: ``encoder`` and ``decoder``, as stored in the checkpoint."""


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """The machine that was measured."""

    cores: Threads
    processor: str
    memory_gib: NotNegative
    kernel: str
    python: str
    load_average: Annotated[tuple[NotNegative, ...], Meta(max_length=3)]
    """Before measuring, over 1, 5 and 15 minutes: with other work on the machine, costs are too high."""


class Interference(Struct, frozen=True, forbid_unknown_fields=True):
    """How much longer a stage takes while another works without pause in another process."""

    stage: Stage
    beside: Stage
    cores: Literal["own", "shared"]
    """``own``: each stage has cores of its own, and shares caches and memory bandwidth; ``shared``: both are pinned to
    the same core with one thread each."""
    threads: Threads
    """Compute threads of the stage, and of the one beside it."""
    slowdown: Quartiles
    """Ratio of seconds to those alone: 1 is no disturbance; 2 is what an equal share of one core gives."""


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of a model on a machine.

    Variables of the forms, which ``batch_values`` and ``step_values`` compute for batches and steps:

    - ``pixels`` of an image;
    - ``parts``, ``patches`` and ``pairs`` of an encoder batch: the last is the sum over parts of patches²;
    - ``tokens``, ``chunks`` and ``pairs`` of a step's prefill: the last is the sum over tokens of those attended to;
    - ``sequences`` that decode in a step, and ``context``, the sum over them of the tokens attended to; ``rows``, the
      sum of ``tokens`` and ``sequences``;
    - ``bytes`` of a transfer;
    - ``requests``, ``prompt_tokens``, ``items`` (images), ``media_bytes`` (of their files) and ``output_tokens`` of
      overheads.
    """

    kind: Literal["triptych-profile"]
    version: Literal[1]
    created: str
    """When, in ISO 8601."""
    triptych: str
    """Version of the program."""
    seconds: NotNegative
    """How long the profile took."""
    machine: Machine
    model: Model
    settings: dict[str, str | int | float | bool]
    """Engine and encode settings that costs depend on, by their names in TOML (``dtype``, ``quantization``,
    ``max_num_batched_tokens``, …)."""
    items: Annotated[tuple[Item, ...], Meta(max_length=MAX_ENTRIES)]
    """What images of several sizes become, in increasing pixels; empty for text models."""
    preprocess: Annotated[dict[Name, Cost], Meta(max_length=64)]
    """By format (``png``, ``jpeg``, …): a worker's seconds for an image of ``pixels``, hand-over included."""
    encode: Annotated[tuple[AtThreads, ...], Meta(max_length=64)]
    """Seconds on the compute thread of a batch of ``parts``, ``patches``, ``pairs``. Empty for text models."""
    steps: Annotated[tuple[AtThreads, ...], Meta(max_length=64)]
    """Seconds on the compute thread of a language engine's step of ``rows``, ``tokens``, ``chunks``, ``pairs``,
    ``sequences``, ``context``: prefill alone, decode alone, and both."""
    step_overhead: Cost
    """Seconds of the loop between two steps, in which the compute thread waits, by ``sequences`` and ``chunks``."""
    request_overhead: Annotated[dict[Stage, Cost], Meta(max_length=16)]
    """By stage, seconds of an instance's loop per request, besides steps and what comes between two: ``prefill`` by
    ``requests`` and ``prompt_tokens``; and per image besides its batch and its preprocessing: ``encode`` by
    ``items``. A stage that isn't there wasn't measured."""
    frontend: Cost
    """Processor seconds of the frontend for ``requests`` with ``prompt_tokens``, ``items``, ``media_bytes`` and
    ``output_tokens``."""
    transfers: Annotated[dict[Name, dict[Name, Cost]], Meta(max_length=16)]
    """By fabric (``shm``, ``tcp``, …) and by kind of rows (``kv``, ``embeddings``): seconds from the offer until all of
    ``bytes`` have landed. A fabric that can't be used here is missing."""
    hop: Quartiles
    """Seconds of a message one way between two processes of a service."""
    interference: Annotated[tuple[Interference, ...], Meta(max_length=MAX_ENTRIES)]

    def encode_at(self, threads: int) -> BetweenThreads:
        """Return the encoder's cost with a number of threads; beyond those that were measured, with the nearest.
        Raises ConfigError for a model without encoder."""
        return _at(self.encode, threads, f"{self.model.name} has no encoder")

    def steps_at(self, threads: int) -> BetweenThreads:
        """Return the cost of steps with a number of threads; beyond those that were measured, with the nearest."""
        return _at(self.steps, threads, "the profile has no steps")

    def item(self, width: int, height: int) -> Item:
        """Return the measured image whose number of pixels is nearest. Raises ConfigError for a text model."""
        if not self.items:
            raise ConfigError(f"{self.model.name} takes no images")
        return min(self.items, key=lambda one: abs(one.width * one.height - width * height))

    def slowdown(self, stage: Stage, beside: Stage, *, shared: bool) -> float:
        """Return how many times as long a stage takes beside another: the median, or if the pair wasn't measured, 1
        on cores of its own and 2 on a shared one."""
        cores = "shared" if shared else "own"
        found = [one for one in self.interference if (one.stage, one.beside, one.cores) == (stage, beside, cores)]
        return found[0].slowdown.median if found else 2.0 if shared else 1.0

    def costs(self) -> Iterator[tuple[str, Cost]]:
        """Yield all costs with names, for reports and drawings."""
        yield from ((f"preprocess {name}", cost) for name, cost in self.preprocess.items())
        yield from ((f"encode, threads {one.threads}", one.cost) for one in self.encode)
        yield from ((f"step, threads {one.threads}", one.cost) for one in self.steps)
        yield "step overhead", self.step_overhead
        yield from ((f"request overhead, {stage}", cost) for stage, cost in self.request_overhead.items())
        yield "frontend", self.frontend
        for fabric, kinds in self.transfers.items():
            yield from ((f"transfer {kind}, {fabric}", cost) for kind, cost in kinds.items())


def batch_values(patches: Sequence[int]) -> dict[str, float]:
    """Return the variables of an encoder batch, given the patches of each of its parts."""
    return {"parts": len(patches), "patches": sum(patches), "pairs": sum(one * one for one in patches)}


def step_values(chunks: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Return the variables of a step, given each chunk's tokens and how many of its request's tokens come before. A
    chunk of one token counts as decoding."""
    values = dict.fromkeys(("tokens", "chunks", "pairs", "sequences", "context", "rows"), 0.0)
    for length, before in chunks:
        values["rows"] += length
        if length == 1:
            values["sequences"] += 1
            values["context"] += before + 1
        else:
            values["chunks"] += 1
            values["tokens"] += length
            values["pairs"] += length * before + length * (length + 1) / 2
    return values


class _Simulated(Struct, frozen=True):
    """The settings that simulations read."""

    max_num_seqs: Threads = 1
    max_num_batched_tokens: Tokens = 1
    page_size: Tokens = 16
    kv_cache_tokens: Annotated[int, Meta(ge=0, le=2**30)] = 0
    encode_batch_patches: Tokens = 1
    encode_latency_ms: Annotated[int, Meta(ge=1, le=10**9)] = 1
    decode_workers: Annotated[int, Meta(ge=0, le=2**12)] = 0
    encode_cache_mb: Annotated[int, Meta(ge=0, le=2**30)] = 0


class _Preamble(Struct, frozen=True):
    """What tells a profile from other JSON."""

    kind: Any = None
    version: Any = None


def read(path: Path) -> Profile:
    """Read a profile. Raises ConfigError, with the place in the file, for another file, a damaged one, and one of
    another version."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    return parse(content, str(path))


def parse(content: bytes, name: str) -> Profile:
    """Read a profile's JSON; ``name`` is for messages. Raises ConfigError as ``read`` does."""
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than a profile can be: {MAX_BYTES // 2**20} MiB")
    try:
        found = msgspec.json.decode(content, type=_Preamble)
        if found.kind != "triptych-profile":
            raise ConfigError(f"{name} is no profile: triptych profile MODEL --out FILE writes one")
        if found.version != VERSION:
            raise ConfigError(
                f"{name} has version {str(found.version)[:20]}, and this program reads {VERSION}: profile again"
            )
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is no valid profile: {error}") from None
    try:
        _check_settings(profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is no valid profile: settings: {error}") from None
    for what, cost in profile.costs():
        _check(cost, f"{name}: {what}")
    return profile


def write(profile: Profile, path: Path) -> None:
    """Write a profile as indented JSON, all of it or nothing. Raises ConfigError where that isn't possible."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None


def _at(costs: tuple[AtThreads, ...], threads: int, missing: str) -> BetweenThreads:
    if not costs:
        raise ConfigError(missing)
    ordered = sorted(costs, key=lambda one: one.threads)
    fewer = max((one for one in ordered if one.threads <= threads), key=lambda one: one.threads, default=ordered[0])
    more = next((one for one in ordered if one.threads >= threads), ordered[-1])
    share = math.log(threads / fewer.threads) / math.log(more.threads / fewer.threads) if more is not fewer else 0.0
    return BetweenThreads(fewer.cost, more.cost, share)


def _check_settings(profile: Profile) -> None:
    """Raise ValidationError for settings of other types than the product's, and for a cache that no machine has."""
    known = msgspec.convert(profile.settings, _Simulated)
    if (pages := (known.kv_cache_tokens or 4 * profile.model.context_length) // known.page_size) > MAX_PAGES:
        raise msgspec.ValidationError(f"a KV cache of {pages} pages is over the limit of {MAX_PAGES}")


def _check(cost: Cost, name: str) -> None:
    """Raise ConfigError for a form that can't be evaluated at the points."""
    for point in cost.points:
        if missing := cost.form.variables - point.values.keys():
            raise ConfigError(f"{name}: a point lacks {', '.join(sorted(missing))}")
        if not math.isfinite(cost.form.seconds(point.values)):
            raise ConfigError(f"{name}: the form isn't finite")
