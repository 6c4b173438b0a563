"""Sizes of one released checkpoint of each family with media, as settings over the tiny checkpoint's: those that decide
what an item becomes and what its tower computes. For documentation and benchmarks."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.checkpoints import DENSE
from tests.support.minicpm import PROCESSOR, config_of
from tests.support.random_checkpoint import model_config
from tests.support.tiny import HEARING, OWN_TOWERS, PREPROCESSOR, TINY, Tiny

CLIP_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
QWEN3_TOWER: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "patch_size": 16,
}
QWEN3_TOWER |= {"num_position_embeddings": 2304}
QWEN_PIXELS = {"min_pixels": 3136, "max_pixels": 12_845_056}
QWEN3_SIZE: dict[str, Any] = {"min_pixels": None, "max_pixels": None, "patch_size": 16}
QWEN3_SIZE |= {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}

HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CLIP_STATISTICS = {name: PREPROCESSOR[name] for name in HALVES}

WHISPER = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
WHISPER |= {"num_mel_bins": 128}

SAM_B: dict[str, Any] = {"heads": 12, "layers": 12, "width": 768, "global_attn_indexes": [2, 5, 8, 11]}
SAM_B |= {"downsample_channels": [512, 1024]}
OCR_CLIP_L = {"heads": 16, "layers": 24, "width": 1024, "image_size": 224, "patch_size": 14}
OCR_LANGUAGE = {"num_attention_heads": 10, "num_key_value_heads": 10}


@dataclass(frozen=True)
class Released:
    """The sizes of a checkpoint. Sections are merged with the tiny checkpoint's; None removes a setting."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    video_preprocessor: dict[str, Any] = field(default_factory=dict)
    depth: str = "num_hidden_layers"
    """Setting of ``vision_config`` with the tower's layers."""
    shallow: dict[str, Any] = field(default_factory=dict)
    """Further settings if the tower has fewer layers: all of them are used."""
    is_measured: bool = True
    """Whether ``bench/families.py`` measures its tower: of images, and no other checkpoint's."""

    def tiny(self, family: str, layers: int | None = None) -> Tiny:
        """The checkpoint with the tower's released sizes, but with ``layers`` of its layers if given (DeepSeek-OCR's
        two towers: with one)."""
        tiny = BASES[family]
        config = merged(tiny.config, self.config)
        if layers is not None:
            config = merged(merged(config, {"vision_config": {self.depth: layers}}), self.shallow)
        return replace(
            tiny,
            config=config,
            preprocessor=merged(tiny.preprocessor or {}, self.preprocessor),
            video_preprocessor=merged(tiny.video_preprocessor, self.video_preprocessor)
            if tiny.video_preprocessor
            else tiny.video_preprocessor,
        )


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with ``changes``; sections are merged, and None removes a setting."""
    found = deepcopy(settings)
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            is_section = isinstance(value, dict) and isinstance(found.get(name), dict) and name.endswith("_config")
            found[name] = merged(found[name], value) if is_section else value
    return found


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


BASES = {
    **TINY,
    **OWN_TOWERS,
    **HEARING,
    "minicpmv": Tiny(config_of(4.5), preprocessor=PROCESSOR),
    "qwen3_vl": Tiny(model_config(DENSE), preprocessor=PREPROCESSOR),
}
"""Checkpoints whose settings ``RELEASED`` changes."""

RELEASED = {
    "qwen2_vl": Released(
        "Qwen2-VL-7B-Instruct",
        {
            "hidden_size": 3584,
            "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584},
        },
        QWEN_PIXELS,
        depth="depth",
    ),
    "qwen2_5_vl": Released(
        "Qwen2.5-VL-7B-Instruct",
        {
            "hidden_size": 3584,
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
            | {"out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        },
        QWEN_PIXELS,
        depth="depth",
    ),
    "qwen2_5_omni": Released(
        "Qwen2.5-Omni-7B",
        {
            "thinker_config": {
                "text_config": {"hidden_size": 3584},
                "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
                | {"out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
                "audio_config": WHISPER | {"max_source_positions": 1500, "n_window": 100, "output_dim": 3584},
                "position_id_per_seconds": 25,
            }
        },
        QWEN_PIXELS | {"feature_size": 128, "chunk_length": 300},
        is_measured=False,
    ),
    "qwen3_omni_moe": Released(
        "Qwen3-Omni-30B-A3B-Instruct",
        {
            "thinker_config": {
                "text_config": {"hidden_size": 2048},
                "vision_config": QWEN3_TOWER | {"out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]},
                "audio_config": WHISPER
                | {"downsample_hidden_size": 480, "n_window": 50, "n_window_infer": 800, "output_dim": 2048},
            }
        },
        QWEN_PIXELS | {"patch_size": 16, "feature_size": 128},
        is_measured=False,
    ),
    "qwen2_audio": Released(
        "Qwen2-Audio-7B-Instruct",
        {
            "text_config": {"hidden_size": 4096, "max_position_embeddings": 8192},
            "audio_config": WHISPER | {"max_source_positions": 1500},
        },
        {"feature_size": 128, "chunk_length": 30},
        is_measured=False,
    ),
    "qwen3_vl": Released(
        "Qwen3-VL-8B-Instruct",
        {
            "text_config": {"hidden_size": 4096},
            "vision_config": QWEN3_TOWER | {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
        },
        QWEN3_SIZE | HALVES,
        is_measured=False,
    ),
    "qwen3_5": Released(
        "Qwen3.5-9B",
        {"text_config": {"hidden_size": 4096}, "vision_config": QWEN3_TOWER | {"out_hidden_size": 4096}},
        QWEN3_SIZE | HALVES,
        depth="depth",
    ),
    "phi4_multimodal": Released(
        "Phi-4-multimodal-instruct",
        {"hidden_size": 3072, "rope_scaling": None} | {"vision_config": SO400M | {"image_size": 448, "crop_size": 448}},
        {"size": _square(448), "dynamic_hd": 36},
        shallow={"vision_config": {"feature_layer": -1}},
    ),
    "glm4v": Released(
        "GLM-4.1V-9B-Thinking",
        {
            "text_config": {"hidden_size": 4096},
            "vision_config": {"depth": 24, "hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096}
            | {"intermediate_size": 13_696, "image_size": 336},
        },
        {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}},
        depth="depth",
    ),
    "glm4v_moe": Released(
        "GLM-4.5V",
        {
            "text_config": {"hidden_size": 4096},
            "vision_config": {"depth": 24, "hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096}
            | {"intermediate_size": 10_944, "image_size": 336},
        },
        {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}},
        is_measured=False,
    ),
    "llava": Released(
        "llava-1.5-7b-hf",
        {"text_config": {"hidden_size": 4096}, "vision_config": CLIP_L | {"image_size": 336}},
        {"size": {"shortest_edge": 336}, "crop_size": _square(336)},
        shallow={"vision_feature_layer": -1},
    ),
    "llava_next": Released(
        "llava-v1.6-vicuna-7b-hf",
        {
            "text_config": {"hidden_size": 4096},
            "vision_config": CLIP_L | {"image_size": 336},
            "image_grid_pinpoints": None,
        },
        CLIP_STATISTICS | {"size": {"shortest_edge": 336}, "crop_size": _square(336), "image_grid_pinpoints": None},
        shallow={"vision_feature_layer": -1},
    ),
    "llava_onevision": Released(
        "llava-onevision-qwen2-7b-ov-hf",
        {
            "text_config": {"hidden_size": 3584},
            "vision_config": SO400M | {"num_hidden_layers": 26, "image_size": 384},
            "image_grid_pinpoints": None,
            "vision_aspect_ratio": "anyres_max_9",
        },
        HALVES | {"size": _square(384), "image_grid_pinpoints": None},
        HALVES | {"size": _square(384)},
    ),
    "llava+pixtral": Released(
        "pixtral-12b",
        {
            "text_config": {"hidden_size": 5120},
            "vision_config": CLIP_L | {"patch_size": 16, "image_size": 1024},
        },
        {"size": {"longest_edge": 1024}, "patch_size": _square(16)},
    ),
    "gemma4+gemma4_vision": Released(
        "gemma-4-E4B-it",
        {
            "text_config": {"hidden_size": 2560},
            "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16}
            | {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16}
            | {"position_embedding_size": 10_240, "standardize": False},
        },
        {"max_soft_tokens": 280, "patch_size": 16},
    ),
    "mistral3": Released(
        "Mistral-Small-3.1-24B-Instruct-2503",
        {
            "text_config": {"hidden_size": 5120},
            "vision_config": CLIP_L | {"patch_size": 14, "image_size": 1540},
        },
        {"size": {"longest_edge": 1540}, "patch_size": _square(28)},
    ),
    "gemma3": Released(
        "gemma-3-4b-it",
        {
            "text_config": {"hidden_size": 2560},
            "vision_config": SO400M | {"image_size": 896},
            "mm_tokens_per_image": 256,
        },
        HALVES | {"size": _square(896)},
    ),
    "kimi_vl": Released(
        "Kimi-VL-A3B-Instruct",
        {
            "text_config": {"hidden_size": 2048},
            "vision_config": SO400M | {"init_pos_emb_height": 64, "init_pos_emb_width": 64},
        },
        HALVES | {"in_token_limit": 4096},
    ),
    "kimi_k25": Released(
        "Kimi-K2.5",
        {
            "text_config": {"hidden_size": 7168},
            "vision_config": SO400M | {"pos_emb_height": 64, "pos_emb_width": 64},
            "projection_hidden_size": 1152,
        },
        HALVES | {"max_patches": 16384},
        HALVES | {"max_patches": 4096},
    ),
    "idefics3": Released(
        "Idefics3-8B-Llama3",
        {"text_config": {"hidden_size": 4096}, "vision_config": SO400M | {"image_size": 364}, "scale_factor": 2},
        HALVES | {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
    "smolvlm": Released(
        "SmolVLM2-2.2B-Instruct",
        {"text_config": {"hidden_size": 2048}, "vision_config": SO400M | {"image_size": 384}, "scale_factor": 3},
        HALVES | {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    ),
    "llama4": Released(
        "Llama-4-Scout-17B-16E-Instruct",
        {
            "text_config": {"hidden_size": 5120},
            "vision_config": {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34}
            | {"num_attention_heads": 16, "image_size": 336, "projector_input_dim": 4096}
            | {"projector_output_dim": 4096, "vision_output_dim": 4096},
        },
        HALVES | {"size": _square(336), "max_patches": 16},
    ),
    "minicpmv4_6": Released(
        "MiniCPM-V-4.6",
        {
            "text_config": {"hidden_size": 1024},
            "vision_config": SO400M | {"patch_size": 14, "image_size": 980},
            "insert_layer_id": 6,
        },
        HALVES | {"patch_size": 14, "scale_resolution": 448, "max_slice_nums": 9},
        video_preprocessor=HALVES | {"patch_size": 14, "scale_resolution": 448, "max_slice_nums": 9},
        shallow={"insert_layer_id": 0},
    ),
    "minicpmv": Released(
        "MiniCPM-V-4_5",
        {"hidden_size": 4096, "query_num": 64, "vision_config": SO400M | {"patch_size": 14, "image_size": 980}},
        {"patch_size": 14, "scale_resolution": 448, "max_slice_nums": 9, "image_feature_size": 64}
        | {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3},
        is_measured=False,
    ),
    "deepseek_vl_v2": Released(
        "DeepSeek-OCR",
        {
            "language_config": {"hidden_size": 1280} | OCR_LANGUAGE,
            "vision_config": {
                "image_size": 1024,
                "width": {"sam_vit_b": SAM_B, "clip-l-14-224": OCR_CLIP_L},
            },
        },
        {"tile_size": None},
        shallow={
            "vision_config": {
                "width": {
                    "sam_vit_b": SAM_B | {"layers": 1, "global_attn_indexes": [0]},
                    "clip-l-14-224": OCR_CLIP_L | {"layers": 1},
                }
            }
        },
    ),
    "deepseek_ocr2": Released(
        "DeepSeek-OCR-2",
        {
            "text_config": {"hidden_size": 1280} | OCR_LANGUAGE,
            "vision_config": {
                "sam_config": dict.fromkeys(("output_channels", "patch_size", "window_size", "mlp_dim", "hidden_size"))
                | dict.fromkeys(("num_hidden_layers", "num_attention_heads", "image_size", "global_attn_indexes"))
                | {"downsample_channels": [512, 896]},
                "encoder_config": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
                | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 1}
                | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            },
        },
        HALVES | {"size": _square(1024), "tile_size": 768},
        shallow={
            "vision_config": {
                "sam_config": {"num_hidden_layers": 1, "global_attn_indexes": [0]},
                "encoder_config": {"num_hidden_layers": 1},
            }
        },
    ),
    "cogvlm2": Released(
        "cogvlm2-llama3-chat-19B",
        {
            "hidden_size": 4096,
            "vision_config": {"hidden_size": 1792, "intermediate_size": 15360, "num_hidden_layers": 63}
            | {"num_heads": 16, "image_size": 1344, "num_positions": 9217},
        },
        {"size": _square(1344)},
    ),
    "internvl": Released(
        "InternVL3_5-8B-HF",
        {
            "text_config": {"hidden_size": 4096},
            "vision_config": CLIP_L | {"image_size": [448, 448]},
            "image_seq_length": 256,
        },
        {"size": _square(448), "max_patches": 12},
        {"size": _square(448)},
    ),
}
"""By model type. Sizes of towers and processors; a language model has its width alone."""
