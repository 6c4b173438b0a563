"""Qwen3-VL and Qwen3-VL-MoE: the vision tower, the decoder's parameters, and the names in the checkpoints.

Names are the same in the published files and in what ``save_pretrained`` of transformers 5 writes: ``model.visual.…``,
``model.language_model.…``, ``lm_head.weight`` (absent when tied). Only stacked expert weights differ. Published:
``gate_up_proj`` [experts, hidden, 2 * intermediate], ``down_proj`` [experts, intermediate, hidden]; saved: as the
modules hold them, [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from triptych.errors import CheckpointError, PlanMismatch
from triptych.families.base import ModelConfig
from triptych.models.checkpoint import Checkpoint
from triptych.models.decoder import Decoder, DecoderConfig, DecoderKeys, MoEConfig
from triptych.models.layers import WeightFormat
from triptych.models.parallel import SINGLE_RANK, Group
from triptych.models.pinned import to_device
from triptych.models.rope import rope_settings
from triptych.models.safetensors_header import TensorInfo
from triptych.models.towers import TowerItem, load_module

if TYPE_CHECKING:  # transformers is imported where the tower is loaded: a language instance does without
    from transformers import PreTrainedModel
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

TOWER_PREFIX = "model.visual."
DECODER_KEYS = DecoderKeys(prefix="model.language_model.", head="lm_head.weight")


class Qwen3VLTower:
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
        rows = torch.cat((output.pooler_output, *output.deepstack_features), dim=1)  # [rows of all items, row_width]
        return list(rows.split([prod(item.grid) // self._patches_per_row for item in inputs]))


class Qwen3VL:
    """``TowerFamily`` for model types ``qwen3_vl`` and ``qwen3_vl_moe``.

    Raises CheckpointError for a config that lacks a setting or asks for something that isn't served.
    """

    def __init__(self, config: ModelConfig) -> None:
        text, vision = _section(config, "text_config"), _section(config, "vision_config")
        deepstack_layers = _required(vision, "deepstack_visual_indexes", list)
        self.decoder_config = _decoder_config(config, text, len(deepstack_layers))
        _check_vision(vision, deepstack_layers, self.decoder_config)
        self._vision = vision
        self.row_width = self.decoder_config.hidden_size * (1 + len(deepstack_layers))

    def tower_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the tower's half, sorted. Raises CheckpointError for a key that is in neither half."""
        return _split_keys(all_keys)[0]

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the decoder's half, sorted. Raises CheckpointError for a key that is in neither half."""
        return _split_keys(all_keys)[1]

    def load_tower(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen3VLTower:
        """The vision tower alone. Raises CheckpointError for a vision config that transformers refuses, and for tensors
        missing, misshapen or unknown."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        keys = {key.removeprefix(TOWER_PREFIX): key for key in self.tower_keys(checkpoint.tensors)}
        config = _vision_config(self._vision)
        module = load_module(Qwen3VLVisionModel, config, checkpoint, keys, dtype=dtype, device=device)
        return Qwen3VLTower(module, self.row_width, config.spatial_merge_size)

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """The decoder alone. Raises CheckpointError for tensors missing, misshapen or unknown, and ConfigError for a
        weight format that the device can't use and a group whose size doesn't divide the decoder."""
        _split_keys(checkpoint.tensors)
        transposed = _experts_transposed(self.decoder_config, checkpoint)
        keys = DecoderKeys(DECODER_KEYS.prefix, DECODER_KEYS.head, experts_transposed=transposed)
        return Decoder.load(self.decoder_config, checkpoint, keys, weights, device, group=group)

    def stage_bytes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Bytes in the checkpoint of each half: ``{"tower": …, "decoder": …}``."""
        tower, decoder = _split_keys(tensors)
        return {
            "tower": sum(tensors[key].num_bytes for key in tower),
            "decoder": sum(tensors[key].num_bytes for key in decoder),
        }


def _split_keys(all_keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """The keys of the tower's half and of the decoder's half."""
    tower: list[str] = []
    decoder: list[str] = []
    for key in sorted(all_keys):
        if key.startswith(TOWER_PREFIX):
            tower.append(key)
        elif DECODER_KEYS.owns(key):
            decoder.append(key)
        else:
            raise CheckpointError(f"tensor {key!r} belongs to no half of a Qwen3-VL checkpoint")
    return tower, decoder


def _experts_transposed(config: DecoderConfig, checkpoint: Checkpoint) -> bool:
    """Whether the stacked experts are in the published layout, read off the shape of one of the two tensors.

    There is always one that tells: ``gate_up_proj`` is square, hence silent, only if hidden = 2 * intermediate, and
    ``down_proj`` only if hidden = intermediate.
    """
    layer = next((index for index in range(config.num_layers) if config.is_moe_layer(index)), None)
    if config.moe is None or layer is None:
        return False
    hidden, intermediate = config.hidden_size, config.moe.moe_intermediate_size
    prefix = f"layers.{layer}.mlp.experts"
    if hidden != intermediate:
        name, published = f"{prefix}.down_proj", (intermediate, hidden)
    else:
        name, published = f"{prefix}.gate_up_proj", (hidden, 2 * intermediate)
    return checkpoint.info(DECODER_KEYS.key(name)).shape[1:] == published


def _decoder_config(config: ModelConfig, text: ModelConfig, num_deepstack_layers: int) -> DecoderConfig:
    """The decoder's parameters from the whole config and its text section."""
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not served; only 'silu' is")
    num_heads = _required(text, "num_attention_heads", int)
    hidden_size = _required(text, "hidden_size", int)
    rope = rope_settings(text)
    return DecoderConfig(
        vocab_size=_required(text, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=_required(text, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=_optional(text, "num_key_value_heads", int, num_heads),
        head_dim=_optional(text, "head_dim", int, hidden_size // num_heads),
        intermediate_size=_required(text, "intermediate_size", int),
        rms_norm_eps=_optional(text, "rms_norm_eps", float, 1e-6),
        rope_theta=rope.theta,
        mrope_section=rope.mrope_section,
        # The top level decides, as in transformers; saved MoE files have a text section that contradicts it.
        tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        num_deepstack_layers=num_deepstack_layers,
        attention_bias=bool(text.get("attention_bias", False)),
        moe=_moe_config(text) if config.get("model_type") == "qwen3_vl_moe" else None,
    )


def _moe_config(text: ModelConfig) -> MoEConfig:
    """The experts' parameters. Files that transformers saved call ``num_experts`` ``num_local_experts``."""
    layers = range(_required(text, "num_hidden_layers", int))
    sparse_step: int = _optional(text, "decoder_sparse_step", int, 1)
    dense_layers = {index for index in layers if (index + 1) % sparse_step != 0}
    return MoEConfig(
        num_experts=_required(text, "num_experts" if "num_experts" in text else "num_local_experts", int),
        experts_per_token=_required(text, "num_experts_per_tok", int),
        moe_intermediate_size=_required(text, "moe_intermediate_size", int),
        norm_topk_prob=bool(text.get("norm_topk_prob", True)),
        dense_layers=frozenset(dense_layers | set(_optional(text, "mlp_only_layers", list, []))),
    )


def _vision_config(vision: ModelConfig) -> "Qwen3VLVisionConfig":
    """The tower's config for transformers."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    # Published files give the section the whole model's type; transformers, too, overrides it.
    settings = {name: value for name, value in vision.items() if name != "model_type"}
    try:
        return Qwen3VLVisionConfig(**settings)
    except StrictDataclassError as error:
        raise CheckpointError(f"config.json: vision_config: {error}") from error


def _check_vision(vision: ModelConfig, deepstack_layers: list[int], decoder: DecoderConfig) -> None:
    """Raises CheckpointError where tower and decoder don't fit together."""
    depth, out_hidden = _required(vision, "depth", int), _required(vision, "out_hidden_size", int)
    if len(deepstack_layers) != len(set(range(depth)).intersection(deepstack_layers)):
        raise CheckpointError(f"config.json: deepstack_visual_indexes {deepstack_layers} in a tower of depth {depth}")
    if len(deepstack_layers) > decoder.num_layers:
        raise CheckpointError(
            f"config.json: {len(deepstack_layers)} deepstack features for a decoder of {decoder.num_layers} layers"
        )
    if out_hidden != decoder.hidden_size:
        raise CheckpointError(
            f"config.json: the tower's out_hidden_size {out_hidden} isn't the hidden size {decoder.hidden_size}"
        )


def _section(config: ModelConfig, name: str) -> ModelConfig:
    """A sub-config."""
    return _required(config, name, dict)


def _required(section: ModelConfig, name: str, kind: type) -> Any:
    """A setting that must be there. Raises CheckpointError, naming it, when it's missing, of another type, or a count
    that isn't positive."""
    value = section.get(name)
    if (type(value) is int and value < 1) or not isinstance(value, kind):
        wanted = "a positive int" if kind is int else f"a {kind.__name__}"
        raise CheckpointError(f"config.json: {name} must be {wanted}, not {value!r}")
    return value


def _optional(section: ModelConfig, name: str, kind: type, default: Any) -> Any:
    """A setting that may be absent or null. Raises CheckpointError as ``_required``."""
    return default if section.get(name) is None else _required(section, name, kind)
