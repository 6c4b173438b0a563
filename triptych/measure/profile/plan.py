"""What a profile measures, and how often."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.costs.fitting import CONSTANT, linear, pieces
from triptych.costs.forms import Factor
from triptych.costs.profile import Stage
from triptych.measure.profile.work import BatchWork, Chunk, Image, PreprocessWork, Repeats, StepWork, Work

FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
"""Names in a profile, and Pillow's."""

STEP_TERMS = [
    CONSTANT,
    *pieces("rows", (4, 16, 64, 256)),
    *linear("tokens", "chunks", "pairs", "sequences", "context")[1:],
]
"""Products take about as long for a few rows as for one, since they read all weights; more rows keep cores busier."""
BATCH_TERMS = [CONSTANT, (Factor("parts"),), *pieces("patches", (256, 1024)), (Factor("pairs"),)]
FRONTEND_TERMS = [(Factor(name),) for name in ("requests", "prompt_tokens", "items", "media_bytes", "output_tokens")]


@dataclass(frozen=True)
class ProfilePlan:
    """What is measured."""

    sizes: Sequence[tuple[int, int]]
    """Sizes of images, in pixels."""
    chunks: Sequence[int]
    """Tokens of prefill chunks."""
    contexts: Sequence[int]
    """Tokens before a chunk, or attended to by a sequence."""
    sequences: Sequence[int]
    """Numbers of sequences that decode."""
    repeats: Repeats
    slow: float
    """Seconds after which larger images aren't measured."""
    bytes: Sequence[int]
    """Sizes of transfers."""
    transfers: int
    """Repetitions of each."""
    loads: int
    """Times that each load of the frontend is repeated."""
    requests: int
    """Requests of each load."""
    beside: Repeats
    """How often each stage is timed beside another."""

    def images(self) -> list[Image]:
        return [Image(width, height) for width, height in self.sizes]

    def steps(self, max_tokens: int, max_sequences: int) -> Iterator[StepWork]:
        """Yield steps of prefill, of decodes, and of both, that the engine's limits allow."""
        for step in self._steps(min(max_tokens, max(self.chunks))):
            if len(step.chunks) <= max_sequences and sum(length for length, _ in step.chunks) <= max_tokens:
                yield step

    def _steps(self, longest: int) -> Iterator[StepWork]:
        for length in self.chunks:
            yield from (StepWork(((length, before),)) for before in (0, self.contexts[-1]))
        yield from (StepWork(((longest // parts, 0),) * parts) for parts in (2, 4))
        for count in self.sequences:
            yield from (StepWork(((1, context - 1),) * count) for context in self.contexts)
            decodes: tuple[Chunk, ...] = ((1, self.contexts[0] - 1),) * (count - 1)
            if decodes:
                lengths = sorted({min(16, longest - len(decodes)), longest - len(decodes)})
                yield from (StepWork(((length, 0), *decodes)) for length in lengths if length > 1)

    def batches(self) -> list[BatchWork]:
        """Return batches of one image of each size, and of several small ones, from fewer pixels to more."""
        images = sorted(self.images(), key=lambda image: image.pixels)
        several = [BatchWork((images[0],) * count) for count in (2, 4)] + [
            BatchWork((images[min(1, len(images) - 1)],) * 2)
        ]
        batches = [*(BatchWork((image,)) for image in images), *several]
        return sorted(batches, key=lambda batch: sum(image.pixels for image in batch.images))

    def stages(self, *, takes_media: bool) -> dict[Stage, Work]:
        """Return typical work of each stage, for measuring how they disturb each other."""
        language: dict[Stage, Work] = {
            "prefill": StepWork(((min(256, self.chunks[-1]), 0),)),
            "decode": StepWork(((1, self.contexts[0]),) * self.sequences[-2]),
        }
        image = self.images()[min(1, len(self.sizes) - 1)]
        of_media: dict[Stage, Work] = {"preprocess": PreprocessWork(image), "encode": BatchWork((image,))}
        return of_media | language if takes_media else language


FULL = ProfilePlan(
    sizes=((112, 112), (224, 224), (448, 448), (672, 672), (896, 896), (1280, 720), (1920, 1080)),
    chunks=(16, 64, 128, 256, 512),
    contexts=(128, 512, 1536),
    sequences=(1, 2, 4, 8, 16, 32),
    repeats=Repeats(5, 15, 0.4),
    slow=4.0,
    bytes=(2**14, 2**17, 2**20, 2**23, 2**25),
    transfers=15,
    loads=3,
    requests=40,
    beside=Repeats(8, 40, 0.8),
)
QUICK = ProfilePlan(
    sizes=((64, 64), (224, 224)),
    chunks=(16, 128),
    contexts=(64, 256),
    sequences=(1, 4, 8),
    repeats=Repeats(3, 3, 0.0, warm_up=1),
    slow=2.0,
    bytes=(2**14, 2**18, 2**20),
    transfers=3,
    loads=1,
    requests=8,
    beside=Repeats(3, 3, 0.0, warm_up=1),
)
