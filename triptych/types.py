"""Small value types shared by every package. Nothing here imports anything heavy."""

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Annotated, NewType

import msgspec

# Constraints that are checked when messages from other processes are decoded.
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

RequestId = NewType("RequestId", str)
"""Identifies one generation while it is in flight; made by the router."""

TransferId = NewType("TransferId", str)
"""Identifies one transfer; made by its consumer, so that two transfers of one item are never confused."""

Address = NewType("Address", str)
"""Where a process receives messages: a ZeroMQ endpoint."""

NO_OWNER = Address("")
"""The owner of what belongs to no frontend."""


class ImageHeader(msgspec.Struct, frozen=True, tag="image"):
    """An image file's header, read before any pixel is decoded."""

    format: str
    width: int
    """In pixels, as displayed: EXIF orientation is applied."""
    height: int


class VideoHeader(msgspec.Struct, frozen=True, tag="video"):
    """A video file's header, read before any frame is decoded."""

    format: str
    width: int
    """In pixels, as displayed: rotation is applied."""
    height: int
    frames: Positive
    """Number of frames that are shown."""
    rate: Annotated[float, msgspec.Meta(gt=0)]
    """Average frames per second."""
    rotation: int = 0
    """Degrees clockwise that frames are rotated by for display: 0, 90, 180 or 270."""
    mirrored: bool = False
    """Whether frames are then mirrored left to right."""
    presampled: bool = False
    """Whether the client chose the frames, so that all of them are used."""

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


class AudioHeader(msgspec.Struct, frozen=True, tag="audio"):
    """An audio file's header, or a video's audio track's, read before any sample is decoded."""

    format: str
    rate: Positive
    """Samples per second; for a video's audio track, ticks of its clock per second."""
    channels: Positive
    samples: Positive
    """Samples of each channel; for a video's audio track, its duration in ticks."""
    in_video: bool = False
    """Whether it is a video's audio track. Its real sample rate and channels are known only once it is decoded."""

    @property
    def seconds(self) -> float:
        return self.samples / self.rate

    def resampled(self, rate: int) -> int:
        """Return the number of samples at another rate."""
        return -(-self.samples * rate // self.rate)


MediaHeader = ImageHeader | VideoHeader | AudioHeader


class PixelBounds(msgspec.Struct, frozen=True):
    """Bounds, in pixels, of the area that an image or a video is resized to; 0 stands for the model's own bound. For a
    video, the model's processor decides whether they apply to each frame or to all together."""

    min_pixels: int = 0
    max_pixels: int = 0
    longest_edge: int = 0
    """Length in pixels of the longer side, for families that bound that instead of the area."""


MODEL_BOUNDS = PixelBounds()
"""The model's own bounds."""


class RequestedSize(msgspec.Struct, frozen=True):
    """A request's ``size`` in pixels, under the names of transformers' processors. The family decides whether its edges
    bound areas or sides. 0 stands for the model's own."""

    shortest_edge: int = 0
    longest_edge: int = 0


MODEL_SIZE = RequestedSize()
"""The model's own size."""


class FrameSampling(msgspec.Struct, frozen=True):
    """How a video's frames are sampled. With both fields 0, as the model's processor does."""

    fps: float = 0.0
    """Frames per second of video."""
    num_frames: int = 0
    """Frames in all."""


MODEL_SAMPLING = FrameSampling()
"""The model's own sampling."""

OptionValue = bool | int | float | str


class ItemContext(msgspec.Struct, frozen=True):
    """What decides an item's plan besides its header and the model's configuration. It stays in the frontend: what an
    encode instance has to know of it is in the plan."""

    bounds: PixelBounds = MODEL_BOUNDS
    sampling: FrameSampling = MODEL_SAMPLING
    """How a video's frames are sampled."""
    sound: AudioHeader | None = None
    """Header of a video's audio track if that is to be encoded, too."""
    siblings: int = 0
    """The request's other items of the same modality."""
    modalities: frozenset[str] = frozenset()
    """Modalities of all items of the request."""
    options: Mapping[str, OptionValue] = {}
    """The request's ``mm_processor_kwargs`` that only some families have; all are in the planner's ``options``."""
    index: int = 0
    """The item's place among the request's items of the same modality."""
    size: RequestedSize = MODEL_SIZE
    """The request's, in place of ``bounds``; only if ``size`` is in the planner's ``options``."""


NO_CONTEXT = ItemContext()
"""An item alone, with the model's own settings."""


class ItemPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of an item, which is encoded by itself."""

    runs: tuple[tuple[Count, Positive], ...]
    """(first row, rows) of each run of the item's rows that the part becomes, in order."""
    patches: Positive
    """Patches that go through the tower; for audio, frames of features."""
    cost: Annotated[float, msgspec.Meta(ge=0)]
    """Estimated cost of encoding, in the unit of ``ItemPlan.cost``."""
    tower: str
    """Name of the tower that encodes the part."""
    payload: tuple[int, ...] = ()
    """What the family's preprocessor needs to make the part. Nothing else reads it."""

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)


class RowRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive rows of an item, from ``first`` up to ``end``, which isn't one of them."""

    first: Count
    end: Positive

    @property
    def rows(self) -> int:
        return self.end - self.first

    def overlaps(self, first: int, rows: int) -> bool:
        """Return whether some of ``rows`` rows from ``first`` on are in the range."""
        return first < self.end and first + rows > self.first

    def contains(self, first: int, rows: int) -> bool:
        """Return whether all of ``rows`` rows from ``first`` on are in the range."""
        return self.first <= first and first + rows <= self.end


def divided(rows: int, cuts: Iterable[int]) -> list[RowRange]:
    """Return the ranges into which cuts, ascending, divide ``rows`` rows: each begins at 0 or at a cut."""
    return [RowRange(*bounds) for bounds in pairwise((0, *cuts, rows))]


LONG_DECODE_PIXELS = 2**26
"""Decoded pixels, including frames that aren't sampled, from which a video is encoded in time slices."""


class ItemPlan(msgspec.Struct, frozen=True):
    """What a media item will become: a pure function of its header, the options and the model's configuration."""

    modality: str
    header: MediaHeader
    resized_height: int
    """In pixels; 0 for audio."""
    resized_width: int
    grid: tuple[Positive, Positive, Positive]
    """Patches in time, rows and columns. Audio's are the frames of its features, all in time; a video's audio track
    isn't counted."""
    rows: Positive
    """Embedding rows of all parts, hence placeholder tokens."""
    patches: Positive
    """Patches of all parts."""
    cost: float
    """Encoding cost of all parts, in units of the work that the vision tower's linear layers do for one patch.
    Attention adds a term that is quadratic in patches."""
    parts: tuple[ItemPart, ...]
    """In the order in which they are encoded. Never empty; together they have each row once."""
    bounds: PixelBounds = MODEL_BOUNDS
    """Those that the request asks for."""
    sampling: FrameSampling = MODEL_SAMPLING
    """The one that the request asks for."""
    sound: AudioHeader | None = None
    """A video's audio track, if it is used."""
    atomic: bool = False
    """Whether each run of its rows is an atomic span of the prompt."""
    second: Count = 0
    """Leading rows whose tokens the decoder computes with its second weights."""

    @property
    def num_parts(self) -> int:
        """Parts that the item is encoded in."""
        return len(self.parts)

    @property
    def part_rows(self) -> int:
        """Rows of the largest part."""
        return max(part.rows for part in self.parts)

    def is_time_sliced(self, batch_patches: int) -> bool:
        """Return whether the item is encoded in time slices that alternate with other items'. It is if it has several
        parts and either exceeds a batch or takes long to decode."""
        header = self.header
        decoded = header.width * header.height * header.frames if isinstance(header, VideoHeader) else 0
        return self.num_parts > 1 and (self.patches > batch_patches or decoded > LONG_DECODE_PIXELS)

    def parts_of(self, rows: RowRange) -> list[int]:
        """Return the numbers of the parts that have some of these rows."""
        return [number for number, part in enumerate(self.parts) if any(rows.overlaps(*run) for run in part.runs)]

    @property
    def boundaries(self) -> list[int]:
        """The rows, ascending, before which the item can be divided: no part has rows on both sides. All but row 0 and
        the end."""
        bounds = sorted((min(part.runs)[0], max(first + rows for first, rows in part.runs)) for part in self.parts)
        found, end = list[int](), bounds[0][1]
        for first, part_end in bounds[1:]:
            if first >= end:
                found.append(first)
            end = max(end, part_end)
        return found

    def runs_of(self, part: int) -> tuple[tuple[int, int], ...]:
        """Return (first row, rows) of each run of a part's rows; parts are numbered from 0."""
        return self.parts[part].runs

    def rows_of(self, part: int) -> int:
        """Return the number of rows of a part; parts are numbered from 0."""
        return self.parts[part].rows

    @property
    def is_whole(self) -> bool:
        """Whether its parts cover each of its rows once, and have its patches and its cost together. Checked, because
        a plan may come from another process."""
        end = 0
        for first_row, rows in sorted(run for part in self.parts for run in part.runs):
            if first_row != end:
                return False
            end += rows
        cost = sum(part.cost for part in self.parts)
        return (
            all(part.runs for part in self.parts)
            and end == self.rows
            and sum(part.patches for part in self.parts) == self.patches
            and math.isfinite(cost)
            and math.isclose(cost, self.cost)
        )


class Span(msgspec.Struct, frozen=True):
    """A run of prompt tokens, ``[start, start + length)``, that stands for an item or for part of one."""

    start: Count
    length: Positive
    atomic: bool = False
    """Whether its tokens attend to each other in both directions, so that one step computes them all."""
    second: Count = 0
    """Leading tokens that are computed with the decoder's second weights, at most all."""

    @property
    def end(self) -> int:
        return self.start + self.length


class Placement(msgspec.Struct, frozen=True):
    """Where an item's rows belong in the prompt: at the tokens of its spans, in order."""

    spans: tuple[Span, ...]
    """Neither overlapping nor empty. An image has one; a video may have one for each patch in time, with timestamps
    between them."""

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def end(self) -> int:
        return self.spans[-1].end

    @property
    def rows(self) -> int:
        return sum(span.length for span in self.spans)

    def rows_before(self, token: int) -> int:
        """Return the number of the item's rows before a token."""
        rows = 0
        for span in self.spans:
            if token <= span.start:
                break
            rows += min(token - span.start, span.length)
        return rows

    def token_of(self, row: int) -> int:
        """Return the token of a row. Raises IndexError for a row that the item doesn't have."""
        span, first_row = self.span_of(row)
        return span.start + row - first_row

    def span_of(self, row: int) -> tuple[Span, int]:
        """Return the span of a row, and the span's first row. Raises IndexError for a row that the item doesn't
        have."""
        first_row = 0
        for span in self.spans:
            if row < first_row + span.length:
                return span, first_row
            first_row += span.length
        raise IndexError("the item has fewer rows")

    def section(self, rows: RowRange) -> "Placement":
        """Return where some of the rows belong, as a placement of their own: its row 0 is the first of them."""
        spans, first_row = list[Span](), 0
        for span in self.spans:
            low, high = max(0, rows.first - first_row), min(span.length, rows.end - first_row)
            if low < high:
                second = max(0, min(span.second, high) - low)
                spans.append(Span(span.start + low, high - low, span.atomic, second))
            first_row += span.length
        return Placement(tuple(spans))

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first token, first row, length) of each run of the item's tokens within ``[start, end)``."""
        row = 0
        for span in self.spans[: bisect.bisect_left(self.spans, end, key=lambda span: span.start)]:
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                yield low, row + low - span.start, high - low
            row += span.length
