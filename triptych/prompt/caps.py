"""How much one request may ask of decoders and towers, judged by headers and plans: before any pixel is decoded."""

from dataclasses import dataclass

from triptych.errors import MediaTooLarge
from triptych.types import ImageHeader, ItemPlan


@dataclass(frozen=True)
class MediaCaps:
    """``pixels`` are those of an item as it is stored, ``total_pixels`` those of all items of a request; ``tokens`` are
    those that an item becomes."""

    pixels: int = 50_000_000
    total_pixels: int = 500_000_000
    tokens: int = 16_384


class Counted:
    """What the items of one request add up to."""

    def __init__(self, caps: MediaCaps) -> None:
        self._caps = caps
        self._pixels = 0

    def add_header(self, header: ImageHeader) -> None:
        """Raises MediaTooLarge."""
        pixels = header.width * header.height
        if pixels > self._caps.pixels:
            raise MediaTooLarge(
                f"the {header.format} image has {pixels} pixels ({header.width} by {header.height}); at most "
                f"{self._caps.pixels} are taken"
            )
        self._pixels += pixels
        if self._pixels > self._caps.total_pixels:
            raise MediaTooLarge(f"the images of this request have more than {self._caps.total_pixels} pixels together")

    def add_plan(self, plan: ItemPlan) -> None:
        """Raises MediaTooLarge."""
        if plan.rows > self._caps.tokens:
            raise MediaTooLarge(
                f"the {plan.modality} becomes {plan.rows} tokens; at most {self._caps.tokens} are taken"
            )
