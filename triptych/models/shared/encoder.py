"""A family whose towers are transformers' own; the one that sees takes any grid of patches, and gives one embedding per
merged patch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.errors import CheckpointError, PlanMismatch
from triptych.layers.decoder import Decoder
from triptych.layers.encoder import Encoder, TowerItem, load_module
from triptych.layers.linear import WeightFormat
from triptych.layers.parallel import SINGLE_RANK, Group
from triptych.layers.pinned import to_device
from triptych.models.base import VISION, ModelConfig
from triptych.models.registry import resolve
from triptych.models.shared.backbone import BackboneDefaults, decoder_config, decoder_keys
from triptych.models.shared.settings import setting

if TYPE_CHECKING:  # transformers is imported where the tower is loaded: a language instance does without
    from transformers import PreTrainedModel


class PatchTower:
    """The vision tower: patches in, embedding and deepstack features out. See ``triptych.layers.encoder.Encoder``."""

    def __init__(self, module: "PreTrainedModel", embedding_width: int) -> None:
        self.module = module
        self.embedding_width = embedding_width
        self._patches_per_row = module.config.spatial_merge_size**2

    @torch.inference_mode()
    def encode(self, inputs: Sequence[TowerItem]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
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
        rows = torch.cat((output.pooler_output, *features), dim=1)  # [rows of all items, embedding_width]
        return list(rows.split([prod(item.grid) // self._patches_per_row for item in inputs]))


class Encoders:
    """Several towers as one: each input goes to its own. See ``triptych.layers.encoder.Encoder``.

    All rows have one width. Where a tower has no deepstack features its rows end in zeros, which the decoder adds to
    what it has: that changes nothing, so no row has to say what it lacks.
    """

    def __init__(self, towers: Mapping[str, Encoder], embedding_width: int) -> None:
        self.towers = towers
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[TowerItem]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        rows: dict[int, Tensor] = {}
        for name, tower in self.towers.items():
            numbers = [number for number, item in enumerate(inputs) if item.tower == name]
            made = tower.encode([inputs[number] for number in numbers]) if numbers else []
            rows |= zip(numbers, (F.pad(one, (0, self.embedding_width - one.shape[1])) for one in made), strict=True)
        return [rows[number] for number in range(len(inputs))]


@dataclass(frozen=True)
class TowerSpec:
    """What one of a family's towers is. ``module`` and ``config`` are import strings of transformers' classes;
    ``section`` is the config's part about it, in which ``width`` names the setting that says how wide an embedding is,
    ``deepstack`` the one that lists the layers whose features follow it, if any. ``tower`` makes of the module, and of
    the width of its rows, what encodes."""

    module: str
    config: str
    width: str
    deepstack: str | None = None
    name: str = VISION
    section: str = "vision_config"
    tower: Callable[["PreTrainedModel", int], Encoder] = PatchTower


@dataclass(frozen=True)
class WeightPrefixes:
    """How a checkpoint names its tensors: the prefixes of its towers by their names, that of the decoder, the output
    projection, and the prefixes of ``others``, which aren't served."""

    towers: Mapping[str, str]
    decoder: str
    head: str = "lm_head.weight"
    others: tuple[str, ...] = ()


# In files older than transformers 4.52, and in those that it saves for such families, the decoder has the names of a
# model of text alone. The longer prefixes come first: the shorter are theirs, too.
LAYOUTS = (
    WeightPrefixes({VISION: "model.visual."}, "model.language_model."),
    WeightPrefixes({VISION: "visual."}, "model."),
)


class PatchAdapter:
    """``ModelAdapter`` of a subclass's ``specs``, the first of which is the tower that sees, and ``backbone``.

    Raises CheckpointError for a config that lacks a setting or asks for something that isn't served.
    """

    specs: ClassVar[Sequence[TowerSpec]]
    backbone: ClassVar[BackboneDefaults]
    layouts: ClassVar[Sequence[WeightPrefixes]] = LAYOUTS

    def __init__(self, config: ModelConfig) -> None:
        text = self.text_config(config)
        self._sections = {spec.name: setting(config, spec.section, dict) for spec in self.specs}
        vision, key = self._sections[VISION], self.specs[0].deepstack
        deepstack = setting(vision, key, list) if key else []
        self.decoder_config = decoder_config(
            text,
            self.backbone,
            # The top level decides, as in transformers; saved MoE files have a text section that contradicts it.
            tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            num_deepstack_layers=len(deepstack),
        )
        self._check_deepstack(deepstack)
        for spec in self.specs:
            self._check_width(spec)
        self.embedding_width = self.decoder_config.hidden_size * (1 + len(deepstack))

    def text_config(self, config: ModelConfig) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return setting(config, "text_config", dict)

    def tower_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the towers' half, sorted. Raises CheckpointError for a key that is in neither half."""
        return self._split(all_keys)[0]

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the decoder's half, sorted. Raises CheckpointError for a key that is in neither half."""
        return self._split(all_keys)[1]

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """The towers alone. Raises CheckpointError for a config of theirs that transformers refuses, and for tensors
        missing, misshapen or unknown, and ConfigError for a weight format that the device can't use."""
        towers: dict[str, Encoder] = {}
        all_keys, prefixes = self.tower_keys(checkpoint.tensors), self.halves(checkpoint.tensors).towers
        hidden_size = self.decoder_config.hidden_size
        for spec in self.specs:
            prefix = prefixes[spec.name]
            keys = {key.removeprefix(prefix): key for key in all_keys if key.startswith(prefix)}
            config, kind = self._transformers_config(spec), resolve(spec.module)
            module = load_module(kind, config, checkpoint, keys, weights=weights, device=device)
            towers[spec.name] = spec.tower(module, self.embedding_width if spec.deepstack else hidden_size)
        return towers[VISION] if len(towers) == 1 else Encoders(towers, self.embedding_width)

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """The decoder alone. Raises CheckpointError for tensors missing, misshapen or unknown, and ConfigError for a
        weight format that the device can't use and a group whose size doesn't divide the decoder."""
        self._split(checkpoint.tensors)
        halves = self.halves(checkpoint.tensors)
        keys = decoder_keys(self.decoder_config, checkpoint, halves.decoder, halves.head)
        return Decoder.load(self.decoder_config, checkpoint, keys, weights, device, group=group)

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Bytes in the checkpoint of each half: ``{"tower": …, "decoder": …}``."""
        tower, decoder = self._split(tensors)
        return {
            "tower": sum(tensors[key].num_bytes for key in tower),
            "decoder": sum(tensors[key].num_bytes for key in decoder),
        }

    def halves(self, all_keys: Iterable[str]) -> WeightPrefixes:
        """How this checkpoint names its tensors: as the first of ``layouts`` whose decoder is there."""
        prefixes = tuple(layout.decoder for layout in self.layouts)
        found = {prefix for prefix in prefixes for key in all_keys if key.startswith(prefix)}
        return next((layout for layout in self.layouts if layout.decoder in found), self.layouts[0])

    def _split(self, all_keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """The keys of the towers' half and of the decoder's half."""
        keys = sorted(all_keys)
        halves = self.halves(keys)
        towers = tuple(halves.towers.values())
        tower: list[str] = []
        decoder: list[str] = []
        for key in keys:
            if key.startswith(towers):
                tower.append(key)
            elif key.startswith(halves.decoder) or key == halves.head:
                decoder.append(key)
            elif not key.startswith(halves.others):
                prefixes = "… nor in ".join((*towers, halves.decoder))
                raise CheckpointError(f"tensor {key!r} is neither in {prefixes}…")
        return tower, decoder

    def _transformers_config(self, spec: TowerSpec) -> Any:
        """A tower's config for transformers."""
        from huggingface_hub.errors import StrictDataclassError

        # Published files give the section the whole model's type; transformers, too, overrides it.
        settings = {name: value for name, value in self._sections[spec.name].items() if name != "model_type"}
        try:
            return resolve(spec.config)(**settings)
        except StrictDataclassError as error:
            raise CheckpointError(f"config.json: {spec.section}: {error}") from error

    def _check_deepstack(self, deepstack: list[int]) -> None:
        """Raises CheckpointError where the vision tower and the decoder have no such layers."""
        depth, decoder = setting(self._sections[VISION], "depth", int), self.decoder_config
        if len(deepstack) != len(set(range(depth)).intersection(deepstack)):
            raise CheckpointError(f"config.json: {self.specs[0].deepstack} {deepstack} in a tower of depth {depth}")
        if len(deepstack) > decoder.num_layers:
            raise CheckpointError(
                f"config.json: {len(deepstack)} deepstack features for a decoder of {decoder.num_layers} layers"
            )

    def _check_width(self, spec: TowerSpec) -> None:
        """Raises CheckpointError where a tower and the decoder don't fit together."""
        width, hidden_size = setting(self._sections[spec.name], spec.width, int), self.decoder_config.hidden_size
        if width != hidden_size:
            raise CheckpointError(f"config.json: the tower's {spec.width} {width} isn't the hidden size {hidden_size}")
