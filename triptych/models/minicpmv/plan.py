"""Plans MiniCPM-V 4.6's images, videos and prompts. Frontend; numpy only.

The reference is ``MiniCPMV4_6Processor`` in transformers: an image, or a frame of a video, becomes the whole and slices
of it. Items are numbered.
"""

from collections.abc import Callable, Sequence
from typing import Any

from triptych.errors import UnsupportedMedia
from triptych.models.backbones.rope import context_length
from triptych.models.base import FRAME_OPTIONS, VISION, MediaToken, ModelConfig
from triptych.models.minicpmv.config import UNITS, frame_slices, image_slices, text_config, vision_config
from triptych.models.minicpmv.sampling import SecondsSampling
from triptych.models.minicpmv.slices import Cut, Slices
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import MAX_SOURCE_PIXELS
from triptych.models.shared.settings import setting
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan, MediaHeader, OptionValue, VideoHeader

SLICE_OPTIONS = frozenset(("max_slice_nums", "downsample_mode"))


class MiniCPMV46Planner(PlainPlanner):
    """``Planner`` of model type ``minicpmv4_6``. Raises CheckpointError for a missing key or a value of the wrong
    type."""

    options = SLICE_OPTIONS | FRAME_OPTIONS

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        self._vision = vision_config(config)
        self._slices = image_slices(config, preprocessor_config)
        self._frame_slices = frame_slices(config, video_config)
        self._sampling = SecondsSampling.from_config(video_config or {}, 1)
        self._numbers = setting(preprocessor_config, "use_image_id", bool, default=True, file=PREPROCESSOR_FILE)
        super().__init__(
            {modality: setting(config, f"{modality}_token_id", int) for modality in ("image", "video")},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._slices.max_pixels,
            max_source_pixels=max_source_pixels,
        )

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of all slices. Raises UnsupportedMedia for a lower one."""
        bounds = context.bounds
        if bounds.min_pixels:
            raise UnsupportedMedia("the model takes no min_pixels")
        asked = context.options
        most = int(asked.get("max_slice_nums", self._slices.max_slices))
        if bounds.max_pixels:
            most = min(most, bounds.max_pixels // self._slices.scale**2)
        slices = self._in_mode(self._slices.at_most(most), asked.get("downsample_mode"))
        cut = slices.cut(header.width, header.height)
        return self._item_plan(header, cut, self._pieces(cut, slices.unit, [(cut.columns, cut.rows)]), context)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Each frame is cut as an image is. Raises UnsupportedMedia for invalid sampling."""
        slices = self._in_mode(self._frame_slices, context.options.get("downsample_mode"))
        cut = slices.cut(header.width, header.height)
        frames = self._sampling.for_request(context.sampling).frames(header)
        parts = self._pieces(cut, slices.unit, [(frame,) for frame in frames])
        return self._item_plan(header, cut, parts, context, len(frames))

    def _in_mode(self, slices: Slices, mode: OptionValue | None) -> Slices:
        return slices if mode is None else slices.in_units(UNITS[str(mode)])

    def _pieces(self, cut: Cut, unit: int, payloads: Sequence[tuple[int, ...]]) -> tuple[ItemPart, ...]:
        """Return the pieces of images that are cut alike; ``payloads`` are those of each image's whole."""
        whole, piece = (width * height // self._vision.clip.patch_size**2 for width, height in (cut.whole, cut.slice))
        costs = self._vision.cost(whole, unit), self._vision.cost(piece, unit)
        parts, first_row = [], 0
        for payload in payloads:
            parts.append(ItemPart(((first_row, whole // unit**2),), whole, costs[0], VISION, payload))
            first_row += whole // unit**2
            for _ in range(cut.columns * cut.rows):
                parts.append(ItemPart(((first_row, piece // unit**2),), piece, costs[1], VISION))
                first_row += piece // unit**2
        return tuple(parts)

    def _item_plan(
        self, header: MediaHeader, cut: Cut, parts: tuple[ItemPart, ...], context: ItemContext, frames: int = 1
    ) -> ItemPlan:
        width, height = cut.canvas
        size = self._vision.clip.patch_size
        return ItemPlan(
            modality="video" if isinstance(header, VideoHeader) else "image",
            header=header,
            resized_height=height,
            resized_width=width,
            grid=(frames, height // size, width // size),
            rows=sum(rows for part in parts for _, rows in part.runs),
            patches=sum(part.patches for part in parts),
            cost=sum(part.cost for part in parts),
            parts=parts,
            bounds=context.bounds,
            sampling=context.sampling,
        )

    def label(self, plan: ItemPlan, context: ItemContext) -> str:
        """Return the item's number among those of its modality."""
        return f"<image_id>{context.index}</image_id>" if self._numbers else ""

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return a placeholder for the whole and, in lines, for each slice, between markers; of a video, that for each
        frame."""
        piece = spelling(self.placeholder_tokens[plan.modality])
        columns, rows = self._grid(plan)
        lines = "\n".join([f"<slice>{piece}</slice>" * columns] * rows)
        return f"<image>{piece}</image>{lines}" * plan.grid[0]

    def _grid(self, plan: ItemPlan) -> tuple[int, int]:
        """Return the columns and rows of the slices of an image or a frame."""
        if isinstance(plan.header, VideoHeader):
            cut = self._frame_slices.cut(plan.header.width, plan.header.height)
            return cut.columns, cut.rows
        columns, rows = plan.parts[0].payload
        return columns, rows

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for each piece."""
        return [part.rows for part in plan.parts]
