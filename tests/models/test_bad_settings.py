"""Settings that aren't served are refused by name, each over those of a family's tiny checkpoint."""

from typing import Any

import pytest

from tests.support.family_parts import tiny_of, with_settings
from triptych.checkpoint.config_files import with_text_config
from triptych.errors import CheckpointError
from triptych.models.registry import FAMILIES, resolve

Table = dict[str, list[tuple[dict[str, Any], str]]]
CONFIGS: Table = {
    "llava+pixtral": [
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
        ({"vision_feature_select_strategy": None}, "vision_feature_select_strategy"),
        ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_config": {"patch_size": 10**6}}, "side"),
        ({"vision_config": {"num_attention_heads": 5}}, "heads"),
        ({"text_config": None}, "text_config"),
    ],
    "mistral3": [
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer"),
        ({"spatial_merge_size": 0}, "spatial_merge_size"),
        ({"spatial_merge_size": 10**6}, "side"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_attention_heads": 5}}, "heads"),
        ({"vision_config": {"num_attention_heads": 24}}, "heads"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"num_channels": 1}}, "num_channels"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"vision_config": {"rope_parameters": [1]}}, "rope_parameters"),
        ({"vision_config": {"rope_parameters": {"rope_theta": 0.0}}}, "rope_theta"),
        ({"text_config": None}, "text_config"),
    ],
    "gemma3": [
        ({"mm_tokens_per_image": 5}, "mm_tokens_per_image"),
        ({"mm_tokens_per_image": 16}, "mm_tokens_per_image"),
        ({"mm_tokens_per_image": 0}, "mm_tokens_per_image"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "SigLIP"),
        ({"vision_config": {"num_attention_heads": 5}}, "divide"),
        ({"vision_config": {"image_size": 10**9}}, "image_size"),
        ({"text_config": None}, "text_config"),
    ],
    "gemma4+gemma4_vision": [
        ({"text_config": None}, "text_config"),
        ({"image_token_id": "<image>"}, "image_token_id"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_key_value_heads": 1}}, "num_key_value_heads"),
        ({"vision_config": {"head_dim": 18}}, "head_dim"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"patch_size": 10**6}}, "patches of 1000000 pixels"),
        ({"vision_config": {"pooling_kernel_size": 0}}, "pooling_kernel_size"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"vision_config": {"rope_parameters": [1]}}, "rope_parameters"),
        ({"vision_config": {"rope_parameters": {"rope_theta": 0.0}}}, "rope_theta"),
        ({"vision_config": {"use_clipped_linears": 1}}, "use_clipped_linears"),
    ],
    "llava": [
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
        ({"vision_feature_layer": True}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "all"}, "vision_feature_select_strategy"),
        ({"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"vision_config": {"num_attention_heads": 5}}, "divide"),
        ({"vision_config": {"image_size": 10**9}}, "image_size"),
        ({"vision_config": {"patch_size": 0}}, "patch_size"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"num_channels": 1}}, "num_channels"),
        ({"vision_config": {"layer_norm_eps": 0.0}}, "layer_norm_eps"),
        ({"text_config": None}, "text_config"),
    ],
    "llava_next": [
        ({"vision_feature_select_strategy": "full"}, "full"),
        ({"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"vision_config": {"model_type": ["clip_vision_model"]}}, "model_type"),
    ],
    "llava_onevision": [
        ({"vision_feature_select_strategy": "default"}, "default"),
    ],
    "smolvlm": [
        ({"scale_factor": 4}, "scale_factor"),
        ({"scale_factor": 0}, "scale_factor"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_attention_heads": 5}}, "divide"),
        ({"vision_config": {"image_size": 10**9}}, "image_size"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"text_config": None}, "text_config"),
    ],
    "internvl": [
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": [1]}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"downsample_ratio": 0.3}, "downsample_ratio"),
        ({"downsample_ratio": 1e-9}, "downsample_ratio"),
        ({"downsample_ratio": 1 / 3}, "doesn't divide"),
        ({"image_seq_length": 5}, "image_seq_length"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_attention_heads": 5}}, "divide"),
        ({"vision_config": {"image_size": 10**9}}, "image_size"),
        ({"vision_config": {"image_size": [56, 70]}}, "image_size"),
        ({"vision_config": {"image_size": [56]}}, "image_size"),
        ({"vision_config": {"patch_size": [0, 0]}}, "patch_size"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"use_mean_pooling": False}}, "use_mean_pooling"),
        ({"vision_config": {"norm_type": ["rms_norm"]}}, "norm_type"),
        ({"vision_config": {"layer_norm_eps": 0.0}}, "layer_norm_eps"),
        ({"text_config": None}, "text_config"),
    ],
    "minicpmv4_6": [
        ({"insert_layer_id": 3}, "insert_layer_id"),
        ({"insert_layer_id": -1}, "insert_layer_id"),
        ({"merger_times": 2}, "merger_times"),
        ({"merge_kernel_size": [4, 4]}, "merge_kernel_size"),
        ({"merge_kernel_size": 2}, "merge_kernel_size"),
        ({"vision_config": {"window_kernel_size": [2, 4]}}, "window_kernel_size"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"text_config": None}, "text_config"),
    ],
    "kimi_vl": [
        ({"vision_config": {"merge_kernel_size": [2, 1]}}, "merge_kernel_size"),
        ({"vision_config": {"merge_kernel_size": 2}}, "merge_kernel_size"),
        ({"vision_config": {"num_attention_heads": 5}}, "heads"),
        ({"vision_config": {"num_attention_heads": 64}}, "heads"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"patch_size": 10**6}}, "patch_size"),
        ({"vision_config": {"init_pos_emb_width": 10**6}}, "pos_emb_width"),
        ({"vision_config": {"init_pos_emb_width": "6"}}, "pos_emb_width"),
        ({"vision_config": {"mm_projector_type": "mlp"}}, "mm_projector_type"),
        ({"vision_config": {"merge_type": "other"}}, "merge_type"),
        ({"vision_config": {"mm_hidden_size": 7}}, "mm_hidden_size"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"rope_parameters": {"rope_theta": 1e5}}}, "rope_parameters"),
    ],
    "llama4": [
        ({"vision_config": {"vision_feature_select_strategy": "full"}}, "vision_feature_select_strategy"),
        ({"vision_config": {"vision_feature_layer": -2}}, "vision_feature_layer"),
        ({"vision_config": {"multi_modal_projector_bias": True}}, "multi_modal_projector_bias"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"hidden_act": "silu"}}, "hidden_act"),
        ({"vision_config": {"pixel_shuffle_ratio": 0.3}}, "pixel_shuffle_ratio"),
        ({"vision_config": {"pixel_shuffle_ratio": 2.0}}, "pixel_shuffle_ratio"),
        ({"vision_config": {"image_size": 70}}, "pixel_shuffle_ratio"),
        ({"vision_config": {"image_size": [56, 56]}}, "image_size"),
        ({"vision_config": {"image_size": 10**6}}, "image_size"),
        ({"vision_config": {"intermediate_size": 96}}, "intermediate_size"),
        ({"vision_config": {"projector_input_dim": 48}}, "projector_input_dim"),
        ({"vision_config": {"vision_output_dim": 48}}, "vision_output_dim"),
        ({"vision_config": {"num_attention_heads": 16}}, "two axes"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "yarn"),
        ({"vision_config": None}, "vision_config"),
        ({"text_config": None}, "text_config"),
    ],
    "cogvlm2": [
        ({"vision_config": {"num_positions": 5}}, "num_positions must be 37"),
        ({"vision_config": {"image_size": 70}}, "even number of patches"),
        ({"vision_config": {"image_size": 10**6}}, "even number of patches"),
        ({"vision_config": {"num_heads": 5}}, "5 heads"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"hidden_act": "silu"}}, "hidden_act must be 'gelu'"),
        ({"vision_config": {"in_channels": 1}}, "in_channels must be 3"),
        ({"vision_config": {"layer_norm_eps": 0}}, "layer_norm_eps"),
    ],
}
"""In ``config.json``: what is changed, and what the message has; the adapter and the planner refuse it."""
WEIGHTS: Table = {
    "llava+pixtral": [
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"model_type": "mistral3"}}, "text_config.model_type"),
    ],
    "mistral3": [
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"model_type": "mistral3"}}, "text_config.model_type"),
    ],
    "gemma3": [
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        ({"text_config": {"model_type": "gemma3"}}, "text_config.model_type"),
    ],
    "gemma4+gemma4_vision": [
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention 'all'"),
        ({"text_config": {"pad_token_id": 10**6}}, "pad_token_id"),
        ({"text_config": {"pad_token_id": None}}, "pad_token_id"),
        ({"vision_config": {"hidden_activation": "relu"}}, "hidden_activation"),
    ],
    "llava": [
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"model_type": "qwen2_vl"}}, "text_config.model_type 'qwen2_vl'"),
        ({"text_config": {"model_type": ["llama"]}}, "text_config.model_type"),
    ],
    "llava_onevision": [
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"model_type": "llava"}}, "text_config.model_type"),
    ],
    "smolvlm": [
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"model_type": "smolvlm"}}, "text_config.model_type"),
    ],
    "internvl": [
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"text_config": {"model_type": "internvl"}}, "text_config.model_type 'internvl'"),
    ],
    "minicpmv4_6": [
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
    "llama4": [
        ({"text_config": {"model_type": "llama4"}}, "text_config.model_type"),
    ],
    "cogvlm2": [
        ({"num_multi_query_heads": None}, "num_multi_query_heads"),
        ({"num_multi_query_heads": 3}, "don't divide"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is not served"),
    ],
}
"""Settings that only the adapter refuses, with what its error says."""
PLANS: Table = {
    "llava_next": [
        ({"image_grid_pinpoints": [[75, 80]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[75, 75, 75]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[75 * 9, 75 * 8]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[75, 75.0]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[75, 75]]}, "image_grid_pinpoints aren't those"),
    ],
    "llava_onevision": [
        ({"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio"),
        ({"vision_aspect_ratio": "anyres_max_0"}, "vision_aspect_ratio"),
        ({"vision_aspect_ratio": 9}, "vision_aspect_ratio"),
    ],
    "cogvlm2": [
        ({"template_version": "base"}, "template_version 'base'"),
    ],
}
"""Settings that only the planner refuses."""
PROCESSORS: Table = {
    "llava+pixtral": [
        ({"size": {"longest_edge": 10**6}}, "longest_edge"),
        ({"patch_size": {"height": 8, "width": 4}}, "patch_size"),
        ({"patch_size": 16}, "patch_size"),
    ],
    "mistral3": [
        ({"size": {"longest_edge": 7}}, "longest_edge"),
        ({"size": {"longest_edge": 10**6}}, "longest_edge"),
        ({"size": {"height": 140, "width": 140}}, "longest_edge"),
        ({"patch_size": {"height": 8, "width": 4}}, "patch_size"),
        ({"patch_size": 16}, "patch_size"),
        ({"patch_size": {"height": [8]}}, "patch_size"),
    ],
    "gemma4+gemma4_vision": [
        ({"max_soft_tokens": 100}, "max_soft_tokens"),
        ({"max_soft_tokens": None}, "max_soft_tokens"),
        ({"max_soft_tokens": [70]}, "max_soft_tokens"),
        ({"max_soft_tokens": 140}, "position_embedding_size 210 is less than the 420"),
        ({"patch_size": 16}, "patch_size is 16"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size is 2"),
    ],
    "smolvlm": [
        ({"size": {"longest_edge": 86}}, "longest_edge"),
        ({"size": {"longest_edge": 5000}}, "longest_edge"),
        ({"size": 240}, "longest_edge"),
        ({"max_image_size": {"longest_edge": 90}}, "max_image_size"),
        ({"do_image_splitting": 1}, "do_image_splitting"),
    ],
    "internvl": [
        ({"size": {"height": 448, "width": 448}}, "size"),
        ({"min_patches": 7}, "ascend"),
        ({"max_patches": 10**6}, "max_patches"),
        ({"max_patches": 0}, "max_patches"),
        ({"min_patches": "2"}, "min_patches"),
    ],
    "llama4": [
        ({"size": {"height": 56, "width": 70}}, "size"),
        ({"max_patches": 10**6}, "max_patches"),
        ({"max_patches": 0}, "max_patches"),
        ({"resize_to_max_canvas": 1}, "resize_to_max_canvas"),
    ],
}

"""In ``preprocessor_config.json``, which the planner and the preprocessor refuse."""
PIXELS: Table = {
    "llava": [
        ({"size": {"shortest_edge": 70}}, "size"),
        ({"size": {"shortest_edge": 10**6}}, "size"),
        ({"size": [75]}, "shortest_edge"),
        ({"do_center_crop": False}, "size"),
        ({"crop_size": {"height": 75, "width": 74}}, "crop_size"),
        ({"do_resize": False}, "do_resize"),
        ({"image_mean": "x"}, "image_mean"),
        ({"image_processor_type": 3, "do_pad": True}, "image_processor_type"),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [2, 0, 0]}, "image_mean"),
    ],
    "llava_next": [
        ({"size": {"shortest_edge": 224}}, "size"),
        ({"crop_size": {"height": 75, "width": 70}}, "crop_size"),
        ({"image_mean": [5, 5, 5]}, "colour"),
        ({"image_grid_pinpoints": 5}, "image_grid_pinpoints"),
    ],
    "kimi_vl": [
        ({"pad_input": False}, "pad_input"),
        ({"patch_size": 16}, "patch_size"),
        ({"merge_kernel_size": [1, 1]}, "merge_kernel_size"),
        ({"in_token_limit": 10**8}, "patches"),
        ({"in_token_limit": 0}, "in_token_limit"),
    ],
    "kimi_k25": [
        ({"media_proc_cfg": {"patch_limit_on_one_side": 1024}}, "patch_limit_on_one_side"),
        ({"size": {"max_height": 256, "max_width": 256}}, "patch_limit_on_one_side"),
        ({"resample": 0}, "resample"),
    ],
    "gemma3": [
        ({"size": {"height": 84, "width": 80}}, "size"),
        ({"size": 84}, "size"),
        ({"do_resize": False}, "do_resize"),
    ],
    "llama4": [
        ({"resample": 0}, "resample"),
    ],
}

"""Settings that only the preprocessor refuses."""


def cases(table: Table) -> list[tuple[str, dict[str, Any], str]]:
    return [(family, *case) for family, refused in table.items() for case in refused]


@pytest.mark.parametrize(("family", "settings", "message"), [*cases(CONFIGS), *cases(WEIGHTS)])
def test_adapters_refuse_bad_configs(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(FAMILIES[family].adapter)(with_text_config(with_settings(family, settings).config))


@pytest.mark.parametrize(("family", "settings", "message"), [*cases(CONFIGS), *cases(PLANS)])
def test_planners_refuse_bad_configs(family: str, settings: dict[str, Any], message: str) -> None:
    tiny = with_settings(family, settings)
    processors = tiny.preprocessor or {}, tiny.video_preprocessor or {}
    with pytest.raises(CheckpointError, match=message):
        resolve(FAMILIES[family].planner or "")(with_text_config(tiny.config), *processors)


@pytest.mark.parametrize(("family", "settings", "message"), cases(PROCESSORS))
def test_bad_processors(family: str, settings: dict[str, Any], message: str) -> None:
    check_refused(FAMILIES[family].planner, family, settings, message)
    check_refused(FAMILIES[family].preprocessor, family, settings, message)


@pytest.mark.parametrize(("family", "settings", "message"), cases(PIXELS))
def test_bad_pixels(family: str, settings: dict[str, Any], message: str) -> None:
    check_refused(FAMILIES[family].preprocessor, family, settings, message)


def check_refused(stage: str | None, family: str, settings: dict[str, Any], message: str) -> None:
    tiny = tiny_of(family)
    with pytest.raises(CheckpointError, match=message):
        resolve(stage or "")(with_text_config(tiny.config), {**(tiny.preprocessor or {}), **settings})
