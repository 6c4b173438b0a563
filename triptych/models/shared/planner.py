"""What planners check of media, what a tower's work is, and plans of items in patches. Frontend; numpy only."""

from dataclasses import dataclass

from triptych.errors import BadMediaSize, MediaTooLarge
from triptych.models.base import VISION
from triptych.models.shared.geometry import ImageGeometry
from triptych.types import (
    MODEL_SAMPLING,
    FrameSampling,
    ItemPart,
    ItemPlan,
    MediaHeader,
    PixelBounds,
)

MAX_ASPECT_RATIO = 200
MAX_SOURCE_PIXELS = 50_000_000
SQUARE_FACTOR = 4
"""How many times ``MAX_SOURCE_PIXELS`` an image may have once it is padded to a square."""


@dataclass(frozen=True)
class VisionCostModel:
    """Estimates a vision tower's work from its dimensions."""

    hidden_size: int
    intermediate_size: int
    mlp_matrices: int = 2
    """3 for a gated MLP, otherwise 2."""
    windowed_share: float = 0.0
    """Share of the layers whose attention is windowed."""
    window: int = 0
    """Patches per window."""

    @property
    def linear(self) -> int:
        """Multiplications in one layer's linear layers for one patch."""
        return 4 * self.hidden_size**2 + self.mlp_matrices * self.hidden_size * self.intermediate_size

    def cost(self, patches: int) -> float:
        """Return the work of encoding an image or temporal patch of n patches, in units of one patch's linear layers.

        A layer of hidden size h and intermediate size i takes n * (4h² + 2hi) multiplications in its linear layers
        (query, key, value and output; two or three of the MLP). Attention (scores and weighted sum) takes 2n²h, where
        windowed layers have n * window instead of n². Depth multiplies both alike.
        """
        attended = (1 - self.windowed_share) * patches + self.windowed_share * min(patches, self.window)
        return patches * (1 + 2 * self.hidden_size * attended / self.linear)


def check_source_size(kind: str, width: int, height: int, max_pixels: int = MAX_SOURCE_PIXELS) -> None:
    """Check the size of an image or of a video's frames; ``kind`` names it in errors.

    Raises BadMediaSize for a side below 1, and MediaTooLarge for more than ``max_pixels``.
    """
    if min(width, height) < 1:
        raise BadMediaSize(f"the {kind} is {width} by {height} pixels; both sides must be at least 1")
    if width * height > max_pixels:
        raise MediaTooLarge(
            f"the {kind} has {width * height} pixels ({width} by {height}); at most {max_pixels} are taken"
        )


def check_square_size(width: int, height: int) -> None:
    """Check an image that is padded to a square. Raises MediaTooLarge for a square of more than four times
    ``MAX_SOURCE_PIXELS``, which a long, thin image may become."""
    side = max(width, height)
    check_source_size("image, padded to a square,", side, side, SQUARE_FACTOR * MAX_SOURCE_PIXELS)


def check_aspect_ratio(width: int, height: int, what: str = "image") -> None:
    """Raise BadMediaSize for an image, or ``what`` it is, whose sides differ more than ``MAX_ASPECT_RATIO``-fold."""
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise BadMediaSize(
            f"the {what} is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
        )


def patches_plan(
    modality: str,
    header: MediaHeader,
    resized: tuple[int, int],
    geometry: ImageGeometry,
    cost_model: VisionCostModel,
    *,
    bounds: PixelBounds,
    sampling: FrameSampling = MODEL_SAMPLING,
    frames: tuple[int, ...] = (),
    atomic: bool = False,
) -> ItemPlan:
    """Plan a part for each temporal patch of an item that becomes ``resized``, (height, width). A part's payload is the
    numbers of a video's frames in it, which ``sampled_frames`` reads."""
    height, width = resized
    size = geometry.temporal_patch_size
    in_time = -(-len(frames) // size) if frames else 1
    grid = (in_time, height // geometry.patch_size, width // geometry.patch_size)
    patches = grid[1] * grid[2]
    rows, cost = patches // geometry.merge_size**2, cost_model.cost(patches)
    return ItemPlan(
        modality=modality,
        header=header,
        resized_height=height,
        resized_width=width,
        grid=grid,
        rows=in_time * rows,
        patches=in_time * patches,
        cost=in_time * cost,
        parts=tuple(
            ItemPart(((number * rows, rows),), patches, cost, VISION, frames[number * size : (number + 1) * size])
            for number in range(in_time)
        ),
        bounds=bounds,
        sampling=sampling,
        atomic=atomic,
    )
