"""CLIP's and SigLIP's vision transformers of our own layers. The references are ``CLIPVisionModel`` and
``SiglipVisionModel`` in transformers."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from triptych.layers.tower_layer import TowerLayer
from triptych.models.shared.clip_config import ClipConfig
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer


def load_clip(
    reader: TowerWeights, vision: ClipConfig, tower: str, depth: int, places: Tensor | None = None
) -> VisionTransformer:
    """Load the first ``depth`` layers of the tower of this name.

    ``places``, int64 [states], are the rows of the table of positions that an image's states have, if they aren't in
    order. Raises CheckpointError as ``TowerWeights`` does, and for an activation that isn't served.
    """
    hidden, embeddings = vision.hidden_size, f"{tower}.embeddings"
    positions = reader.parameter(f"{embeddings}.position_embedding.weight", vision.states, hidden)
    return VisionTransformer(
        reader.patch_projection(f"{embeddings}.patch_embedding", hidden, vision.patch_size, bias=not vision.is_clip),
        reader.parameter(f"{embeddings}.class_embedding", hidden) if vision.is_clip else None,
        positions if places is None else positions[places.to(positions.device)],
        reader.layer_norm(f"{tower}.pre_layrnorm", hidden, vision.eps) if vision.is_clip else None,
        [clip_layer(reader, vision, f"{tower}.encoder.layers.{number}") for number in range(depth)],
    )


def clip_keys(keys: Mapping[str, str], tower: str) -> dict[str, str]:
    """Return the keys of a tower's tensors, of which published files have ``vision_model.`` within the names."""
    return {name.replace(f"{tower}.vision_model.", f"{tower}.", 1): key for name, key in keys.items()}


def unused(vision: ClipConfig, tower: str, depth: int) -> list[str]:
    """Return the beginnings of the names of tensors that aren't read: layers, the norm after them, SigLIP's pooling."""
    layers = [f"{tower}.encoder.layers.{number}." for number in range(depth, vision.num_layers)]
    return [*layers, f"{tower}.post_layernorm.", f"{tower}.head.", f"{tower}.embeddings.position_ids"]


def clip_layer(
    reader: TowerWeights, vision: ClipConfig, name: str, qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
) -> TowerLayer:
    """Load the layer of this name; ``qkv`` are the names of its products for attention, separate or fused. Raises
    CheckpointError as ``load_clip`` does."""
    hidden, attention = vision.hidden_size, f"{name}.self_attn"
    return TowerLayer(
        reader.layer_norm(f"{name}.layer_norm1", hidden, vision.eps),
        reader.attention(
            [f"{attention}.{kind}" for kind in qkv], f"{attention}.out_proj", hidden, vision.num_heads, (True, True)
        ),
        reader.layer_norm(f"{name}.layer_norm2", hidden, vision.eps),
        reader.mlp(
            [f"{name}.mlp.fc1", f"{name}.mlp.fc2"],
            (hidden, vision.intermediate_size, hidden),
            tower_activation(vision.activation, "vision_config.hidden_act"),
        ),
    )
