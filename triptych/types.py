"""Small value types shared by every package. Nothing here imports anything heavy."""

import bisect
import math
from collections.abc import Iterator
from typing import Annotated, NewType

import msgspec

# What messages from other processes are held to when they are decoded.
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

RequestId = NewType("RequestId", str)
"""Names one sequence of a request, for as long as it lives; made by the router."""

TransferId = NewType("TransferId", str)
"""Names one transfer; made by its consumer, so that two transfers of one item never meet."""

Address = NewType("Address", str)
"""Where a process receives messages: a ZeroMQ endpoint."""


class ImageHeader(msgspec.Struct, frozen=True, tag="image"):
    """What an image file's header says, before any pixel is decoded.

    ``width`` and ``height`` are in pixels and as displayed: EXIF orientation is applied.
    """

    format: str
    width: int
    height: int


class VideoHeader(msgspec.Struct, frozen=True, tag="video"):
    """What a video file's header says, before any frame is decoded.

    ``width`` and ``height`` are in pixels and as displayed, once frames are turned by ``rotation`` degrees clockwise
    (0, 90, 180 or 270). ``rate`` is in frames per second, on average. Where ``counted``, the header knows each frame,
    and ``frames`` is their number in the file; elsewhere it is what duration and rate come to. Where they were
    ``chosen``, by the client, all of them are seen.
    """

    format: str
    width: int
    height: int
    frames: Positive
    rate: Annotated[float, msgspec.Meta(gt=0)]
    rotation: int = 0
    counted: bool = True
    chosen: bool = False

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


class AudioHeader(msgspec.Struct, frozen=True, tag="audio"):
    """What an audio file's header says, before any of it is decoded: ``samples`` for each of ``channels``, ``rate`` of
    them a second. Of a video's audio ``track`` they are ticks of its clock, in one channel, and tell how long it is:
    what samples and channels it really has is found out when it is decoded."""

    format: str
    rate: Positive
    channels: Positive
    samples: Positive
    track: bool = False

    @property
    def seconds(self) -> float:
        return self.samples / self.rate

    def resampled(self, rate: int) -> int:
        """How many samples there are at another rate."""
        return -(-self.samples * rate // self.rate)


MediaHeader = ImageHeader | VideoHeader | AudioHeader


class PixelBounds(msgspec.Struct, frozen=True):
    """Bounds of the area, in pixels, that an image is resized to, or a video: each of its frames, or all together, as
    the model's processor counts; 0 where the model's own holds."""

    min_pixels: int = 0
    max_pixels: int = 0


MODEL_BOUNDS = PixelBounds()
"""Those that hold unless a request has its own."""


class FrameSampling(msgspec.Struct, frozen=True):
    """Which frames of a video are seen: ``fps`` a second, or ``num_frames`` of all; 0 where the model's own holds."""

    fps: float = 0.0
    num_frames: int = 0


MODEL_SAMPLING = FrameSampling()
"""That which holds unless a request has its own."""


class SoundPlan(msgspec.Struct, frozen=True):
    """What a video's audio track will become: so many ``frames`` of features, and these so many ``rows``."""

    header: AudioHeader
    frames: Positive
    rows: Positive


class PartRows(msgspec.Struct, frozen=True, array_like=True):
    """Which of its item's rows belong to one part."""

    runs: tuple[tuple[Count, Positive], ...]
    """(first row, number of rows) of each contiguous run, in order."""
    is_audio: bool = False
    """Whether the part belongs to a video's audio track rather than to its frames."""


DECODED_AT_ONCE = 2**26
"""Pixels of a video's frames, seen or not, that are decoded in about a tenth of a second."""


class ItemPlan(msgspec.Struct, frozen=True):
    """What a media item will become: a pure function of its header, the options and the model's configuration.

    ``resized_height`` and ``resized_width`` are in pixels; ``grid`` counts patches (in time, rows, columns). Audio has
    no sides, 0, and its patches are the frames of its features, all in time. ``rows`` counts the tokens, hence
    embedding rows, that stand for the item in the prompt; it is encoded in parts of ``rows_per_part``, of which the
    last may have fewer. ``cost`` is the work of encoding it, in patch-multiplications (linear in patches plus the
    attention's square), of the patches of the model's vision tower; ``bounds`` and ``sampling`` are what the request
    asked for; ``frames`` are the numbers of a video's frames that are seen, in the order of display, from 0 on.

    Where a video's ``sound`` is heard, ``rows`` and ``cost`` are those of both; the rest is about its frames. The rows
    are interleaved, so ``parts`` says where those of each part are, in the order in which parts are made; without sound
    they follow each other.
    """

    modality: str
    header: MediaHeader
    resized_height: int
    resized_width: int
    grid: tuple[Positive, Positive, Positive]
    rows: Positive
    rows_per_part: Positive
    cost: float
    bounds: PixelBounds = MODEL_BOUNDS
    sampling: FrameSampling = MODEL_SAMPLING
    frames: tuple[int, ...] = ()
    sound: SoundPlan | None = None
    parts: tuple[PartRows, ...] = ()

    @property
    def patches(self) -> int:
        """How many the towers are given."""
        return math.prod(self.grid) + (self.sound.frames if self.sound else 0)

    @property
    def num_parts(self) -> int:
        """Into how many parts the item is cut for encoding."""
        return len(self.parts) or -(-self.rows // self.rows_per_part)

    def takes_turns(self, batch_patches: int) -> bool:
        """Whether the item is encoded by turns with others: it has several parts, and either more patches than are
        encoded together, or many pixels to decode for them."""
        header = self.header
        decoded = header.width * header.height * header.frames if isinstance(header, VideoHeader) else 0
        return self.num_parts > 1 and (self.patches > batch_patches or decoded > DECODED_AT_ONCE)

    def runs_of(self, part: int) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of each run of rows of the part of that number, from 0 on."""
        if self.parts:
            return self.parts[part].runs
        first_row = part * self.rows_per_part
        return ((first_row, min(self.rows_per_part, self.rows - first_row)),)

    def rows_of(self, part: int) -> int:
        """How many rows the part of that number, from 0 on, has."""
        return sum(rows for _, rows in self.runs_of(part))

    @property
    def is_whole(self) -> bool:
        """Whether its parts make up its rows, each once: a plan may come from another process."""
        if not self.parts or self.sound is None:
            return not self.parts and self.sound is None
        end = 0
        for first_row, rows in sorted(run for part in self.parts for run in part.runs):
            if first_row != end:
                return False
            end += rows
        return end == self.rows


class Span(msgspec.Struct, frozen=True):
    """A run of prompt tokens ``[start, start + length)`` that stands for one item, or for part of it."""

    start: Count
    length: Positive

    @property
    def end(self) -> int:
        return self.start + self.length


class Placement(msgspec.Struct, frozen=True):
    """Where an item's rows belong in the prompt: at the tokens of its spans, in order. An image has one span; a video
    may have one for each patch in time, with timestamps between them. Neither overlapping nor empty."""

    spans: tuple[Span, ...]

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
        """How many of the item's rows stand before a token."""
        rows = 0
        for span in self.spans:
            if token <= span.start:
                break
            rows += min(token - span.start, span.length)
        return rows

    def token_of(self, row: int) -> int:
        """The token at which a row stands."""
        for span in self.spans:
            if row < span.length:
                return span.start + row
            row -= span.length
        raise IndexError("the item has fewer rows")

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(first token, first row, length) of each run of the item's tokens within ``[start, end)``."""
        row = 0
        for span in self.spans[: bisect.bisect_left(self.spans, end, key=lambda span: span.start)]:
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                yield low, row + low - span.start, high - low
            row += span.length
