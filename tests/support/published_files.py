"""Tiny checkpoints as published, of families whose published files differ from transformers' in more than names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.random_checkpoint import write_json
from tests.support.tiny import HEARING_IDS, IDS, OWN_TOWERS, PHI4, PHI4_AUDIO, SHARED, Tiny, make_tiny

ORIGINAL_NAMES = (
    ("vision_tower.", "vision_model."),
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("embeddings.position_embeddings", "embeddings.position_embedding"),
    ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"),
    ("encoder.layer.", "encoder.layers."),
    ("attention.projection_layer", "attn.proj"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("lambda_", "ls"),
    ("multi_modal_projector.layer_norm", "mlp1.0"),
    ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)


def internvl_over(text: Tiny) -> Tiny:
    """The tiny ``internvl`` with another language model. Experts are stored as those of ``text``."""
    settings = {name: it for name, it in text.config.items() if name != "architectures"}
    tiny = OWN_TOWERS["internvl"]
    return replace(tiny, config=tiny.config | {"text_config": settings}, split_experts=text.split_experts)


INTERNLM2_NAMES = (
    ("lm_head.", "output."),
    ("embed_tokens", "tok_embeddings"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)
LLAMA_LIKE_INTERNLM2 = replace(
    BACKBONES["llama"],
    config={name: it for name, it in BACKBONES["llama"].config.items() if name != "rope_scaling"}
    | {"mlp_bias": False, "rope_theta": 1e6},
)
"""A Llama that computes what InternLM2 does."""


INTERNLM2_CONFIG = {
    name: it for name, it in LLAMA_LIKE_INTERNLM2.config.items() if name not in {"attention_bias", "mlp_bias"}
} | {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True}
"""The same as InternLM2."""


def as_internlm2(weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the weights of ``LLAMA_LIKE_INTERNLM2`` as InternLM2 has them: those whose names begin with ``prefix``."""
    found, heads = dict(weights), INTERNLM2_CONFIG["num_key_value_heads"]
    for layer in range(INTERNLM2_CONFIG["num_hidden_layers"]):
        stem = f"{prefix}model.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [found.pop(f"{stem}.self_attn.{name}_proj.{kind}").unflatten(0, (heads, -1)) for name in "qkv"]
            found[f"{stem}.attention.wqkv.{kind}"] = torch.cat(parts, dim=1).flatten(0, 1)
    renamed = {}
    for name, weight in found.items():
        new = name
        for llama, internlm2 in INTERNLM2_NAMES if name.startswith(prefix) else ():
            new = new.replace(llama, internlm2)
        renamed[new] = weight
    return renamed


def make_internlm2(folder: Path, seed: int = 1) -> Path:
    """Writes ``LLAMA_LIKE_INTERNLM2`` as InternLM2, and returns the folder."""
    file = make_tiny(folder, LLAMA_LIKE_INTERNLM2, seed=seed) / "model.safetensors"
    save_file(as_internlm2(load_file(file)), file, metadata={"format": "pt"})
    write_json(folder / "config.json", INTERNLM2_CONFIG)
    return folder


def make_internvl_over_internlm2(folder: Path, seed: int = 1) -> Path:
    """Writes the original files of the tiny ``internvl`` over ``LLAMA_LIKE_INTERNLM2``, with that as InternLM2, and
    returns the folder."""
    make_original_internvl(folder, seed, LLAMA_LIKE_INTERNLM2, llm_config=INTERNLM2_CONFIG)
    file = folder / "model.safetensors"
    save_file(as_internlm2(load_file(file), "language_model."), file, metadata={"format": "pt"})
    return folder


def make_original_internvl(folder: Path, seed: int = 1, text: Tiny | None = None, **settings: Any) -> Path:
    """Writes the tiny ``internvl``, or that over ``text``, as the original files have it (``internvl_chat``), and
    returns the folder. The placeholder's token has the same id. ``settings`` are those of the config."""
    tiny = OWN_TOWERS["internvl"] if text is None else internvl_over(text)
    ids = {"<IMG_CONTEXT>" if token == "<|image_pad|>" else token: number for token, number in IDS.items()}
    make_tiny(folder, replace(tiny, ids=ids), seed=seed)
    weights = load_file(folder / "model.safetensors")
    for layer in range(tiny.config["vision_config"]["num_hidden_layers"]):
        module = f"vision_tower.encoder.layer.{layer}.att"
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{module}ention.{name}_proj.{kind}") for name in "qkv"]
            weights[f"{module}n.qkv.{kind}"] = torch.cat(parts)
    renamed = {}
    for name, weight in weights.items():
        new = name
        for theirs, original in ORIGINAL_NAMES:
            new = new.replace(theirs, original)
        renamed[new if not name.startswith("language_model.") else name] = weight
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    vision = {name: tiny.config["vision_config"][name] for name in ("hidden_size", "intermediate_size")}
    vision |= {"model_type": "intern_vit_6b", "image_size": 28, "patch_size": 14, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2, "qkv_bias": True, "qk_normalization": False, "norm_type": "layer_norm"}
    config: dict[str, Any] = {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "ps_version": "v2"}
    config |= {"force_image_size": 56, "downsample_ratio": 0.5, "select_layer": -1, "use_thumbnail": True}
    config |= {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 6, "template": "internvl2_5"}
    config |= {"llm_config": tiny.config["text_config"], "vision_config": vision}
    write_json(folder / "config.json", config | settings)
    clip = {"image_processor_type": "CLIPFeatureExtractor", "size": 448, "crop_size": 448}
    write_json(folder / "preprocessor_config.json", clip | {"image_mean": [0.485, 0.456, 0.406]})
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|image_pad|>", "<image>"))
    return folder


PHI4_LORAS = {"vision": (6, 3.0), "speech": (4, 8.0)}
"""Ranks and alphas."""
STRINGS_ALONE = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
"""A template like the published one of Phi-4-multimodal."""


def make_published_phi4(folder: Path, seed: int = 1) -> Path:
    """Writes the tiny ``phi4_multimodal`` as published (``phi4mm``), with both LoRAs, and returns the folder."""
    names = {"<|image_pad|>": "<|endoftext10|>", "<|audio_pad|>": "<|endoftext11|>"}
    ids = {names.get(token, token): number for token, number in HEARING_IDS.items()}
    make_tiny(folder, replace(PHI4, ids=ids), seed=seed)
    weights, random = {}, torch.Generator().manual_seed(seed)
    for name, weight in load_file(folder / "model.safetensors").items():
        new = name
        for published, theirs in PHI4_NAMES:
            new = re.sub(theirs, published, new)
        weights[new] = weight.clone()
        if "_proj.weight" in name and ".layers." in name and "embed_tokens_extend" not in name:
            stem = name.removesuffix(".weight")
            weights[f"{stem}.base_layer.weight"] = weights.pop(new)
            for lora, (rank, _) in PHI4_LORAS.items():
                for kind, shape in {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}.items():
                    weights[f"{stem}.lora_{kind}.{lora}.weight"] = torch.randn(shape, generator=random) * 0.2
    # transformers fails when a placeholder is generated
    weights["lm_head.weight"][[HEARING_IDS["<|image_pad|>"], HEARING_IDS["<|audio_pad|>"]]] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {name: it for name, it in PHI4.config.items() if name != "audio_config"}
    config |= {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "img_processor": None}
    config |= {f"{lora}_lora": {"r": rank, "lora_alpha": alpha} for lora, (rank, alpha) in PHI4_LORAS.items()}
    config |= {
        "embd_layer": {
            "image_embd_layer": {"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp"}
            | {"use_hd_transform": True, "with_learnable_separator": True, "hd_transform_order": "sub_glb"}
            | {"crop_size": 56},
            "audio_embd_layer": {"downsample_rate": 1, "compression_rate": 8, "projection_cls": "mlp"},
        },
        "audio_processor": {"name": "cascades", "config": PUBLISHED_PHI4_AUDIO},
    }
    write_json(folder / "config.json", config)
    (folder / "chat_template.jinja").write_text(STRINGS_ALONE)
    return folder


ORIGINALS = {"internvl_chat": make_original_internvl, "phi4mm": make_published_phi4}
"""Make original files of the same model as ``make_tiny`` of its counterpart in ``SAME_MEDIA``, by model type."""


def make_of_type(folder: Path, model_type: str, seed: int = 1) -> Path:
    """Writes a tiny checkpoint of a model type that has a family of its own, shares one or is that of original files,
    and returns the folder."""
    if model_type in ORIGINALS:
        return ORIGINALS[model_type](folder, seed)
    if model_type in SHARED:
        return make_tiny(folder, *SHARED[model_type], seed=seed)
    return make_tiny(folder, model_type, seed=seed)


def write_peft_loras(published: Path, to: Path, loras: Sequence[str] = tuple(PHI4_LORAS)) -> None:
    """Writes the LoRAs of ``make_published_phi4`` into folders, as peft has them beside transformers' files."""
    weights = load_file(published / "model.safetensors")
    for lora in loras:
        rank, alpha = PHI4_LORAS[lora]
        place = to / f"{lora}-lora"
        place.mkdir()
        settings: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
        settings |= {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "use_dora": False}
        write_json(place / "adapter_config.json", settings | {"rank_pattern": {}, "modules_to_save": None})
        tensors = {
            f"base_model.model.{name.replace(f'.{lora}.weight', '.weight')}": weight
            for name, weight in weights.items()
            if name.endswith(f".{lora}.weight")
        }
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})


PUBLISHED_PHI4_AUDIO: dict[str, Any] = {
    **{name: PHI4_AUDIO[name] for name in ("num_blocks", "left_chunk", "ext_pw_out_channel")},
    "attention_dim": 24,
    "attention_heads": 2,
    "linear_units": 36,
    "depthwise_seperable_out_channel": 24,
    "causal": True,
    "batch_norm": False,
    "chunk_size": -1,
    "time_reduction": 8,
    "cnn_layer_norm": True,
    "input_layer": "nemo_conv",
    "input_size": 80,
    "activation_checkpointing": "",
    "encoder_embedding_config": {"input_size": 80},
    "nemo_conv_settings": {"conv_channels": 8},
    "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 10},
}

PHI4_NAMES = (
    (r"image_embed.img_projection.0.", r"image_embed\.img_projection_up\."),
    (r"image_embed.img_projection.2.", r"image_embed\.img_projection_down\."),
    (r"image_embed.glb_GN", r"image_embed\.global_img_feature_extensor"),
    (r"image_embed.sub_GN", r"image_embed\.sub_img_feature_extensor"),
    (r"audio_projection.\1.0.", r"up_proj_for_(speech|vision)(_speech)?\."),
    (r"audio_projection.\1.2.", r"down_proj_for_(speech|vision)(_speech)?\."),
    (r"feed_forward_\1.net.0.linear", r"feed_forward_(in|out)\.gate_up_proj"),
    (r"feed_forward_\1.net.2", r"feed_forward_(in|out)\.down_proj"),
    (r"\1.self_attn.linear_\2", r"(audio_embed\.encoder\.encoders\.\d+)\.self_attn\.([qkv])_proj"),
    (r"\1.self_attn.linear_out", r"(audio_embed\.encoder\.encoders\.\d+)\.self_attn\.o_proj"),
)
"""Published names, and patterns of transformers', applied in order."""
