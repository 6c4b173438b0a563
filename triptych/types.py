"""Small value types shared by every package. Nothing here imports anything heavy."""

import bisect
import math
from collections.abc import Iterator
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
    """Number of frames: exact if ``counted``, else duration times rate."""
    rate: Annotated[float, msgspec.Meta(gt=0)]
    """Average frames per second."""
    rotation: int = 0
    """Degrees clockwise that frames are rotated by for display: 0, 90, 180 or 270."""
    counted: bool = True
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
    """Of each channel; for a video's audio track, its duration in ticks."""
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


MODEL_BOUNDS = PixelBounds()
"""The model's own bounds."""


class FrameSampling(msgspec.Struct, frozen=True):
    """How a video's frames are sampled. With both fields 0, as the model's processor does."""

    fps: float = 0.0
    """Frames per second of video."""
    num_frames: int = 0
    """Frames in all."""


MODEL_SAMPLING = FrameSampling()
"""The model's own sampling."""


class AudioTrackPlan(msgspec.Struct, frozen=True):
    """What a video's audio track will become."""

    header: AudioHeader
    frames: Positive
    """Frames of audio features."""
    rows: Positive
    """Embedding rows."""


class PartRows(msgspec.Struct, frozen=True, array_like=True):
    """Which of an item's rows belong to one part."""

    runs: tuple[tuple[Count, Positive], ...]
    """Runs of (first row, rows), in order."""
    is_audio: bool = False
    """Whether the part is of a video's audio track rather than its frames."""


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
    """Patches in time, rows and columns. Audio's are the frames of its features, all in time."""
    rows: Positive
    """Embedding rows, hence placeholder tokens; with an audio track, those of frames and audio together."""
    rows_per_part: Positive
    """Rows of each part that is encoded by itself; the last part may have fewer."""
    cost: float
    """Encoding cost, in units of the work that the vision tower's linear layers do for one patch. Attention adds a term
    that is quadratic in patches."""
    bounds: PixelBounds = MODEL_BOUNDS
    """As requested."""
    sampling: FrameSampling = MODEL_SAMPLING
    """As requested."""
    frames: tuple[int, ...] = ()
    """Indexes of a video's sampled frames, in display order."""
    audio_track: AudioTrackPlan | None = None
    """A video's audio track, if it is used. Its rows are interleaved with those of the frames."""
    parts: tuple[PartRows, ...] = ()
    """With an audio track, the rows of each part, in the order in which parts are encoded. Without one it is empty:
    parts follow each other."""

    @property
    def patches(self) -> int:
        """Patches that go through the towers, audio included."""
        return math.prod(self.grid) + (self.audio_track.frames if self.audio_track else 0)

    @property
    def num_parts(self) -> int:
        """Parts that the item is encoded in."""
        return len(self.parts) or -(-self.rows // self.rows_per_part)

    def is_time_sliced(self, batch_patches: int) -> bool:
        """Return whether the item is encoded in time slices that alternate with other items'. It is if it has several
        parts and either exceeds a batch or takes long to decode."""
        header = self.header
        decoded = header.width * header.height * header.frames if isinstance(header, VideoHeader) else 0
        return self.num_parts > 1 and (self.patches > batch_patches or decoded > LONG_DECODE_PIXELS)

    def runs_of(self, part: int) -> tuple[tuple[int, int], ...]:
        """Return (first row, rows) of each run of a part's rows; parts are numbered from 0."""
        if self.parts:
            return self.parts[part].runs
        first_row = part * self.rows_per_part
        return ((first_row, min(self.rows_per_part, self.rows - first_row)),)

    def rows_of(self, part: int) -> int:
        """Return the number of rows of a part; parts are numbered from 0."""
        return sum(rows for _, rows in self.runs_of(part))

    @property
    def is_whole(self) -> bool:
        """Whether its parts cover each of its rows once. Checked, because a plan may come from another process."""
        if not self.parts or self.audio_track is None:
            return not self.parts and self.audio_track is None
        end = 0
        for first_row, rows in sorted(run for part in self.parts for run in part.runs):
            if first_row != end:
                return False
            end += rows
        return end == self.rows


class Span(msgspec.Struct, frozen=True):
    """A run of prompt tokens, ``[start, start + length)``, that stands for an item or for part of one."""

    start: Count
    length: Positive

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
        for span in self.spans:
            if row < span.length:
                return span.start + row
            row -= span.length
        raise IndexError("the item has fewer rows")

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first token, first row, length) of each run of the item's tokens within ``[start, end)``."""
        row = 0
        for span in self.spans[: bisect.bisect_left(self.spans, end, key=lambda span: span.start)]:
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                yield low, row + low - span.start, high - low
            row += span.length
