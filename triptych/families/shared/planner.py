"""Plans images for towers that take any grid of patches, and prompts in M-RoPE positions. Front door; numpy only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triptych.errors import BadMediaSize, MediaTooLarge
from triptych.families.base import ModelConfig, Positions
from triptych.families.shared.geometry import ImageGeometry
from triptych.families.shared.mrope import grid_shape, mrope_positions
from triptych.families.shared.settings import setting
from triptych.types import ImageHeader, ItemPlan, Span

MAX_ASPECT_RATIO = 200
MAX_SOURCE_PIXELS = 50_000_000
VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class TowerWork:
    """What a tower of transformer layers computes. ``mlp_matrices`` is 3 for a gated MLP, else 2; in a
    ``windowed_share`` of the layers, attention reaches over ``window`` patches only."""

    hidden_size: int
    intermediate_size: int
    mlp_matrices: int = 2
    windowed_share: float = 0.0
    window: int = 0

    def cost(self, patches: int) -> float:
        """Work of encoding one image of n patches; the unit is the linear layers' work for one patch.

        A layer of hidden size h and intermediate size i takes n * (4h² + 2hi) multiplications in its linear layers
        (query, key, value and output; the two, or three, of the MLP) and 2n²h in attention (scores and weighted sum),
        where a window has n * window in place of n². Depth multiplies all of it alike.
        """
        linear = 4 * self.hidden_size**2 + self.mlp_matrices * self.hidden_size * self.intermediate_size
        seen = (1 - self.windowed_share) * patches + self.windowed_share * min(patches, self.window)
        return patches * (1 + 2 * self.hidden_size * seen / linear)


class PatchPlanner:
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        *,
        context_length: int,
        work: TowerWork,
        media_tokens: Sequence[str] = VISION_TOKENS,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        """``media_tokens`` names the settings that say which tokens may only come from the template."""
        self.image_token_id = setting(config, "image_token_id", int)
        self.media_token_ids = frozenset(setting(config, key, int) for key in media_tokens)
        self.context_length = context_length
        self._geometry = ImageGeometry.from_configs(config, preprocessor_config)
        self._max_source_pixels = max_source_pixels
        self._work = work

    def plan(self, header: ImageHeader) -> ItemPlan:
        """What the image will become.

        Raises MediaTooLarge for more than ``max_source_pixels`` and BadMediaSize for an aspect ratio above 200.
        """
        width, height = header.width, header.height
        if min(width, height) < 1:
            raise BadMediaSize(f"the image is {width} by {height} pixels; both sides must be at least 1")
        if width * height > self._max_source_pixels:
            raise MediaTooLarge(
                f"the image has {width * height} pixels ({width} by {height}); "
                f"at most {self._max_source_pixels} are taken"
            )
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise BadMediaSize(
                f"the image is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
            )
        resized_height, resized_width = self._geometry.resized(height, width)
        grid = (1, resized_height // self._geometry.patch_size, resized_width // self._geometry.patch_size)
        patches = math.prod(grid)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=resized_height,
            resized_width=resized_width,
            grid=grid,
            rows=patches // self._geometry.merge_size**2,
            cost=self._work.cost(patches),
        )

    def positions(self, num_tokens: int, spans: Sequence[Span], plans: Sequence[ItemPlan]) -> Positions:
        """M-RoPE positions. Raises PlanMismatch where a span's length isn't its plan's rows, or spans overlap or leave
        the prompt."""
        merge = self._geometry.merge_size
        shapes = [
            grid_shape(frames, rows // merge, columns // merge) for frames, rows, columns in (p.grid for p in plans)
        ]
        return mrope_positions(num_tokens, spans, shapes)
