"""Workloads that a few numbers describe: kinds of requests, and how they arrive. A seed makes the requests."""

import heapq
import math
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.errors import ConfigError
from triptych.workload.trace import BLOCK_TOKENS, MAX_TOKENS, TraceMedia, TraceRequest

MAX_FILE = 2**20
"""Largest description that is read, in bytes."""
NORMAL_90 = 1.2816
"""Standard deviations below which 90 % of a normal distribution are."""
MOST = {"images": 256, "frames": 2**14, "turns": 256}
"""Largest amounts of a kind's request or conversation."""
MOST_BEFORE = 20_000
"""Most conversations that begin before a workload does."""
BYTES_PER_PIXEL = 0.25
"""Size of a JPEG file, about."""

_Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Pixels = Annotated[int, Meta(ge=1, le=2**16)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Positive = Annotated[float, Meta(gt=0, le=10**9)]


class Amount(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole number that differs between requests: even between ``low`` and ``high`` or, with a ``median``, lognormal
    with 90 % of the values up to ``high``, and at least ``low``."""

    high: _Count
    low: _Count = 0
    median: _Count = 0

    def draw(self, rng: random.Random) -> int:
        if not self.median:
            return rng.randint(min(self.low, self.high), self.high)
        sigma = math.log(max(self.high, self.median) / self.median) / NORMAL_90
        drawn = self.median * math.exp(rng.gauss(0.0, sigma))
        return max(self.low, min(round(drawn), 4 * self.high))


class RequestKind(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of request. Numbers may be given as they are in place of an ``Amount``."""

    name: str = ""
    weight: _Positive = 1.0
    """How many of this kind come, relative to the others."""
    text: Amount | _Count = 64
    """Tokens of the prompt, besides media and what is shared."""
    answer: Amount | _Count = 64
    images: Amount | _Count = 0
    frames: Amount | _Count = 1
    """Frames of each item; more than one makes it a video."""
    sizes: Annotated[tuple[tuple[_Pixels, _Pixels], ...], Meta(min_length=1, max_length=64)] = ((448, 448),)
    """Width and height in pixels, of which each item has one."""
    shared: _Count = 0
    """Tokens that the prompt begins with, as others' of the kind do."""
    groups: Annotated[int, Meta(ge=1, le=10**6)] = 1
    """How many such beginnings there are."""
    repeated: _Share = 0.0
    """Share of the items that were in an earlier request."""
    turns: Amount | _Count = 1
    """Requests of a conversation: each has the texts and items of those before."""
    pause: _Positive = 10.0
    """Mean seconds between two turns of a conversation."""

    def __post_init__(self) -> None:
        """Raise ValueError for amounts that no request has."""
        for name, most in MOST.items():
            amount = getattr(self, name)
            largest = max(amount.low, amount.median, amount.high) if isinstance(amount, Amount) else amount
            if largest > most:
                raise ValueError(f"{name} of {largest} are over the limit of {most}")


class ArrivalPattern(Struct, frozen=True, forbid_unknown_fields=True):
    """How a mean rate is spread over time."""

    kind: Literal["poisson", "bursts", "diurnal"] = "poisson"
    period: Annotated[float, Meta(ge=0.01, le=10**9)] = 60.0
    """Seconds from one burst, or one day, to the next."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Share of a period in which there is a burst."""
    peak: Annotated[float, Meta(ge=1, le=100)] = 2.0
    """How many times the mean rate comes in a burst, or at noon."""

    @property
    def largest(self) -> float:
        """The largest ``factor``."""
        if self.kind == "poisson":
            return 1.0
        return min(self.peak, 1 / self.share if self.kind == "bursts" else 2.0)

    def factor(self, at: float) -> float:
        """Return the rate at a time, relative to the mean."""
        phase = at / self.period % 1.0
        if self.kind == "bursts":
            return self.largest if phase < self.share else self._between
        if self.kind == "diurnal":
            return 1.0 + (self.largest - 1.0) * math.sin(2 * math.pi * phase)
        return 1.0

    @property
    def _between(self) -> float:
        """The rate between bursts, relative to the mean."""
        return max(0.0, (1 - self.largest * self.share) / (1 - self.share))

    def times(self, rate: float, rng: random.Random, begin: float) -> Iterator[float]:
        """Yield times of arrivals without end, by a Poisson process of the rate that each time has."""
        at = begin
        while True:
            if self.kind == "bursts":
                yield (at := self._after(at, rng.expovariate(rate)))
                continue
            at += rng.expovariate(rate * self.largest)
            if self.kind == "poisson" or rng.random() * self.largest < self.factor(at):
                yield at

    def _after(self, at: float, seconds: float) -> float:
        """Return the time by which as much has come since ``at`` as comes in these seconds at the mean rate: found in a
        few steps, however long nothing comes between two bursts."""
        whole, phase = divmod(at, self.period)
        more, left = divmod(seconds, self.period)  # the mean rate comes in each whole period
        begin, burst = (whole + more) * self.period, self.share * self.period
        while True:
            end, factor = (burst, self.largest) if phase < burst else (self.period, self._between)
            if factor and left <= (end - phase) * factor:
                return begin + phase + left / factor
            left -= (end - phase) * factor
            begin, phase = (begin, end) if end < self.period else (begin + self.period, 0.0)


class RequestMix(Struct, frozen=True, forbid_unknown_fields=True):
    """A mix of kinds of requests."""

    kinds: Annotated[tuple[RequestKind, ...], Meta(min_length=1, max_length=64)]
    arrivals: ArrivalPattern = ArrivalPattern()
    clients: Annotated[int, Meta(ge=1, le=10**6)] = 8

    def requests(self, rate: float, number: int, seed: int) -> Iterator[TraceRequest]:
        """Yield that many requests, ``rate`` a second on average, in order of arrival. Conversations are in progress
        when they begin."""
        return _Maker(self, rate, seed).requests(number)


WORKLOADS = {
    "chat": RequestMix(
        kinds=(
            RequestKind(
                "chat",
                text=Amount(median=60, high=300, low=4),
                answer=Amount(median=120, high=400, low=1),
                shared=128,
                turns=Amount(low=1, high=4),
            ),
        )
    ),
    "pictures": RequestMix(
        kinds=(
            RequestKind(
                "picture",
                images=1,
                sizes=((448, 448), (640, 480), (1024, 768)),
                text=Amount(low=16, high=64),
                answer=Amount(low=16, high=64),
            ),
        )
    ),
    "documents": RequestMix(
        kinds=(
            RequestKind(
                "document",
                images=Amount(low=2, high=6),
                sizes=((896, 1152),),
                text=Amount(low=32, high=128),
                answer=Amount(median=128, high=384, low=16),
            ),
        )
    ),
    "mixed": RequestMix(
        kinds=(
            RequestKind("chat", text=Amount(median=60, high=300, low=4), answer=Amount(median=64, high=200, low=1)),
            RequestKind("picture", images=1, text=Amount(low=16, high=64), answer=Amount(low=16, high=64)),
        )
    ),
}
"""Those that have a name."""


def read_workload(path: Path) -> RequestMix:
    """Read a description in TOML. Raises ConfigError, with what is wrong, for another file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    if len(content) > MAX_FILE:
        raise ConfigError(f"{path} is larger than a workload's description can be: {MAX_FILE // 2**20} MiB")
    try:
        return msgspec.convert(tomllib.loads(content.decode()), RequestMix)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _drawn(amount: Amount | int, rng: random.Random) -> int:
    return amount.draw(rng) if isinstance(amount, Amount) else amount


class _Maker:
    """Makes the requests of one workload."""

    def __init__(self, workload: RequestMix, rate: float, seed: int) -> None:
        self._workload = workload
        self._rate = rate
        self._rng = random.Random(f"workload {seed}")
        self._num_blocks = 0
        self._num_items = 0
        self._shared: dict[tuple[int, int], tuple[int, ...]] = {}
        self._known: dict[int, list[TraceMedia]] = {}

    def requests(self, number: int) -> Iterator[TraceRequest]:
        """Yield requests; the turns of conversations wait until the arrivals have come as far."""
        later: list[tuple[float, int, Iterator[TraceRequest], TraceRequest]] = []
        made, rate = 0, self._rate / self._mean_turns()
        begin = -min(self._longest(), MOST_BEFORE / rate)
        for order, at in enumerate(self._workload.arrivals.times(rate, self._rng, begin)):
            self._follow(later, order, self._conversation(at))
            while later and later[0][0] <= at:
                _, key, conversation, request = heapq.heappop(later)
                if request.at >= 0.0:
                    if made == number:
                        return
                    yield request
                    made += 1
                self._follow(later, key, conversation)

    @staticmethod
    def _follow(
        later: list[tuple[float, int, Iterator[TraceRequest], TraceRequest]],
        order: int,
        conversation: Iterator[TraceRequest],
    ) -> None:
        if (request := next(conversation, None)) is not None:
            heapq.heappush(later, (request.at, order, conversation, request))

    def _mean_turns(self) -> float:
        kinds = self._workload.kinds
        weighted = (
            one.weight * ((one.turns.low + one.turns.high) / 2 if isinstance(one.turns, Amount) else one.turns)
            for one in kinds
        )
        return max(1.0, sum(weighted) / sum(one.weight for one in kinds))

    def _longest(self) -> float:
        """Return the mean seconds from the first to the last turn of the longest conversations."""
        turns = ((one, one.turns.high if isinstance(one.turns, Amount) else one.turns) for one in self._workload.kinds)
        return max(max(0, most - 1) * one.pause for one, most in turns)

    def _conversation(self, at: float) -> Iterator[TraceRequest]:
        rng, kinds = self._rng, self._workload.kinds
        place = rng.choices(range(len(kinds)), [one.weight for one in kinds])[0]
        kind, client = kinds[place], f"client {rng.randrange(self._workload.clients)}"
        blocks, text = list(self._beginning(place, kind)), kind.shared
        media: list[TraceMedia] = []
        for _ in range(max(1, _drawn(kind.turns, rng))):
            media += [self._item(place, kind) for _ in range(_drawn(kind.images, rng))]
            text = max(1, text + _drawn(kind.text, rng))
            answer = max(1, _drawn(kind.answer, rng))
            while len(blocks) < text // BLOCK_TOKENS:
                blocks.append(self._new_block())
            yield TraceRequest(at, text, answer, tuple(media), kind.shared, tuple(blocks), client)
            text += answer
            at += rng.expovariate(1.0 / kind.pause)

    def _new_block(self) -> int:
        self._num_blocks += 1
        return self._num_blocks

    def _beginning(self, place: int, kind: RequestKind) -> tuple[int, ...]:
        """Return the blocks that a request begins with as others do."""
        key = place, self._rng.randrange(kind.groups)
        if key not in self._shared:
            self._shared[key] = tuple(self._new_block() for _ in range(kind.shared // BLOCK_TOKENS))
        return self._shared[key]

    def _item(self, place: int, kind: RequestKind) -> TraceMedia:
        known = self._known.setdefault(place, [])
        if known and self._rng.random() < kind.repeated:
            return self._rng.choice(known)
        width, height = self._rng.choice(kind.sizes)
        frames = max(1, _drawn(kind.frames, self._rng))
        self._num_items += 1
        item = TraceMedia(f"item {self._num_items}", width, height, frames, round(BYTES_PER_PIXEL * width * height))
        if kind.repeated:
            known.append(item)
        return item
