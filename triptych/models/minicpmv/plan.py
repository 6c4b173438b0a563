"""Plans MiniCPM-V's images, videos and prompts. Frontend; numpy only.

The reference is ``MiniCPMV4_6Processor`` in transformers and, of earlier versions, the published processor. An image,
or a frame of a video, becomes the whole and slices of it. Items are numbered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triptych.errors import UnsupportedMedia
from triptych.models.backbones.rope import context_length
from triptych.models.base import FRAME_OPTIONS, VISION, MediaToken, ModelConfig, Options, at_most
from triptych.models.minicpmv.config import UNITS, frame_slices, image_slices, text_config, vision_config
from triptych.models.minicpmv.original import (
    PACKS_FRAMES,
    original_slices,
    original_text_config,
    original_vision_config,
    query_num,
    version_of,
)
from triptych.models.minicpmv.sampling import (
    GroupedSampling,
    PackedSampling,
    SecondsSampling,
    StepSampling,
    grouped_frames,
)
from triptych.models.minicpmv.slices import Cut, Slices
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.plain_planner import PlainPlanner, check_no_bounds
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan, MediaHeader, VideoHeader

PLACEHOLDER = "<unk>"
"""Token of an embedding until version 4.5."""
IMAGE_TEXT = "(<image>./</image>)"
"""What conversations with these versions have for an image; it is no token."""
VIDEO_TEXT = "(<video>./</video>)"
"""The same for a video. Published code has ``IMAGE_TEXT`` for each frame, which would be taken for images."""

SLICE_OPTIONS: Options = {"max_slice_nums": at_most(64)}
"""The most slices that an image, or a frame of a video, is cut into."""
MARKERS = frozenset(f"<{slash}{name}>" for name in ("image", "slice", "image_id") for slash in ("", "/"))
"""Tokens around embeddings and numbers."""


@dataclass(frozen=True)
class PieceTower:
    """What becomes of a piece of an image."""

    patch_size: int
    rows: Callable[[int], int]
    """Returns the embeddings of a piece of a number of patches."""
    cost: Callable[[int], float]
    """Returns the work of encoding it; see ``VisionCostModel``."""


def _pieces(cut: Cut, payloads: Sequence[tuple[int, ...]], tower: PieceTower) -> tuple[ItemPart, ...]:
    """Return the pieces of images that are cut alike, with their rows one after the other's. The frames of a payload
    are one image, whose pieces are those of all frames together."""
    whole, piece = (width * height // tower.patch_size**2 for width, height in (cut.whole, cut.slice))
    rows, costs = (tower.rows(whole), tower.rows(piece)), (tower.cost(whole), tower.cost(piece))
    parts, first_row = [], 0
    for payload in payloads:
        frames = max(len(payload) - 2, 1)
        parts.append(ItemPart(((first_row, rows[0]),), frames * whole, frames * costs[0], VISION, payload))
        first_row += rows[0]
        for _ in range(cut.columns * cut.rows):
            parts.append(ItemPart(((first_row, rows[1]),), frames * piece, frames * costs[1], VISION))
            first_row += rows[1]
    return tuple(parts)


def _as_asked(slices: Slices, context: ItemContext) -> Slices:
    """Return the same with the bound of a request's ``max_slice_nums``."""
    return slices.at_most(int(context.options.get("max_slice_nums", slices.max_slices)))


class SlicePlanner(PlainPlanner):
    """What the planners of all versions share. ``_numbers`` is whether items are numbered."""

    _numbers: bool
    _between_frames = ""

    def _cut_image(self, header: ImageHeader, context: ItemContext, slices: Slices, tower: PieceTower) -> ItemPlan:
        """``bounds`` are those of the area of all slices. Raises UnsupportedMedia for a lower one."""
        bounds = context.bounds
        if bounds.min_pixels:
            raise UnsupportedMedia("the model takes no min_pixels")
        slices = _as_asked(slices, context)
        if bounds.max_pixels:
            slices = slices.at_most(min(slices.max_slices, bounds.max_pixels // slices.scale**2))
        cut = slices.cut(header.width, header.height)
        return self._item_plan(header, cut, [(cut.columns, cut.rows)], context, tower)

    def _item_plan(
        self,
        header: MediaHeader,
        cut: Cut,
        payloads: Sequence[tuple[int, ...]],
        context: ItemContext,
        tower: PieceTower,
    ) -> ItemPlan:
        """Plan images that are cut alike; ``payloads`` are those of each image's whole, and end with the columns and
        rows of its slices."""
        (width, height), size = cut.canvas, tower.patch_size
        parts = _pieces(cut, payloads, tower)
        return ItemPlan(
            modality="video" if isinstance(header, VideoHeader) else "image",
            header=header,
            resized_height=height,
            resized_width=width,
            grid=(len(payloads), height // size, width // size),
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

    def num_frames(self, plan: ItemPlan) -> int:
        """Return how many frames of a planned video are sampled."""
        groups, _ = grouped_frames(plan)
        return sum(map(len, groups))

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return a placeholder for the whole and, in lines, for each slice, between markers; of a video, that for each
        frame."""
        piece = spelling(self.placeholder_tokens[plan.modality])
        columns, rows = plan.parts[0].payload[-2:]
        lines = "\n".join([f"<slice>{piece}</slice>" * columns] * rows)
        return self._between_frames.join([f"<image>{piece}</image>{lines}"] * plan.grid[0])

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for each piece."""
        return [part.rows for part in plan.parts]


class MiniCPMV46Planner(SlicePlanner):
    """``Planner`` of model type ``minicpmv4_6``. Raises CheckpointError for a missing key or a value of the wrong
    type."""

    options = FRAME_OPTIONS | SLICE_OPTIONS | {"downsample_mode": Literal["4x", "16x"]}
    """``downsample_mode`` 4x makes four times as many embeddings as 16x."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
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
        )
        self.media_tokens |= MARKERS

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """See ``_cut_image``."""
        slices = self._in_mode(self._slices, context)
        return self._cut_image(header, context, slices, self._tower(slices.unit))

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Each frame is cut as an image is; see ``sliced_frames``. Raises UnsupportedMedia for invalid sampling and for
        bounds."""
        check_no_bounds(context)
        slices = _as_asked(self._in_mode(self._frame_slices, context), context)
        cut = slices.cut(header.width, header.height)
        frames = self._sampling.for_request(context.sampling).frames(header)
        payloads = [(frame, cut.columns, cut.rows) for frame in frames]
        return self._item_plan(header, cut, payloads, context, self._tower(slices.unit))

    def _in_mode(self, slices: Slices, context: ItemContext) -> Slices:
        mode = context.options.get("downsample_mode")
        return slices if mode is None else slices.in_units(UNITS[str(mode)])

    def _tower(self, unit: int) -> PieceTower:
        return PieceTower(
            self._vision.clip.patch_size,
            lambda patches: patches // unit**2,
            lambda patches: self._vision.cost(patches, unit),
        )


class MiniCPMVPlanner(SlicePlanner):
    """``Planner`` of model type ``minicpmv``. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = FRAME_OPTIONS | SLICE_OPTIONS
    template_texts: Mapping[str, str] = {"image": IMAGE_TEXT, "video": VIDEO_TEXT}
    _between_frames = "\n"

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        vision, self._slices = original_vision_config(config), original_slices(config, preprocessor_config)
        queries = query_num(config, preprocessor_config)
        cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size)
        self._tower = PieceTower(vision.patch_size, lambda _: queries, cost_model.cost)
        numbers = setting(preprocessor_config, "use_image_id", bool, default=True, file=PREPROCESSOR_FILE)
        self._numbers = setting(config, "use_image_id", bool, default=numbers)
        kind: type[GroupedSampling]
        kind, self._frame_slices = (PackedSampling, 1) if version_of(config) == PACKS_FRAMES else (StepSampling, 2)
        self._sampling = kind.from_config({}, 1)
        super().__init__(
            {"image": PLACEHOLDER, "video": PLACEHOLDER},
            context_length=context_length(original_text_config(config)),
            max_image_pixels=self._slices.max_pixels,
        )
        self.media_tokens |= MARKERS

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """See ``_cut_image``."""
        return self._cut_image(header, context, self._slices, self._tower)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Each frame is cut as an image is, by default into fewer slices; see ``grouped_frames``. Raises
        UnsupportedMedia for invalid sampling and for bounds."""
        check_no_bounds(context)
        slices = self._slices.at_most(int(context.options.get("max_slice_nums", self._frame_slices)))
        cut = slices.cut(header.width, header.height)
        groups = self._sampling.for_request(context.sampling).groups(header)
        payloads = [(*group, cut.columns, cut.rows) for group in groups]
        return self._item_plan(header, cut, payloads, context, self._tower)

    def label(self, plan: ItemPlan, context: ItemContext) -> str:
        """Return an image's number. Published code numbers nothing in requests with videos."""
        return super().label(plan, context) if "video" not in {plan.modality, *context.modalities} else ""
