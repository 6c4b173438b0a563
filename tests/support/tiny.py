"""Tiny checkpoint folders of every family with random weights, in the published key layout and in the one that
``save_pretrained`` writes.

``tests/support/checkpoints.py`` makes Qwen3-VL's, of any size. Here each family has one size, with what is odd about it
switched on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support import deepseek_ocr
from tests.support.independent import model_class
from tests.support.random_checkpoint import Sizes, random_weight, token_ids, write_json, write_tokenizer

VOCABULARY = 264
IDS = token_ids(VOCABULARY)
HEARING_IDS = IDS | {
    token: VOCABULARY + n for n, token in enumerate(("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"))
}
ROW_IDS = IDS | {token: VOCABULARY + number for number, token in enumerate(("[IMG_BREAK]", "[IMG_END]"))}
AROUND_IDS = IDS | {
    token: VOCABULARY + number
    for number, token in enumerate(("<fake_token_around_image>", "<global-img>", "<row_1_col_1>"))
}
TILE_IDS = IDS | {
    token: VOCABULARY + number
    for number, token in enumerate(
        ("<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    )
}
AROUND_IMAGE_IDS = IDS | {
    token: VOCABULARY + number
    for number, token in enumerate(("<start_of_image>", "<image_soft_token>", "<end_of_image>"))
}
AROUND_IMAGE = (("begin", "start"), ("end", "end"))
"""What Gemma calls the tokens around an image in its configs and in its tokenizers."""
SLICE_IDS = IDS | {
    token: VOCABULARY + number
    for number, token in enumerate(("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"))
}
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
"""Families that see and hear."""
GEMMA_IDS = IDS | {
    token: VOCABULARY + number
    for number, token in enumerate(("<|image>", "<image|>", "<|audio>", "<audio|>", "<|audio_pad|>"))
}
Layout = Literal["published", "saved", "stacked"]
"""``stacked``: experts as transformers' modules hold them."""

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "use_sliding_window": False,
    "sliding_window": 16,
    "max_window_layers": 2,
}
LLAMA_TEXT = {name: value for name, value in TEXT.items() if "window" not in name}
"""Without windows: transformers' caches have them, though Llama's layers don't."""
MEDIA_TOKENS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 252 * 252,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class Tiny:
    """``config`` is ``config.json`` as published. ``published`` renames a tensor of transformers' module."""

    config: dict[str, Any]
    published: Callable[[str], str] = str
    model: str = ""
    """The class of transformers that is saved, and whose config is the section ``thinker_config``; that of the whole
    config unless given."""
    preprocessor: dict[str, Any] | None = None
    split_experts: bool = False
    ids: Mapping[str, int] = field(default_factory=lambda: IDS)
    image_text: str = "<|image_pad|>"
    video_text: str = "<|video_pad|>"
    """What the template has for an image and for a video."""
    video_preprocessor: dict[str, Any] | None = None
    arranged: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    """Makes the tensors of published files of the renamed ones."""
    published_as_saved: bool = False
    """Whether ``save_pretrained`` writes the published names."""
    begin_text: str = ""
    """The token that begins a prompt. If there is one, the folder has a template in its tokenizer's config alone."""


def _as_qwen2_vl(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def _as_omni(name: str) -> str:
    return f"thinker.{_as_qwen2_vl(name)}".replace("model.audio_tower.", "audio_tower.")


def _as_llava(name: str) -> str:
    for ours, theirs in (("vision_tower.", "vision_tower.vision_model."), ("language_model.", "language_model.model.")):
        name = name.replace(f"model.{ours}", theirs)
    return name.removeprefix("model.").replace("lm_head.", "language_model.lm_head.")


def _as_internvl(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.").replace("lm_head.", "language_model.lm_head.")


def _mrope(section: list[int]) -> dict[str, Any]:
    return {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": section}}


QWEN2_5_TOWER = {
    "depth": 4,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
QWEN3_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}


def _qwen3_5(architecture: str, model_type: str, **text: Any) -> Tiny:
    """One layer with attention among gated delta nets."""
    config = {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": model_type,
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {"head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
        | {"linear_value_head_dim": 20, "num_hidden_layers": 3, "sliding_window": None}
        | {"rms_norm_eps": 1e-3}  # a head's output may be near zero: this bounds by how much its norm enlarges rounding
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            }
        }
        | text,
        "vision_config": QWEN3_TOWER | {"depth": 2},
    }
    return Tiny(config | MEDIA_TOKENS, preprocessor=PREPROCESSOR, split_experts="num_experts" in text)


TINY = {
    "qwen2": Tiny(
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6}
        | TEXT
    ),
    "qwen3": Tiny(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
        | {"rope_theta": 1e6, "rope_scaling": None, "head_dim": 32, "attention_bias": True}
        | TEXT
    ),
    "qwen3_moe": Tiny(
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False}
        | {"rope_theta": 1e6, "rope_scaling": None, "head_dim": 32, "attention_bias": False}
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": False}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | TEXT
        | {"num_hidden_layers": 6},
        split_experts=True,
    ),
    "qwen2_vl": Tiny(
        {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "tie_word_embeddings": True}
        | MEDIA_TOKENS
        | TEXT
        | _mrope([2, 3, 3])
        | {
            "vision_config": {
                "depth": 3,
                "embed_dim": 32,
                "mlp_ratio": 3,
                "num_heads": 2,
                "in_chans": 3,
                "hidden_size": 64,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
            }
        },
        published=_as_qwen2_vl,
        preprocessor=PREPROCESSOR,
    ),
    "qwen2_5_vl": Tiny(
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        | {"tie_word_embeddings": False}
        | MEDIA_TOKENS
        | TEXT
        | _mrope([2, 3, 3])
        | {
            "vision_config": QWEN2_5_TOWER,
        },
        published=_as_qwen2_vl,
        preprocessor=PREPROCESSOR,
    ),
    "qwen3_5": _qwen3_5("Qwen3_5", "qwen3_5"),
    "qwen3_5_moe": _qwen3_5(
        "Qwen3_5Moe",
        "qwen3_5_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
    ),
    "qwen2_5_omni": Tiny(
        {
            "architectures": ["Qwen2_5OmniForConditionalGeneration"],
            "model_type": "qwen2_5_omni",
            "thinker_config": {name.replace("token_id", "token_index"): it for name, it in MEDIA_TOKENS.items()}
            | {name: it for name, it in MEDIA_TOKENS.items() if name.startswith("vision")}
            | {
                "audio_token_index": HEARING_IDS["<|audio_pad|>"],
                "audio_start_token_id": HEARING_IDS["<|audio_start|>"],
                "audio_end_token_id": HEARING_IDS["<|audio_end|>"],
                "position_id_per_seconds": 13,
                "seconds_per_chunk": 2,
                "text_config": TEXT
                | {"vocab_size": len(HEARING_IDS) + 256, "rope_theta": 1e6}
                | {"rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]}},
                "vision_config": QWEN2_5_TOWER,
                "audio_config": {
                    "num_mel_bins": 20,
                    "d_model": 32,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 48,
                    "output_dim": 64,
                    "n_window": 50,
                    "max_source_positions": 60,
                },
            },
        },
        published=_as_omni,
        model="Qwen2_5OmniThinkerForConditionalGeneration",
        preprocessor=PREPROCESSOR
        | {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 20, "chunk_length": 8},
        ids=HEARING_IDS,
    ),
    "qwen3_omni_moe": Tiny(
        {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "thinker_config": MEDIA_TOKENS
            | {
                "audio_token_id": HEARING_IDS["<|audio_pad|>"],
                "audio_start_token_id": HEARING_IDS["<|audio_start|>"],
                "audio_end_token_id": HEARING_IDS["<|audio_end|>"],
                "position_id_per_seconds": 13,
                "text_config": TEXT
                | {"vocab_size": len(HEARING_IDS) + 256}
                | {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
                | {"rope_theta": 1e6, "sliding_window": None}
                | {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}},
                "vision_config": QWEN3_TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 1]},
                "audio_config": {
                    "num_mel_bins": 20,
                    "d_model": 32,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 48,
                    "output_dim": 64,
                    "downsample_hidden_size": 8,
                    "n_window": 50,
                    "n_window_infer": 250,
                },
            },
        },
        published=_as_omni,
        model="Qwen3OmniMoeThinkerForConditionalGeneration",
        preprocessor=PREPROCESSOR | {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 20},
        split_experts=True,
        ids=HEARING_IDS,
    ),
}

CLIP_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 75,
    "patch_size": 14,
    "projection_dim": 16,
}
SIGLIP_TOWER = {name: it for name, it in CLIP_TOWER.items() if name != "projection_dim"} | {
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
}
TILE = 75
PINPOINTS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE], [3 * TILE, TILE], [TILE, 3 * TILE]]
NEXT_SETTINGS = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
ONE_VISION_SETTINGS = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} | {
    "vision_aspect_ratio": "anyres_max_2",
    "video_token_index": IDS["<|video_pad|>"],
}


def _llava_next(
    architecture: str, model_type: str, text: str, vision: dict[str, Any], settings: dict[str, Any]
) -> Tiny:
    config: dict[str, Any] = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": model_type}
    config |= {"image_token_index": IDS["<|image_pad|>"], "projector_hidden_act": "gelu", "tie_word_embeddings": False}
    config |= {"image_grid_pinpoints": PINPOINTS, "vision_config": vision}
    config |= {"text_config": {"model_type": text, "tie_word_embeddings": False, "rope_theta": 1e4} | LLAMA_TEXT}
    size: dict[str, Any] = {"shortest_edge": TILE} if text == "llama" else {"height": TILE, "width": TILE}
    processor = {"image_processor_type": f"{architecture}ImageProcessor", "size": size, "resample": 3}
    processor |= {"image_grid_pinpoints": PINPOINTS, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4]}
    if text == "llama":
        processor |= {"crop_size": {"height": TILE, "width": TILE}, "do_center_crop": True}
    frames = {name: processor[name] for name in ("image_mean", "image_std")}
    frames |= {"size": {"height": TILE, "width": TILE}, "num_frames": 6}
    return Tiny(config | settings, published=_as_llava, preprocessor=processor, video_preprocessor=frames)


def _idefics3(architecture: str, model_type: str) -> Tiny:
    config = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": model_type}
    vision = {name: it for name, it in SIGLIP_TOWER.items() if name != "vision_use_head"}
    vision |= {"image_size": 88, "model_type": f"{model_type}_vision"}
    text = {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 1e4, "pad_token_id": 0}
    text |= LLAMA_TEXT | {"vocab_size": len(AROUND_IDS) + 256}
    processor = {"image_processor_type": f"{architecture}ImageProcessor", "do_image_splitting": True, "resample": 1}
    processor |= {"size": {"longest_edge": 240}, "max_image_size": {"longest_edge": 88}}
    processor |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4]}
    frames = {"size": {"longest_edge": 120}, "fps": 3, "num_frames": 6}
    return Tiny(
        config
        | {"image_token_id": IDS["<|image_pad|>"], "scale_factor": 3, "tie_word_embeddings": False}
        | {"text_config": text, "vision_config": vision},
        preprocessor=processor,
        ids=AROUND_IDS,
        video_text="<video>" if model_type == "smolvlm" else "<|video_pad|>",
        video_preprocessor=frames if model_type == "smolvlm" else None,
    )


SLICES: dict[str, Any] = {"scale_resolution": 48, "max_slice_nums": 5, "patch_size": 4, "use_image_id": True}
SLICES |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4], "resample": 3}
QWEN3_5_TEXT = _qwen3_5("Qwen3_5", "qwen3_5").config["text_config"]
MINICPMV4_6 = Tiny(
    {"architectures": ["MiniCPMV4_6ForConditionalGeneration"], "model_type": "minicpmv4_6"}
    | {f"{kind}_token_id": IDS[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    | {"tie_word_embeddings": False, "insert_layer_id": 1, "drop_vision_last_layer": False}
    | {"text_config": QWEN3_5_TEXT | {"model_type": "qwen3_5_text", "vocab_size": len(SLICE_IDS) + 256}}
    | {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        | {"num_attention_heads": 2, "image_size": 28, "patch_size": 4}
    },
    preprocessor=SLICES | {"image_processor_type": "MiniCPMV4_6ImageProcessor"},
    ids=SLICE_IDS,
    video_preprocessor=SLICES,
)


PHI4_AUDIO = {"hidden_size": 24, "intermediate_size": 36, "num_blocks": 2, "num_attention_heads": 2, "left_chunk": 3}
PHI4_AUDIO |= {"ext_pw_out_channel": 24, "depthwise_separable_out_channel": 24, "nemo_conv_channels": 8}
PHI4_AUDIO |= {"bias_max_distance": 10, "audio_token_id": HEARING_IDS["<|audio_pad|>"]}
PHI4 = Tiny(
    {"architectures": ["Phi4MultimodalForCausalLM"], "model_type": "phi4_multimodal", "tie_word_embeddings": False}
    | LLAMA_TEXT
    | {
        "vocab_size": len(HEARING_IDS) + 257,  # even, for two ranks
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.75,
        "rope_theta": 1e4,
    }
    | {"original_max_position_embeddings": 2048, "sliding_window": None}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.1, 1.3, 1.7, 2.0, 2.5, 3.0], "long_factor": [9.0] * 6}}
    | {
        "vision_config": {name: SIGLIP_TOWER[name] for name in SIGLIP_TOWER if "use_head" not in name}
        | {"model_type": "phi4_multimodal_vision", "image_size": 56, "crop_size": 56}
        | {"image_token_id": IDS["<|image_pad|>"]},
        "audio_config": PHI4_AUDIO,
    },
    preprocessor={"image_processor_type": "Phi4MultimodalImageProcessor", "dynamic_hd": 12}
    | {"size": {"height": 56, "width": 56}},
    ids=HEARING_IDS,
)

GLM_TOKENS = {f"{kind}_token_id": IDS[f"<|{kind}_pad|>"] for kind in ("image", "video")}
GLM_TOKENS |= {
    f"{kind}_{part}_token_id": IDS[f"<|vision_{part}|>"] for kind in ("image", "video") for part in ("start", "end")
}


def _glm4v(architecture: str, model_type: str, **text: Any) -> Tiny:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    config = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": model_type}
    text = LLAMA_TEXT | {"model_type": f"{model_type}_text", "rms_norm_eps": 1e-5} | text
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 48}
    vision |= {"image_size": 70, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 252 * 252}
    return Tiny(
        config
        | GLM_TOKENS
        | {"tie_word_embeddings": False, "vision_config": vision, "text_config": text | {"rope_parameters": rope}},
        preprocessor={name: it for name, it in PREPROCESSOR.items() if "pixels" not in name}
        | {"image_processor_type": "Glm4vImageProcessor", "size": size},
        split_experts="n_routed_experts" in text,
        video_text="<|video|>",
        video_preprocessor={"size": size},
    )


GLM = {
    "glm4v": _glm4v("Glm4v", "glm4v"),
    "glm4v_moe": _glm4v(
        "Glm4vMoe",
        "glm4v_moe",
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
    ),
}
SHARED: dict[str, tuple[Tiny, Layout]] = {
    "glm46v": (
        replace(
            GLM["glm4v"],
            config=GLM["glm4v"].config | {"architectures": ["Glm46VForConditionalGeneration"], "model_type": "glm46v"},
        ),
        "published",
    ),
    **{f"{name}_thinker": (TINY[name], "saved") for name in OMNI},
}
"""Model types that share their family's code with another: checkpoints and their layouts. ``save_pretrained`` writes a
thinker by itself."""
TINY |= GLM

MOON_IDS = IDS | {
    token: VOCABULARY + number
    for number, token in enumerate(("<|media_start|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"))
}
MOON_SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}


def _as_kimi(name: str) -> str:
    """Published names of what transformers calls ``Kimi_K25Model``."""
    name = name.removeprefix("model.").replace("language_model.", "language_model.model.")
    name = name.replace("lm_head.", "language_model.lm_head.").replace("mm_projector.in_proj", "mm_projector.proj.0")
    name = name.replace("mm_projector.out_proj", "mm_projector.proj.2").replace("position_embeddings", "weight")
    name = name.replace("vision_tower.layers.", "vision_tower.encoder.blocks.").replace(".attn.proj.", ".wo.")
    if not name.startswith("vision_tower.encoder."):
        return name.replace("vision_tower.final", "vision_tower.encoder.final")
    for ours, theirs in (("norm1", "norm0"), ("norm2", "norm1"), ("mlp.fc1", "mlp.fc0"), ("mlp.fc2", "mlp.fc1")):
        if f".{ours}." in name:
            return name.replace(ours, theirs)
    return name


def _joined_for_kimi(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values in one tensor, and what is rotated together side by side."""
    heads = MOON_SIZES["num_attention_heads"]
    for key in [name for name in weights if ".attn.q_proj." in name]:
        parts = [weights.pop(key.replace("q_proj", f"{kind}_proj")) for kind in "qkv"]
        parts[:2] = [
            part.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(part.shape).contiguous() for part in parts[:2]
        ]
        weights[key.replace("attn.q_proj", "wqkv")] = torch.cat(parts)
    return weights


def _kimi(architecture: str, model_type: str, vision: dict[str, Any], **settings: Any) -> Tiny:
    text = {name: it for name, it in LLAMA_TEXT.items() if name != "num_key_value_heads"}
    text |= {"model_type": "deepseek_v3", "vocab_size": len(MOON_IDS) + 256, "tie_word_embeddings": False}
    text |= {"num_hidden_layers": 3, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16}
    text |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5, "n_group": 1}
    text |= {"topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    text |= {"rope_theta": 1e4, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    config = {"architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False}
    config |= {"text_config": text, "vision_config": MOON_SIZES | {"patch_size": 14} | vision}
    return Tiny(
        config,
        preprocessor={"image_processor_type": architecture.replace("ForConditionalGeneration", "ImageProcessor")}
        | {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4], "patch_size": 14}
        | settings,
        split_experts=True,
        ids=MOON_IDS,
    )


def _kimi_vl() -> Tiny:
    vision = {"model_type": "moonvit", "init_pos_emb_height": 6, "init_pos_emb_width": 5, "merge_kernel_size": [2, 2]}
    tiny = _kimi("KimiVLForConditionalGeneration", "kimi_vl", vision, in_token_limit=100, pad_input=True)
    return replace(tiny, config=tiny.config | {"media_placeholder_token_id": IDS["<|image_pad|>"]})


def _kimi_k25() -> Tiny:
    vision = {"model_type": "kimi_k25_vision", "pos_emb_height": 6, "pos_emb_width": 6, "merge_kernel_size": [2, 2]}
    tiny = _kimi("Kimi_K25ForConditionalGeneration", "kimi_k25", vision, max_patches=100, resample=3)
    tokens: dict[str, Any] = {
        "image_token_id": IDS["<|image_pad|>"],
        "projection_hidden_size": MOON_SIZES["hidden_size"],
    }
    # by this, no answer has a placeholder, which transformers would embed as token 0
    tokens |= {"text_config": tiny.config["text_config"] | {"routed_scaling_factor": 2.0}}
    # frames have fewer patches than images
    return replace(
        tiny,
        config=tiny.config | tokens,
        published=_as_kimi,
        arranged=_joined_for_kimi,
        video_text="<|kimi_k25_video_placeholder|>",
        video_preprocessor={**(tiny.preprocessor or {}), "max_patches": 24, "fps": 2},
    )


PIXTRAL_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 140,
    "hidden_act": "silu",
}
PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 140},
    "patch_size": {"height": 8, "width": 8},
    "resample": 3,
    "image_mean": PREPROCESSOR["image_mean"],
    "image_std": PREPROCESSOR["image_std"],
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 210,
    "use_clipped_linears": True,
    "standardize": True,
}
GEMMA4_AUDIO: dict[str, Any] = {
    "model_type": "gemma4_audio",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [20, 8],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "attention_logit_cap": 3.0,
    "conv_kernel_size": 3,
    "output_proj_dims": 24,
}
GEMMA4 = Tiny(
    {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": False}
    | {"image_token_id": GEMMA_IDS["<|image_pad|>"], "video_token_id": GEMMA_IDS["<|video_pad|>"]}
    | {"audio_token_id": GEMMA_IDS["<|audio_pad|>"], "audio_config": GEMMA4_AUDIO, "vision_config": GEMMA4_VISION}
    | {"boi_token_id": GEMMA_IDS["<|image>"], "eoi_token_id": GEMMA_IDS["<image|>"]}
    | {"boa_token_id": GEMMA_IDS["<|audio>"], "eoa_token_index": GEMMA_IDS["<audio|>"]}
    | {
        "text_config": {name: it for name, it in LLAMA_TEXT.items() if name != "hidden_act"}
        | {"model_type": "gemma4_text", "tie_word_embeddings": False}
        | {"vocab_size": len(GEMMA_IDS) + 256, "hidden_activation": "gelu_pytorch_tanh"}
        | {"num_hidden_layers": 5, "head_dim": 20, "global_head_dim": 24, "num_kv_shared_layers": 2}
        | {"layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]}
        | {"use_double_wide_mlp": True, "sliding_window": 16, "final_logit_softcapping": 30.0}
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": len(GEMMA_IDS) + 256}
    },
    preprocessor={"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4}
    | {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 20},
    video_preprocessor={"video_processor_type": "Gemma4VideoProcessor", "num_frames": 6},
    ids=GEMMA_IDS,
)

OCR_IDS = {"<image>" if token == "<|image_pad|>" else token: number for token, number in IDS.items()}
OCR_TEXT = (
    LLAMA_TEXT
    | {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "use_mla": False,
    }
)
OCR_SAM: dict[str, Any] = {"output_channels": 24, "patch_size": 4, "window_size": 3, "mlp_dim": 48}
OCR_SAM |= {"global_attn_indexes": [1], "downsample_channels": [28, 32]}

OWN_TOWERS = {
    "gemma4+gemma4_vision": GEMMA4,
    "llava": Tiny(
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "tie_word_embeddings": False}
        | {"image_token_index": IDS["<|image_pad|>"], "projector_hidden_act": "gelu"}
        | {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
        | {"text_config": {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 1e4} | LLAMA_TEXT}
        | {"vision_config": CLIP_TOWER},
        published=_as_llava,
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 75},
            "crop_size": {"height": 75, "width": 75},
            "do_center_crop": True,
            "resample": 3,
            "image_mean": PREPROCESSOR["image_mean"],
            "image_std": PREPROCESSOR["image_std"],
        },
    ),
    "llava_next": _llava_next("LlavaNext", "llava_next", "llama", CLIP_TOWER, NEXT_SETTINGS),
    "llava_onevision": _llava_next("LlavaOnevision", "llava_onevision", "qwen2", SIGLIP_TOWER, ONE_VISION_SETTINGS),
    "llava+pixtral": Tiny(
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "tie_word_embeddings": False}
        | {"image_token_index": IDS["<|image_pad|>"], "projector_hidden_act": "gelu"}
        | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        | {
            "text_config": LLAMA_TEXT
            | {"model_type": "mistral", "vocab_size": VOCABULARY + 2, "head_dim": 24, "sliding_window": None}
            | {"num_hidden_layers": 3, "tie_word_embeddings": False, "rope_theta": 1e4},
            "vision_config": PIXTRAL_TOWER | {"patch_size": 8},
        },
        published=_as_internvl,
        preprocessor=PIXTRAL_PROCESSOR,
        ids=ROW_IDS,
    ),
    "mistral3": Tiny(
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
        | {"image_token_index": IDS["<|image_pad|>"], "projector_hidden_act": "gelu", "tie_word_embeddings": False}
        | {"spatial_merge_size": 2, "vision_feature_layer": -1, "multimodal_projector_bias": False}
        | {
            "text_config": LLAMA_TEXT
            | {"model_type": "ministral3", "vocab_size": VOCABULARY + 2, "head_dim": 32, "tie_word_embeddings": False}
            | {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "max_position_embeddings": 128,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            # transformers fails for an image of one embedding, as the tiny one would be with larger patches
            "vision_config": PIXTRAL_TOWER | {"patch_size": 4},
        },
        published=_as_internvl,
        preprocessor=PIXTRAL_PROCESSOR,
        ids=ROW_IDS,
    ),
    "llama4": Tiny(
        {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "tie_word_embeddings": False}
        | {"image_token_index": IDS["<|image_pad|>"]}
        | {
            "text_config": LLAMA_TEXT
            | {"model_type": "llama4_text", "vocab_size": len(TILE_IDS) + 256, "num_hidden_layers": 3, "head_dim": 20}
            | {"intermediate_size": 40, "intermediate_size_mlp": 104, "num_local_experts": 5, "num_experts_per_tok": 1}
            | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 24}
            | {"floor_scale": 8, "attn_scale": 0.4, "rope_theta": 5e5, "tie_word_embeddings": False},
            "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 32, "intermediate_size": 128}
            | {"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
            | {"pixel_shuffle_ratio": 0.5, "projector_input_dim": 40, "projector_output_dim": 40}
            | {"vision_output_dim": 40, "rope_theta": 10_000},
        },
        preprocessor={"image_processor_type": "Llama4ImageProcessor", "size": {"height": 56, "width": 56}}
        | {"max_patches": 6, "resample": 2, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4]},
        ids=TILE_IDS,
        image_text="<|image|>",
    ),
    "gemma3": Tiny(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4}
        | {"image_token_index": AROUND_IMAGE_IDS["<image_soft_token>"], "tie_word_embeddings": False}
        | {f"{name[:1]}oi_token_index": AROUND_IMAGE_IDS[f"<{token}_of_image>"] for name, token in AROUND_IMAGE}
        | {
            "text_config": {name: it for name, it in LLAMA_TEXT.items() if name != "hidden_act"}
            | {"model_type": "gemma3_text", "vocab_size": VOCABULARY + 3, "num_hidden_layers": 3, "head_dim": 24}
            | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20, "sliding_window": 16}
            | {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
            | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "pad_token_id": 0, "tie_word_embeddings": False},
            "vision_config": SIGLIP_TOWER | {"image_size": 84},
        },
        published=_as_llava,
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 84, "width": 84},
            "resample": 2,
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.6, 0.4],
        },
        ids=AROUND_IMAGE_IDS,
        image_text="<start_of_image>",
    ),
    "kimi_vl": _kimi_vl(),
    "kimi_k25": _kimi_k25(),
    "deepseek_vl_v2": Tiny(
        {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2", "tile_tag": "2D"}
        | {"candidate_resolutions": [[64, 64]], "global_view_pos": "head", "language_config": OCR_TEXT}
        | {"projector_config": {"input_dim": 64, "n_embed": 64, "projector_type": "linear"}}
        | {
            "vision_config": {
                "image_size": 64,
                "mlp_ratio": 3.7362,
                "model_name": "deeplip_b_l",
                "model_type": "vision",
                "width": {
                    "sam_vit_b": OCR_SAM | {"heads": 2, "layers": 2, "width": 24},
                    "clip-l-14-224": {"heads": 2, "layers": 2, "width": 32, "image_size": 56, "patch_size": 14}
                    | {"intermediate_size": 48},
                },
            }
        },
        preprocessor={"tile_size": 32},
        ids=OCR_IDS,
        image_text="<image>",
        published_as_saved=True,
    ),
    "deepseek_ocr2": Tiny(
        {"architectures": ["DeepseekOcr2ForConditionalGeneration"], "model_type": "deepseek_ocr2"}
        | {"image_token_id": IDS["<|image_pad|>"], "tie_word_embeddings": False}
        | {"text_config": OCR_TEXT | {"mlp_layer_types": ["dense", "sparse", "sparse"]}}
        | {
            "vision_config": {
                "sam_config": OCR_SAM
                | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
                | {"image_size": 128, "patch_size": 2, "window_size": 15},
                "encoder_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
                | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1},
            }
        },
        preprocessor={
            "image_processor_type": "DeepseekOcr2ImageProcessor",
            "size": {"height": 128, "width": 128},
            "tile_size": 96,
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.6, 0.4],
        },
        published_as_saved=True,
    ),
    "cogvlm2": Tiny(
        {"architectures": ["CogVLMForCausalLM"], "model_type": "cogvlm2", "template_version": "chat"}
        | {name: value for name, value in LLAMA_TEXT.items() if name != "num_key_value_heads"}
        | {"num_multi_query_heads": 2, "pad_token_id": IDS["<|image_pad|>"], "tie_word_embeddings": False}
        | {
            "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_heads": 2}
            | {"image_size": 84, "patch_size": 14, "num_positions": 37, "in_channels": 3, "hidden_act": "gelu"}
            | {"layer_norm_eps": 1e-6, "dropout_prob": 0.0}
        },
        # the published files have none: for the tests' own implementation
        preprocessor={"image_processor_type": "CogVLM2ImageProcessor", "size": {"height": 84, "width": 84}},
        begin_text="<|endoftext|>",
    ),
    "idefics3": _idefics3("Idefics3", "idefics3"),
    "phi4_multimodal": PHI4,
    "smolvlm": _idefics3("SmolVLM", "smolvlm"),
    "minicpmv4_6": MINICPMV4_6,
    "internvl": Tiny(
        {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl"}
        | {"tie_word_embeddings": False, "image_token_id": IDS["<|image_pad|>"]}
        | {"downsample_ratio": 0.5, "image_seq_length": 4, "projector_hidden_act": "gelu"}
        | {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        | {"text_config": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 1e6} | TEXT}
        | {
            "vision_config": {
                "model_type": "internvl_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": [56, 56],
                "patch_size": [14, 14],
                "attention_bias": True,
                "use_qk_norm": False,
            }
        },
        published=_as_internvl,
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
            "resample": 3,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        video_text="<video>",
        video_preprocessor={
            "size": {"height": 56, "width": 56},
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "num_frames": 6,
        },
    ),
}
"""Families whose towers are of our own layers."""


HEARING = {
    "qwen2_audio": Tiny(
        {"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"}
        | {"audio_token_index": HEARING_IDS["<|audio_pad|>"]}
        | {"text_config": {"model_type": "qwen2", "rope_theta": 1e6} | TEXT | {"vocab_size": len(HEARING_IDS) + 256}}
        | {
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 20,
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "max_source_positions": 400,
            }
        },
        published=_as_internvl,
        preprocessor={"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 20, "chunk_length": 8},
        ids=HEARING_IDS,
    )
}
"""Families that take audio alone."""


def make_tiny(
    folder: Path, family: str | Tiny, layout: Layout = "published", seed: int = 1, config: dict[str, Any] | None = None
) -> Path:
    """Writes a checkpoint folder and returns it. The same ``seed`` gives the same model in all layouts. ``config``
    overrides top-level settings."""
    tiny = (TINY | OWN_TOWERS | HEARING)[family] if isinstance(family, str) else family
    tiny = replace(tiny, config=tiny.config | (config or {}))
    write_settings(folder, tiny)
    model = _random_model(tiny, seed)
    if layout == "saved" or tiny.published_as_saved:
        model.save_pretrained(folder)
        if layout == "published":
            write_json(folder / "config.json", tiny.config)
        return folder
    weights = dict(model.state_dict())
    if tiny.config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    if layout == "published" and tiny.split_experts:
        weights = split_experts(weights)
    renamed = tiny.arranged({tiny.published(name): weight.contiguous() for name, weight in weights.items()})
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_settings(folder: Path, tiny: Tiny) -> None:
    """Writes all files of a checkpoint folder but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", tiny.config)
    end = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end[1]})
    write_tokenizer(folder, VOCABULARY, tiny.ids)
    if tiny.begin_text:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"bos_token": tiny.begin_text, "chat_template": "{{ messages[0].content }}"}
        write_json(folder / "tokenizer_config.json", settings)
    template = folder / "chat_template.jinja"
    texts = template.read_text().replace("<|image_pad|>", tiny.image_text)
    template.write_text(texts.replace("<|video_pad|>", tiny.video_text))
    if tiny.begin_text:
        template.unlink()
    for name, settings in (("preprocessor", tiny.preprocessor), ("video_preprocessor", tiny.video_preprocessor)):
        if settings is not None:
            write_json(folder / f"{name}_config.json", settings)


def _random_model(tiny: Tiny, seed: int) -> PreTrainedModel:
    if tiny.config["model_type"] == deepseek_ocr.PUBLISHED:
        reference, config = deepseek_ocr.model_of(tiny.config, tiny.ids[deepseek_ocr.IMAGE])
    else:
        reference = model_class(tiny.model or tiny.config["architectures"][0])
        settings = tiny.config["thinker_config"] if tiny.model else tiny.config
        config = reference.config_class(**json.loads(json.dumps(settings)))
    model: PreTrainedModel = reference(config).float()
    weights = {
        name: random_weight(name, tuple(weight.shape), Sizes(), seed, torch.float32)
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight" or not tiny.config.get("tie_word_embeddings")
    }
    model.load_state_dict(weights, strict=False)
    return model.eval().requires_grad_(False)


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's matrices by themselves."""
    split = {}
    for name, weight in weights.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".experts"):
            split[name] = weight
            continue
        for expert, matrix in enumerate(weight):
            parts = (
                {"down_proj": matrix}
                if kind == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            )
            split |= {f"{place}.{expert}.{part}.weight": tensor for part, tensor in parts.items()}
    return split
