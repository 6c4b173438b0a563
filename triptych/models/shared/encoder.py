"""Adapter of families whose towers come from transformers. Their vision tower takes any grid of patches and returns one
embedding per merged patch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, PlanMismatch
from triptych.layers.encoder import Encoder, PreprocessedPart, load_module
from triptych.layers.linear import WeightFormat
from triptych.layers.pinned import concatenated
from triptych.layers.shaped_calls import Call, ShapedCalls
from triptych.models.base import VISION, ModelConfig
from triptych.models.registry import backbone_of, resolve
from triptych.models.shared.grid_tables import GridTable, grid_tables
from triptych.models.shared.settings import setting
from triptych.models.shared.split_adapter import SplitAdapter, WeightPrefixes
from triptych.models.shared.vision_transformer import VisionTransformer

if TYPE_CHECKING:  # transformers is imported only where a tower is loaded, so not in a language instance
    from transformers import PreTrainedModel

Grid = tuple[int, int, int]


class VisionTower:
    """``Encoder`` that turns patches of pixels into embeddings and deepstack features."""

    def __init__(self, module: "PreTrainedModel", embedding_width: int, tables: Sequence[GridTable] = ()) -> None:
        """``tables`` make all that ``module`` derives from grids; without them, it derives that itself in each call."""
        self.module = module
        self.embedding_width = embedding_width
        self.tables = tables
        self.calls = ShapedCalls[tuple[Grid, ...]](self._for_grids)
        """Calls of the module for inputs of these grids."""
        self._patches_per_row = module.config.spatial_merge_size**2

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        for item in inputs:
            if item.patches.shape[0] != prod(item.grid):
                raise PlanMismatch(f"{item.patches.shape[0]} patches don't fill a grid of {item.grid}")
        device, dtype = self.module.device, self.module.dtype
        patches = concatenated([torch.from_numpy(item.patches) for item in inputs], dtype, device)
        [rows] = self.calls(tuple(item.grid for item in inputs), patches)
        return list(rows.split([prod(item.grid) // self._patches_per_row for item in inputs]))

    def _for_grids(self, grids: tuple[Grid, ...]) -> Call:
        on_cpu = torch.tensor(grids)
        arguments = grid_tables(self.module, on_cpu, self.tables)
        arguments["grid_thw"] = on_cpu if self.tables else on_cpu.to(self.module.device)

        def rows_of(patches: Tensor) -> list[Tensor]:
            output = self.module(patches, **arguments)
            features = getattr(output, "deepstack_features", None) or ()
            return [torch.cat((output.pooler_output, *features), dim=1)]  # [rows of all items, embedding_width]

        return rows_of


class MultiTowerEncoder:
    """``Encoder`` of several towers, which passes each input to the tower that the input names.

    All embeddings have one width. Those of a tower without deepstack features are padded with zeros, which change
    nothing when the decoder adds them.
    """

    def __init__(self, towers: Mapping[str, Encoder], embedding_width: int) -> None:
        self.towers = towers
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        rows: dict[int, Tensor] = {}
        for name, tower in self.towers.items():
            numbers = [number for number, item in enumerate(inputs) if item.tower == name]
            made = tower.encode([inputs[number] for number in numbers]) if numbers else []
            rows |= zip(numbers, (F.pad(one, (0, self.embedding_width - one.shape[1])) for one in made), strict=True)
        return [rows[number] for number in range(len(inputs))]


def recordable_calls(encoder: Encoder) -> Iterator[ShapedCalls[Any]]:
    """Yield the calls of an encoder's towers that may be recorded: their shape says all that the CPU needs to know."""
    if isinstance(encoder, MultiTowerEncoder):
        for tower in encoder.towers.values():
            yield from recordable_calls(tower)
    elif isinstance(encoder, VisionTower):
        if encoder.tables:
            yield encoder.calls
    elif isinstance(encoder, nn.Module):
        yield from (one.calls for one in encoder.modules() if isinstance(one, VisionTransformer))


@dataclass(frozen=True)
class TowerSpec:
    """Description of one of a family's towers."""

    module: str
    """Import string of transformers' class."""
    config: str
    """Import string of that class's config."""
    width: str
    """Name of the setting with the width of an embedding."""
    deepstack: str | None = None
    """Name of the setting that lists the layers with deepstack features, if the tower has any."""
    name: str = VISION
    section: str = "vision_config"
    """The tower's section of the checkpoint's config."""
    replaced: tuple[str, ...] = ()
    """Names of the tower's classes that modules of our own replace."""
    make_tower: Callable[["PreTrainedModel", int], Encoder] = VisionTower
    """Makes the tower of the loaded module and its embedding width, deepstack features included."""


# In files older than transformers 4.52, and in those that it saves for such families, the decoder's tensors are named
# as in a text-only model. Longer prefixes come first, because the shorter ones match them too.
LAYOUTS = (
    WeightPrefixes({VISION: "model.visual."}, "model.language_model."),
    WeightPrefixes({VISION: "visual."}, "model."),
)


class MultimodalAdapter(SplitAdapter):
    """``ModelAdapter`` of a family with towers; subclasses set ``specs``.

    Raises CheckpointError for a config that lacks a setting or asks for something unsupported.
    """

    specs: ClassVar[Sequence[TowerSpec]]
    """The towers, the vision tower first."""
    layouts: Sequence[WeightPrefixes] = LAYOUTS

    def __init__(self, config: ModelConfig) -> None:
        text = self.text_config(config)
        self._sections = {spec.name: setting(config, spec.section, dict) for spec in self.specs}
        vision, key = self._sections[VISION], self.specs[0].deepstack
        deepstack = setting(vision, key, list) if key else []
        self.decoder_config = backbone_of(config).decoder_config(
            text,
            # The top level takes precedence, as in transformers: the text section of saved MoE files contradicts it.
            tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            num_deepstack_layers=len(deepstack),
        )
        self._check_deepstack(deepstack)
        for spec in self.specs:
            self._check_width(setting(self._sections[spec.name], spec.width, int), spec.width)
        self.embedding_width = self.decoder_config.hidden_size * (1 + len(deepstack))

    @classmethod
    def describe_towers(cls) -> str:
        """See ``SplitAdapter``."""
        return ", ".join(
            spec.module.rpartition(":")[2] + (" and deepstack features" if spec.deepstack else "") for spec in cls.specs
        )

    @classmethod
    def tower_imports(cls) -> list[str]:
        """See ``SplitAdapter``."""
        return [name for spec in cls.specs for name in (spec.module, spec.config)]

    def text_config(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the part of the config that describes the language model."""
        return setting(config, "text_config", dict)

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the towers alone.

        Raises CheckpointError for missing, misshapen or unknown tensors and for a tower config that transformers
        rejects, and ConfigError for a weight format that the device doesn't support.
        """
        towers: dict[str, Encoder] = {}
        all_keys = self.tower_keys(checkpoint.tensors)
        hidden_size = self.decoder_config.hidden_size
        for spec in self.specs:
            keys = _keys_of(spec.name, all_keys)
            config, kind = self._transformers_config(spec), resolve(spec.module)
            module = load_module(kind, config, checkpoint, keys, weights=weights, device=device, replaced=spec.replaced)
            towers[spec.name] = spec.make_tower(module, self.embedding_width if spec.deepstack else hidden_size)
        towers |= self.load_own_towers(checkpoint, all_keys, weights, device)
        return towers[VISION] if len(towers) == 1 else MultiTowerEncoder(towers, self.embedding_width)

    def load_own_towers(
        self, checkpoint: Checkpoint, keys: Mapping[str, str], weights: WeightFormat, device: torch.device
    ) -> dict[str, Encoder]:
        """Return the towers of our own layers, by name; ``keys`` is what ``tower_keys`` returns. Raises as
        ``load_encoder`` does."""
        return {}

    def _transformers_config(self, spec: TowerSpec) -> Any:
        """Return a tower's config as transformers' config class."""
        from huggingface_hub.errors import StrictDataclassError

        # Published files put the whole model's type into the section; transformers overrides it as well.
        settings = {name: value for name, value in self._sections[spec.name].items() if name != "model_type"}
        try:
            return resolve(spec.config)(**settings)
        except StrictDataclassError as error:
            raise CheckpointError(f"config.json: {spec.section}: {error}") from error

    def _check_deepstack(self, deepstack: list[int]) -> None:
        """Raises CheckpointError for layers that the vision tower doesn't have, or more layers than the decoder's."""
        depth, decoder = setting(self._sections[VISION], "depth", int), self.decoder_config
        if len(deepstack) != sum(layer in deepstack for layer in range(depth)):
            raise CheckpointError(f"config.json: {self.specs[0].deepstack} {deepstack} in a tower of depth {depth}")
        if len(deepstack) > decoder.num_layers:
            raise CheckpointError(
                f"config.json: {len(deepstack)} deepstack features for a decoder of {decoder.num_layers} layers"
            )

    def _check_width(self, width: int, name: str) -> None:
        """Raises CheckpointError if a tower's embeddings, whose width is the setting ``name``, don't have the decoder's
        hidden size."""
        if width != (hidden_size := self.decoder_config.hidden_size):
            raise CheckpointError(f"config.json: the tower's {name} {width} isn't the hidden size {hidden_size}")


def _keys_of(tower: str, keys: Mapping[str, str]) -> dict[str, str]:
    """Return the checkpoint's keys of a tower's tensors by the tower's own names."""
    return {name.removeprefix(f"{tower}."): key for name, key in keys.items() if name.startswith(f"{tower}.")}
