"""Small value types shared by every package. Nothing here imports anything heavy."""

from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
"""Names one sequence of a request, for as long as it lives; made by the router."""

TransferId = NewType("TransferId", str)
"""Names one transfer; made by its consumer, so that two transfers of one item never meet."""

Address = NewType("Address", str)
"""Where a process receives messages: a ZeroMQ endpoint."""


class ImageHeader(msgspec.Struct, frozen=True):
    """What an image file's header says, before any pixel is decoded.

    ``width`` and ``height`` are in pixels and as displayed: EXIF orientation is applied.
    """

    format: str
    width: int
    height: int


class PixelBounds(msgspec.Struct, frozen=True):
    """Bounds of the area, in pixels, that an image is resized to; 0 where the model's own holds."""

    min_pixels: int = 0
    max_pixels: int = 0


MODEL_BOUNDS = PixelBounds()
"""Those that hold unless a request has its own."""


class ItemPlan(msgspec.Struct, frozen=True):
    """What a media item will become: a pure function of its header and the model's configuration.

    ``resized_height`` and ``resized_width`` are in pixels; ``grid`` counts patches (frames, rows, columns);
    ``rows`` counts the tokens, hence embedding rows, that stand for the item in the prompt;
    ``cost`` is the work of encoding it, in patch-multiplications (linear in patches plus the attention's square);
    ``bounds`` are those that the request asked for.
    """

    modality: str
    header: ImageHeader
    resized_height: int
    resized_width: int
    grid: tuple[int, int, int]
    rows: int
    cost: float
    bounds: PixelBounds = MODEL_BOUNDS


class Span(msgspec.Struct, frozen=True):
    """The run of prompt tokens ``[start, start + length)`` that stands for one item."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length
