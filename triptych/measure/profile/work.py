"""Pieces of work whose time is measured, as they are sent to the process that does them."""

from dataclasses import dataclass

Chunk = tuple[int, int]
"""A chunk's tokens, and how many of its request's tokens come before."""


@dataclass(frozen=True)
class Image:
    """A picture of a size in pixels, drawn by a number."""

    width: int
    height: int
    format: str = "PNG"
    """By Pillow's name."""
    seed: int = 0

    @property
    def pixels(self) -> int:
        return self.width * self.height


@dataclass(frozen=True)
class StepWork:
    """A step of the language engine. A chunk of one token decodes."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class BatchWork:
    """A batch of the encoder: all parts of these images."""

    images: tuple[Image, ...]


@dataclass(frozen=True)
class PreprocessWork:
    """One image in a worker."""

    image: Image


Work = StepWork | BatchWork | PreprocessWork


@dataclass(frozen=True)
class Repeats:
    """How often work is repeated: at least ``least`` times, then until ``seconds`` are over, at most ``most`` times.
    Repetitions that aren't counted come first, ``warm_up`` of them."""

    least: int
    most: int
    seconds: float
    warm_up: int = 2


@dataclass(frozen=True)
class MeasureWork:
    """Repeat work, and answer with ``Timed``; or with None for work that doesn't fit in the KV cache."""

    work: Work
    repeats: Repeats


@dataclass(frozen=True)
class Spin:
    """Answer with None, and repeat work until the next command, which is answered as always."""

    work: Work


@dataclass(frozen=True)
class DecodeGaps:
    """Let the engine's loop decode that number of requests. Answer with the seconds between steps, one list entry for
    each run."""

    sequences: int
    steps: int
    runs: int


@dataclass(frozen=True)
class RequestGaps:
    """Let the engine's loop answer requests of that length with one token each. Answer with the seconds of each besides
    its steps."""

    prompt_tokens: int
    count: int


@dataclass(frozen=True)
class ItemGaps:
    """Let the encode loop encode images one after another, drawn by numbers from the image's own on. Answer with the
    seconds of each besides the encoder's batch and the worker's time."""

    image: Image
    count: int


@dataclass(frozen=True)
class Plans:
    """Answer with ``ItemSizes`` for each image."""

    images: tuple[Image, ...]


@dataclass(frozen=True)
class ItemSizes:
    """What an image becomes."""

    rows: int
    patches: int
    parts: int
    file_bytes: int


@dataclass(frozen=True)
class Facts:
    """What a process says of its model once it has loaded it."""

    context_length: int
    vocab_size: int
    num_layers: int
    page_size: int
    kv_rows_per_token: int
    kv_row_bytes: int
    embedding_row_bytes: int
    max_tokens: int
    """Tokens of the largest step."""
    cache_tokens: int
    """Tokens that the KV cache holds, in the layers that hold the fewest."""


@dataclass(frozen=True)
class Timed:
    """Work that was measured."""

    values: dict[str, float]
    """Those of the variables of its cost."""
    seconds: list[float]


Command = MeasureWork | Spin | DecodeGaps | RequestGaps | ItemGaps | Plans
