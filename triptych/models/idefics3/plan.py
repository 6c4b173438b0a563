"""Plans the images and prompts of Idefics3 and SmolVLM. Frontend; numpy only.

The references are ``Idefics3Processor`` and ``SmolVLMProcessor`` in transformers: an image becomes tiles, each after
its place, and then the whole.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, SIZE_OPTIONS, VISION, MediaToken, ModelConfig
from triptych.models.idefics3.config import image_token, text_config, vision_config
from triptych.models.idefics3.tiles import EdgeTiles
from triptych.models.idefics3.video import SmolSampling, described
from triptych.models.shared.geometry import edge_bounds
from triptych.models.shared.plain_planner import PlainPlanner, check_no_bounds
from triptych.models.shared.video import frames_plan, sampled_frames
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan, VideoHeader

AROUND = "<fake_token_around_image>"
"""Token before each tile, and after the last."""
WHOLE = "<global-img>"
VIDEO = "<video>"
"""What templates have for a video."""
KNOWN_ACROSS = 6
"""Tiles in a row for which published tokenizers have tokens, even if the processor cuts images into fewer."""


def _place(row: int, column: int) -> str:
    """Return the text before a tile, which is numbered from 1."""
    return f"<row_{row}_col_{column}>"


class Idefics3Planner(PlainPlanner):
    """``Planner`` of both families. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = AREA_OPTIONS | SIZE_OPTIONS

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._vision = vision_config(config)
        self._tiles = EdgeTiles.from_config(preprocessor_config, self._vision.clip.image_size)
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._tiles.max_pixels,
        )
        self.media_tokens = frozenset((image_token(config), AROUND, WHOLE))
        across = range(1, max(math.isqrt(self._tiles.max_pixels) // self._tiles.factor, KNOWN_ACROSS) + 1)
        self.markers = frozenset(_place(row, column) for row in across for column in across)

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of all tiles but the whole. Raises BadMediaSize for bounds that no whole
        tiles are within."""
        bounds = edge_bounds(context)
        canvas = self._tiles.within(bounds).canvas(header.width, header.height)
        clip, rows, count = self._vision.clip, self._vision.rows, canvas.parts
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=canvas.rows * clip.image_size,
            resized_width=canvas.columns * clip.image_size,
            grid=(1, canvas.rows * clip.side, canvas.columns * clip.side),
            rows=count * rows,
            patches=count * clip.side**2,
            cost=count * clip.cost,
            parts=tuple(ItemPart(((part * rows, rows),), clip.side**2, clip.cost, VISION) for part in range(count)),
            bounds=bounds,
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return a placeholder for each tile, after its place, and one for the whole."""
        tile, side = spelling(self.placeholder_tokens[plan.modality]), self._vision.clip.image_size
        whole = f"{AROUND}{WHOLE}{tile}{AROUND}"
        if plan.num_parts == 1:
            return whole
        columns, rows = plan.resized_width // side, plan.resized_height // side
        lines = (
            "".join(f"{AROUND}{_place(row, column)}{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + whole

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for each tile, and one for the whole."""
        return [part.rows for part in plan.parts]


class SmolVLMPlanner(Idefics3Planner):
    """``Planner`` of SmolVLM, which takes videos, too. Raises CheckpointError as ``Idefics3Planner`` does."""

    options = AREA_OPTIONS | SIZE_OPTIONS | FRAME_OPTIONS
    template_texts: Mapping[str, str] = {"video": VIDEO}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config)
        self.placeholder_tokens = {kind: image_token(config) for kind in ("image", "video")}
        self._sampling = SmolSampling.from_config(video_config or {}, 1)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Each frame is a tile. Raises UnsupportedMedia for invalid sampling and for bounds."""
        check_no_bounds(context)
        clip, rows = self._vision.clip, self._vision.rows
        frames = self._sampling.for_request(context.sampling).frames(header)
        part = ItemPart(((0, rows),), clip.side**2, clip.cost, VISION)
        return frames_plan(header, context.sampling, frames, part, last_rows=rows, side=clip.image_size)

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return that of an image, or a placeholder for each frame of a video, after its time."""
        if not isinstance(plan.header, VideoHeader):
            return super().placeholder(plan, spelling)
        frame = f"{AROUND}{WHOLE}{spelling(self.placeholder_tokens['video'])}{AROUND}"
        return described(plan.header, sampled_frames(plan), frame)
