"""A family whose tower is transformers' own, takes any grid of patches, and gives one embedding per merged patch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from triptych.errors import CheckpointError, PlanMismatch
from triptych.families.base import ModelConfig
from triptych.families.registry import resolve
from triptych.families.shared.decoder import Backbone, decoder_config, decoder_keys
from triptych.families.shared.settings import setting
from triptych.models.checkpoint import Checkpoint
from triptych.models.decoder import Decoder
from triptych.models.layers import WeightFormat
from triptych.models.parallel import SINGLE_RANK, Group
from triptych.models.pinned import to_device
from triptych.models.safetensors_header import TensorInfo
from triptych.models.towers import TowerItem, load_module

if TYPE_CHECKING:  # transformers is imported where the tower is loaded: a language instance does without
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TowerSpec:
    """What a family's tower is. ``module`` and ``config`` are import strings of transformers' classes; ``width`` names
    the setting of the vision config that says how wide an embedding is, ``deepstack`` the one that lists the layers
    whose features follow it, if any."""

    module: str
    config: str
    width: str
    deepstack: str | None = None


@dataclass(frozen=True)
class Halves:
    """How a checkpoint names its tensors: the prefixes of the tower's and the decoder's, the output projection, and the
    prefixes of ``others``, which aren't served."""

    tower: str
    decoder: str
    head: str = "lm_head.weight"
    others: tuple[str, ...] = ()


# In files older than transformers 4.52, and in those that it saves for such families, the decoder has the names of a
# model of text alone. The longer prefixes come first: the shorter are theirs, too.
LAYOUTS = (Halves("model.visual.", "model.language_model."), Halves("visual.", "model."))


class PatchTower:
    """The vision tower: patches in, embedding and deepstack features out. See ``triptych.models.towers.Tower``."""

    def __init__(self, module: "PreTrainedModel", row_width: int, merge_size: int) -> None:
        self.module = module
        self.row_width = row_width
        self._patches_per_row = merge_size**2

    @torch.inference_mode()
    def encode(self, inputs: Sequence[TowerItem]) -> list[Tensor]:
        """See ``triptych.models.towers.Tower``."""
        if not inputs:
            return []
        for item in inputs:
            if item.patches.shape[0] != prod(item.grid):
                raise PlanMismatch(f"{item.patches.shape[0]} patches don't fill a grid of {item.grid}")
        device = self.module.device
        [patches] = to_device([torch.cat([torch.from_numpy(item.patches) for item in inputs])], device)
        grids = torch.tensor([item.grid for item in inputs], device=device)  # [items, 3]
        output = self.module(patches.to(self.module.dtype), grid_thw=grids)
        features = getattr(output, "deepstack_features", None) or ()
        rows = torch.cat((output.pooler_output, *features), dim=1)  # [rows of all items, row_width]
        return list(rows.split([prod(item.grid) // self._patches_per_row for item in inputs]))


class PatchTowerFamily:
    """``TowerFamily`` of a subclass's ``spec`` and ``backbone``.

    Raises CheckpointError for a config that lacks a setting or asks for something that isn't served.
    """

    spec: ClassVar[TowerSpec]
    backbone: ClassVar[Backbone]
    layouts: ClassVar[Sequence[Halves]] = LAYOUTS

    def __init__(self, config: ModelConfig) -> None:
        text = self.text_config(config)
        self._vision = setting(config, "vision_config", dict)
        deepstack = setting(self._vision, self.spec.deepstack, list) if self.spec.deepstack else []
        self.decoder_config = decoder_config(
            text,
            self.backbone,
            # The top level decides, as in transformers; saved MoE files have a text section that contradicts it.
            tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            num_deepstack_layers=len(deepstack),
        )
        self._check_vision(deepstack)
        self.row_width = self.decoder_config.hidden_size * (1 + len(deepstack))

    def text_config(self, config: ModelConfig) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return setting(config, "text_config", dict)

    def tower_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the tower's half, sorted. Raises CheckpointError for a key that is in neither half."""
        return self._split(all_keys)[0]

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the decoder's half, sorted. Raises CheckpointError for a key that is in neither half."""
        return self._split(all_keys)[1]

    def load_tower(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> PatchTower:
        """The vision tower alone. Raises CheckpointError for a vision config that transformers refuses, and for tensors
        missing, misshapen or unknown, and ConfigError for a weight format that the device can't use."""
        prefix = self.halves(checkpoint.tensors).tower
        keys = {key.removeprefix(prefix): key for key in self.tower_keys(checkpoint.tensors)}
        config = self._transformers_config()
        module = load_module(resolve(self.spec.module), config, checkpoint, keys, weights=weights, device=device)
        return PatchTower(module, self.row_width, config.spatial_merge_size)

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """The decoder alone. Raises CheckpointError for tensors missing, misshapen or unknown, and ConfigError for a
        weight format that the device can't use and a group whose size doesn't divide the decoder."""
        self._split(checkpoint.tensors)
        halves = self.halves(checkpoint.tensors)
        keys = decoder_keys(self.decoder_config, checkpoint, halves.decoder, halves.head)
        return Decoder.load(self.decoder_config, checkpoint, keys, weights, device, group=group)

    def stage_bytes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Bytes in the checkpoint of each half: ``{"tower": …, "decoder": …}``."""
        tower, decoder = self._split(tensors)
        return {
            "tower": sum(tensors[key].num_bytes for key in tower),
            "decoder": sum(tensors[key].num_bytes for key in decoder),
        }

    def halves(self, all_keys: Iterable[str]) -> Halves:
        """How this checkpoint names its tensors: as the first of ``layouts`` whose decoder is there."""
        prefixes = tuple(layout.decoder for layout in self.layouts)
        found = {prefix for prefix in prefixes for key in all_keys if key.startswith(prefix)}
        return next((layout for layout in self.layouts if layout.decoder in found), self.layouts[0])

    def _split(self, all_keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """The keys of the tower's half and of the decoder's half."""
        keys = sorted(all_keys)
        halves = self.halves(keys)
        tower: list[str] = []
        decoder: list[str] = []
        for key in keys:
            if key.startswith(halves.tower):
                tower.append(key)
            elif key.startswith(halves.decoder) or key == halves.head:
                decoder.append(key)
            elif not key.startswith(halves.others):
                raise CheckpointError(f"tensor {key!r} is neither in {halves.tower}… nor in {halves.decoder}…")
        return tower, decoder

    def _transformers_config(self) -> Any:
        """The tower's config for transformers."""
        from huggingface_hub.errors import StrictDataclassError

        # Published files give the section the whole model's type; transformers, too, overrides it.
        settings = {name: value for name, value in self._vision.items() if name != "model_type"}
        try:
            return resolve(self.spec.config)(**settings)
        except StrictDataclassError as error:
            raise CheckpointError(f"config.json: vision_config: {error}") from error

    def _check_vision(self, deepstack: list[int]) -> None:
        """Raises CheckpointError where tower and decoder don't fit together."""
        depth, decoder = setting(self._vision, "depth", int), self.decoder_config
        if len(deepstack) != len(set(range(depth)).intersection(deepstack)):
            raise CheckpointError(f"config.json: {self.spec.deepstack} {deepstack} in a tower of depth {depth}")
        if len(deepstack) > decoder.num_layers:
            raise CheckpointError(
                f"config.json: {len(deepstack)} deepstack features for a decoder of {decoder.num_layers} layers"
            )
        width = setting(self._vision, self.spec.width, int)
        if width != decoder.hidden_size:
            raise CheckpointError(
                f"config.json: the tower's {self.spec.width} {width} isn't the hidden size {decoder.hidden_size}"
            )
