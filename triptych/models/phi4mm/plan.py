"""Plans the images, audio and prompts of Phi-4-multimodal. Frontend; numpy only."""

from typing import Any

from triptych.errors import BadMediaSize
from triptych.models.backbones.rope import context_length
from triptych.models.base import AUDIO, VISION, ModelConfig, Options, at_most
from triptych.models.phi4mm.audio import RATE, STRIDE, LogFilterbank, audio_config, check_extractor
from triptych.models.phi4mm.config import SPEECH_LORA, VISION_LORA, audio_token, image_token, loras, vision_config
from triptych.models.phi4mm.tiles import canvas_of, grid_of, most_tiles
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.types import AudioHeader, ImageHeader, ItemContext, ItemPart, ItemPlan

LORA_OF = {"image": VISION_LORA, "audio": SPEECH_LORA}
"""A request with images and audio has the vision LoRA."""
OPTIONS: Options = {"dynamic_hd": at_most(36)}
"""The largest number of tiles that an image is cut into, within the model's own number."""


class Phi4MMPlanner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type.

    An image has two parts: all tiles, since lines of embeddings go through several, and then the whole. A part's
    payload is the grid of tiles: columns and rows, or nothing for the whole. A clip is one part, whose payload is 1 if
    the request has images, too: then audio is projected otherwise.
    """

    options = OPTIONS

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._vision = vision_config(config)
        self._tile = self._vision.clip
        self._most = most_tiles(preprocessor_config, self._tile.image_size)
        super().__init__(
            {"image": image_token(config), "audio": audio_token(config)},
            context_length=context_length(config),
            max_image_pixels=self._most * self._tile.image_size**2,
        )
        self._audio = audio_config(config)
        check_extractor(preprocessor_config)
        known = {lora.name for lora in loras(config)}
        self.loras = {modality: lora for modality, lora in LORA_OF.items() if lora in known}

    def _plan_audio(self, header: AudioHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for a clip shorter than a window."""
        frames = LogFilterbank.num_frames(header.resampled(RATE))
        rows = -(-frames // STRIDE)
        tile = self._tile  # an image's patch is the unit of cost
        cost = rows * self._audio.num_layers * self._audio.hidden_size**2 / (tile.num_layers * tile.hidden_size**2)
        part = ItemPart(((0, rows),), frames, cost, AUDIO, (int("image" in context.modalities),))
        return ItemPlan(
            modality="audio",
            header=header,
            resized_height=0,
            resized_width=0,
            grid=(frames, 1, 1),
            rows=rows,
            patches=frames,
            cost=cost,
            parts=(part,),
        )

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``dynamic_hd`` of the request is the largest number of tiles, which an upper bound of the area limits, too.
        Raises BadMediaSize for a thin image, and for a ``dynamic_hd`` above the model's own."""
        tile, most = self._tile, int(context.options.get("dynamic_hd", self._most))
        if most > self._most:
            raise BadMediaSize(f"dynamic_hd {most} exceeds the model's own, {self._most}")
        if context.bounds.max_pixels:
            most = min(most, max(context.bounds.max_pixels // tile.image_size**2, 1))
        grid = grid_of(header.width, header.height, tile.image_size, most)
        canvas = canvas_of(header.width, header.height, grid, tile.image_size, tile.patch_size)
        tiles, first = grid[0] * grid[1], canvas.embeddings
        whole = self._vision.whole_rows
        parts = (
            ItemPart(((0, first),), tiles * tile.side**2, tiles * tile.cost, VISION, grid),
            ItemPart(((first, whole),), tile.side**2, tile.cost, VISION),
        )
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=canvas.rows * tile.image_size,
            resized_width=canvas.columns * tile.image_size,
            grid=(1, canvas.rows * tile.side, canvas.columns * tile.side),
            rows=first + whole,
            patches=(tiles + 1) * tile.side**2,
            cost=(tiles + 1) * tile.cost,
            parts=parts,
            bounds=context.bounds,
        )
