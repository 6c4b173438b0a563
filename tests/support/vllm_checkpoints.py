"""Small checkpoints with random weights in float32 that vLLM loads as well: heads and widths that its kernels take."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.support.checkpoints import make_checkpoint
from tests.support.random_checkpoint import CHAT_TEMPLATE, Sizes, random_weight, token_ids, write_json, write_tokenizer

QWEN3 = Sizes(
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=512,
    vocabulary=264,
    context=8192,
    mrope_section=(12, 10, 10),
    tied=False,
    vision_depth=4,
    vision_hidden=128,
    vision_heads=4,
    vision_intermediate=256,
    vision_positions=256,
    deepstack=(1, 2),
    min_pixels=4096,
    max_pixels=2**20,
)
IDS = token_ids(QWEN3.vocabulary)
TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "eos_token_id": IDS["<|im_end|>"],
}
LLAVA_IMAGE = 264


def qwen2_5(folder: Path) -> Path:
    """Qwen2.5-VL's shape."""
    rope = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [8, 12, 12]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": QWEN3.vocabulary, "rope_parameters": rope},
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 256,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        tie_word_embeddings=False,
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
    )
    _write(folder, transformers.Qwen2_5_VLForConditionalGeneration, config)
    write_tokenizer(folder, QWEN3.vocabulary)
    size = {"shortest_edge": 3136, "longest_edge": 1003520}
    transformers.Qwen2VLImageProcessorPil(patch_size=14, size=size).save_pretrained(folder)
    return folder


def qwen3(folder: Path) -> Path:
    """Qwen3-VL's shape, with two levels of deepstack features."""
    return make_checkpoint(folder, tied=False, sizes=QWEN3)


def qwen3_moe(folder: Path) -> Path:
    """The same with experts."""
    sizes = replace(QWEN3, experts=8, experts_per_token=2, expert_intermediate=128)
    return make_checkpoint(folder, tied=False, sizes=sizes)


def llava(folder: Path) -> Path:
    """LLaVA-1.5's shape."""
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 272, "architectures": ["LlamaForCausalLM"]},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "image_size": 224,
            "patch_size": 14,
            "projection_dim": 128,
        },
        image_token_index=LLAVA_IMAGE,
        projector_hidden_act="gelu",
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    _write(folder, transformers.LlavaForConditionalGeneration, config, _LLAVA_NAMES)
    write_tokenizer(folder, QWEN3.vocabulary, {**IDS, "<image>": LLAVA_IMAGE})
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    (folder / "chat_template.jinja").write_text(template)
    transformers.CLIPImageProcessorPil(
        crop_size={"height": 224, "width": 224}, size={"shortest_edge": 224}
    ).save_pretrained(folder)
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    write_json(folder / "processor_config.json", processor)
    return folder


_LLAVA_NAMES = (
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.language_model.", "language_model.model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)
"""What transformers calls weights, and the published files, which vLLM reads."""


def _write(folder: Path, model_class: Any, config: Any, renamed: Sequence[tuple[str, str]] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in model_class(config).state_dict().items()}
    weights = {}
    for name, shape in shapes.items():
        old, new = next((pair for pair in renamed if name.startswith(pair[0])), ("", ""))
        weights[new + name.removeprefix(old)] = random_weight(name, shape, QWEN3, 0, torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = [model_class.__name__], "float32"
    config.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": IDS["<|im_end|>"]})


SHAPES = {"qwen2.5-vl": qwen2_5, "qwen3-vl": qwen3, "qwen3-vl-moe": qwen3_moe, "llava": llava}
