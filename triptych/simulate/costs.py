"""What simulated work costs, in seconds: plain coefficients, or a profile that was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.costs.profile import STAGES, Cost, Profile, Stage, batch_values, step_values
from triptych.messages.rows import RowKind
from triptych.types import ImageHeader, ItemPlan, VideoHeader

HOPS_OF_TRANSFER = 3
"""Messages between the offer of rows and their landing, which the simulation sends by itself."""


class InstanceCosts(Protocol):
    """Costs of one instance, which has a number of threads. All in seconds, with nothing else at work."""

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of seconds of steps and batches."""

    def step(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of a step, given each chunk's tokens and how many of its request's come before."""

    def gap(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of the loop before a step, in which nothing is computed."""

    def batch(self, patches: Sequence[int]) -> float:
        """Return the time of a batch of the encoder, given the patches of its parts."""

    def preprocess(self, plan: ItemPlan) -> float:
        """Return a worker's time for an item."""

    def request(self, stage: Stage, prompt_tokens: int) -> float:
        """Return the time of the loop for a request, or for an item where ``stage`` encodes."""


class ServiceCosts(Protocol):
    """Costs of the frontend and of what is between processes."""

    @property
    def hop(self) -> float:
        """Time of a message, one way."""

    def submit(self, prompt_tokens: int, num_items: int, media_bytes: int) -> float:
        """Return the frontend's time from a request's arrival until it is queued."""

    def report(self, tokens: int) -> float:
        """Return the frontend's time for tokens of an answer."""

    def write(self, kind: RowKind, num_bytes: int) -> float:
        """Return the sender's time to write rows."""

    def slowdown(self, stage: Stage, beside: Stage) -> float:
        """Return how many times as long a stage takes while another works on other cores of the machine."""

    def of_instance(self, threads: int) -> InstanceCosts: ...


@dataclass(frozen=True)
class LinearCosts:
    """Costs by plain coefficients, whatever the number of threads. Both an ``InstanceCosts`` and a ``ServiceCosts``."""

    per_step: float = 0.004
    per_token: float = 0.0002
    """A prompt's."""
    per_sequence: float = 0.0002
    """Each that decodes."""
    per_batch: float = 0.003
    per_patch: float = 0.0001
    per_patch_preprocessed: float = 0.00005
    hop: float = 0.0003
    per_byte: float = 0.0
    per_request: float = 0.0
    """At the frontend."""
    per_report: float = 0.0
    spread: float = 0.0
    slowdowns: dict[tuple[Stage, Stage], float] = field(default_factory=dict)

    def step(self, chunks: Sequence[tuple[int, int]]) -> float:
        decoding = sum(length == 1 for length, _ in chunks)
        tokens = sum(length for length, _ in chunks) - decoding
        return self.per_step + self.per_token * tokens + self.per_sequence * decoding

    def gap(self, chunks: Sequence[tuple[int, int]]) -> float:
        return 0.0

    def batch(self, patches: Sequence[int]) -> float:
        return self.per_batch + self.per_patch * sum(patches)

    def preprocess(self, plan: ItemPlan) -> float:
        return self.per_patch_preprocessed * plan.patches

    def request(self, stage: Stage, prompt_tokens: int) -> float:
        return 0.0

    def submit(self, prompt_tokens: int, num_items: int, media_bytes: int) -> float:
        return self.per_request

    def report(self, tokens: int) -> float:
        return self.per_report * tokens

    def write(self, kind: RowKind, num_bytes: int) -> float:
        return self.per_byte * num_bytes

    def slowdown(self, stage: Stage, beside: Stage) -> float:
        return self.slowdowns.get((stage, beside), 1.0)

    def of_instance(self, threads: int) -> "LinearCosts":
        return self


NOTHING = dict.fromkeys(("requests", "items", "prompt_tokens", "media_bytes", "output_tokens"), 0.0)
"""The variables of overheads."""
SIGMA = 1.48
"""Standard deviation of a normal distribution, in half distances between its quartiles."""


class ProfiledInstance:
    """The costs of an instance with a number of threads, by a profile."""

    def __init__(self, profile: Profile, threads: int) -> None:
        self._profile = profile
        self._steps = profile.steps_at(threads)
        self._batches = profile.encode_at(threads) if profile.encode else None
        self.spread = SIGMA * max([self._steps.noise, *([self._batches.noise] if self._batches else [])])

    def step(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._steps.seconds(step_values(chunks))

    def gap(self, chunks: Sequence[tuple[int, int]]) -> float:
        decoding = sum(length == 1 for length, _ in chunks)
        return self._profile.step_overhead.seconds(sequences=decoding, chunks=len(chunks) - decoding)

    def batch(self, patches: Sequence[int]) -> float:
        assert self._batches is not None, "a model without encoder has no items"
        return self._batches.seconds(batch_values(patches))

    def preprocess(self, plan: ItemPlan) -> float:
        header = plan.header
        pixels, media_format = 0, "png"
        if isinstance(header, ImageHeader):
            pixels, media_format = header.width * header.height, header.format.lower()
        elif isinstance(header, VideoHeader):
            pixels = header.width * header.height * header.frames
        costs = self._profile.preprocess
        if not costs:
            return 0.0
        return costs.get(media_format, next(iter(costs.values()))).seconds(pixels=pixels)

    def request(self, stage: Stage, prompt_tokens: int) -> float:
        cost = self._profile.request_overhead.get(stage)
        if cost is None:
            return 0.0
        return cost.seconds(**(NOTHING | {"requests": 1, "items": 1, "prompt_tokens": prompt_tokens}))


class ProfiledCosts:
    """The costs of a service, by a profile."""

    def __init__(self, profile: Profile, fabric: str = "shm") -> None:
        """Rows go over that fabric, or the first that was measured."""
        self._profile = profile
        self.hop = profile.hop.median
        frontend = profile.frontend
        self._per_report = frontend.seconds(**(NOTHING | {"output_tokens": 1})) - frontend.seconds(**NOTHING)
        kinds = profile.transfers.get(fabric) or next(iter(profile.transfers.values()), {})
        self._writes: dict[str, Cost] = dict(kinds)
        self._slowdowns = {
            (stage, beside): profile.slowdown(stage, beside, shared=False) for stage in STAGES for beside in STAGES
        }

    def submit(self, prompt_tokens: int, num_items: int, media_bytes: int) -> float:
        asked = {"requests": 1, "prompt_tokens": prompt_tokens, "items": num_items, "media_bytes": media_bytes}
        return self._profile.frontend.seconds(**(NOTHING | asked))

    def report(self, tokens: int) -> float:
        return self._per_report * tokens

    def write(self, kind: RowKind, num_bytes: int) -> float:
        cost = self._writes.get("kv" if kind is RowKind.KV else "embeddings")
        if cost is None:
            return 0.0
        begin = cost.seconds(bytes=0)
        return max(0.0, begin - HOPS_OF_TRANSFER * self.hop) + cost.seconds(bytes=num_bytes) - begin

    def slowdown(self, stage: Stage, beside: Stage) -> float:
        return self._slowdowns[stage, beside]

    def of_instance(self, threads: int) -> ProfiledInstance:
        return ProfiledInstance(self._profile, threads)
