"""What ``mmproj`` files call the settings and tensors of towers, and what transformers' files do."""

from collections.abc import Mapping
from dataclasses import replace

from triptych.checkpoint.config_files import PREPROCESSOR_CONFIG
from triptych.checkpoint.gguf.architectures import Config
from triptych.checkpoint.gguf.towers import ModelFiles, Projector

MAX_LAYERS = 1024
"""More than any tower has, whatever a file says."""
VIDEO_CONFIG = "video_preprocessor_config.json"
TOWER, PROJECTOR, VISUAL = "model.vision_tower", "model.multi_modal_projector", "model.visual"
CLIP_LAYER = {
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
CLIP_WHOLE = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.class_embd": "embeddings.class_embedding",
    "v.pre_ln": "pre_layrnorm",
    "v.post_ln": "post_layernorm",
}
GRID_WHOLE = {
    "v.patch_embd.weight": "patch_embed.proj.weight",
    "v.patch_embd.weight.1": "patch_embed.proj.weight",
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd": "pos_embed",
}
GRID_LAYER = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
GRID_STACKED = {f"{VISUAL}.patch_embed.proj.weight": 2}
"""Files have the two frames of a patch apart."""
SEPARATE = {f"attn_{one}": "attn.qkv" for one in "qkv"}
VISION_TOKENS = {
    "image_token_id": ("<|image_pad|>",),
    "video_token_id": ("<|video_pad|>",),
    "vision_start_token_id": ("<|vision_start|>",),
    "vision_end_token_id": ("<|vision_end|>",),
}


def _named(prefix: str, whole: Mapping[str, str], layers: str, layer: Mapping[str, str]) -> dict[str, str]:
    """Return transformers' names of a tower: of its own tensors, and of those of its layers."""
    named = {name: f"{prefix}.{theirs}" for name, theirs in whole.items()}
    return named | {f"v.blk.{{}}.{name}": f"{prefix}.{layers}.{{}}.{theirs}" for name, theirs in layer.items()}


def _transformer(model: ModelFiles) -> Config:
    """Return the settings of CLIP's and SigLIP's towers."""
    vision = model.vision
    return {
        "image_size": vision.number("image_size"),
        "patch_size": vision.number("patch_size"),
        "hidden_size": vision.number("embedding_length"),
        "intermediate_size": vision.number("feed_forward_length"),
        "num_hidden_layers": vision.number("block_count"),
        "num_attention_heads": vision.number("attention.head_count"),
        "layer_norm_eps": vision.number("attention.layer_norm_epsilon"),
    }


def _square(model: ModelFiles) -> Config:
    side = model.vision.number("image_size")
    return {"height": side, "width": side}


# ── LLaVA-1.5 ────────────────────────────────────────────────────────────────────────────────────────────────────


NEWLINE = "model.image_newline"
"""Tensor of LLaVA-NeXT (1.6) alone."""
VICUNA = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}{{ 'IMAGE\\n' if part.type == 'image' else part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ 'ASSISTANT: ' + shown(message.content) + '</s>' }}
{%- elif message.role == 'system' -%}{{ shown(message.content) + ' ' }}
{%- else -%}{{ 'USER: ' + shown(message.content) + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""


def _pinpoints(model: ModelFiles) -> Config:
    """Return the sizes that LLaVA-NeXT's images are resized to; empty for LLaVA-1.5."""
    if NEWLINE not in model.tensors:
        return {}
    sides = model.vision.numbers("image_grid_pinpoints")
    return {"image_grid_pinpoints": [list(pair) for pair in zip(sides[::2], sides[1::2], strict=False)]}


def _llava(model: ModelFiles) -> Config:
    """The files have the layers up to the one whose states are the features."""
    is_clip = "v.class_embd" in model.tensors
    kind = {"model_type": "clip_vision_model" if is_clip else "siglip_vision_model"}
    activation = "gelu" if model.clip.holds("use_gelu") else "quick_gelu"
    has_layers = model.vision.has("feature_layer")
    return {
        "model_type": "llava_next" if NEWLINE in model.tensors else "llava",
        **_pinpoints(model),
        "vision_config": kind | _transformer(model) | ({"hidden_act": activation} if is_clip else {}),
        "vision_feature_layer": model.vision.numbers("feature_layer") if has_layers else -1,
        "vision_feature_select_strategy": "default" if is_clip else "full",
    }


def _cropped(model: ModelFiles) -> Mapping[str, Config]:
    side = model.vision.number("image_size")
    size = {"size": {"shortest_edge": side}, "crop_size": _square(model), "do_center_crop": True}
    kind = "LlavaNextImageProcessor" if NEWLINE in model.tensors else "CLIPImageProcessor"
    return {PREPROCESSOR_CONFIG: {"image_processor_type": kind, "resample": 3} | size | model.image | _pinpoints(model)}


LLAVA = Projector(
    config=_llava,
    processors=_cropped,
    names={
        **_named(TOWER, CLIP_WHOLE, "encoder.layers", CLIP_LAYER),
        "v.class_embd": f"{TOWER}.embeddings.class_embedding",
        "mm.0": f"{PROJECTOR}.linear_1",
        "mm.2": f"{PROJECTOR}.linear_2",
        NEWLINE: NEWLINE,
    },
    output=("mm.2.weight", 0),
    # the vocabularies of original models have no <image>; text never becomes <unk>
    tokens={"image_token_index": ("<image>", "<unk>")},
    template=VICUNA,
    dimensions={f"{TOWER}.embeddings.class_embedding": 1},
)

# ── Gemma 3 ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _gemma3(model: ModelFiles) -> Config:
    side = model.vision.number("image_size") // max(1, model.vision.number("patch_size"))
    rows = side // max(1, model.vision.number("projector.scale_factor", 4))
    return {
        "model_type": "gemma3",
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | _transformer(model),
        "mm_tokens_per_image": rows**2,
    }


def _squashed(model: ModelFiles) -> Mapping[str, Config]:
    size = {"image_processor_type": "Gemma3ImageProcessor", "size": _square(model), "resample": 2}
    return {PREPROCESSOR_CONFIG: size | model.image}


GEMMA3 = Projector(
    config=_gemma3,
    processors=_squashed,
    names={
        **_named(TOWER, CLIP_WHOLE, "encoder.layers", CLIP_LAYER),
        "mm.input_projection.weight": f"{PROJECTOR}.mm_input_projection_weight",
        "mm.soft_emb_norm": f"{PROJECTOR}.mm_soft_emb_norm",
    },
    output=("mm.input_projection.weight", 1),
    # files with 262,144 tokens have no <image_soft_token>
    tokens={
        "image_token_index": ("<image_soft_token>", "<unused98>"),
        "boi_token_index": ("<start_of_image>",),
        "eoi_token_index": ("<end_of_image>",),
    },
    shifts={f"{PROJECTOR}.mm_soft_emb_norm.weight": 1},
)

# ── Qwen-VL ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _grid(model: ModelFiles) -> Config:
    vision = model.vision
    return {
        "depth": vision.number("block_count"),
        "num_heads": vision.number("attention.head_count"),
        "patch_size": vision.number("patch_size"),
        "spatial_merge_size": vision.number("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _in_three_axes(model: ModelFiles, **more: object) -> Config:
    """Return the language model's settings with the numbers of frequencies for time, height and width."""
    sections = [int(one) for one in model.text.numbers("rope.dimension_sections")[:3]]
    return model.text_config | {"rope_scaling": {"rope_type": "default", "mrope_section": sections} | more}


def _qwen2_vl(model: ModelFiles) -> Config:
    hidden, inner = model.vision.number("embedding_length"), max(model.shape("v.blk.0.ffn_up.weight"))
    sizes = {"embed_dim": hidden, "mlp_ratio": inner // max(1, hidden), "hidden_size": model.text_config["hidden_size"]}
    return {
        "model_type": "qwen2_vl",
        "vision_config": _grid(model) | sizes | {"hidden_act": "quick_gelu"},
        "text_config": _in_three_axes(model),
    }


def _qwen2_5_vl(model: ModelFiles) -> Config:
    vision, grid = model.vision, _grid(model)
    whole, depth = max(1, vision.number("n_wa_pattern")), min(grid["depth"], MAX_LAYERS)
    sizes = {
        "hidden_size": vision.number("embedding_length"),
        "intermediate_size": vision.number("feed_forward_length"),
        "out_hidden_size": model.text_config["hidden_size"],
        "window_size": vision.number("window_size", 112),
        "fullatt_block_indexes": list(range(int(whole) - 1, int(depth), int(whole))),
        "tokens_per_second": 2,
    }
    return {
        "model_type": "qwen2_5_vl",
        "vision_config": grid | sizes | {"hidden_act": "silu"},
        "text_config": _in_three_axes(model),
    }


def _qwen3_vl(model: ModelFiles) -> Config:
    vision = model.vision
    deep = vision.flags("is_deepstack_layers") if vision.has("is_deepstack_layers") else []
    sizes = {
        "hidden_size": vision.number("embedding_length"),
        "intermediate_size": vision.number("feed_forward_length"),
        "out_hidden_size": model.text_config["hidden_size"],
        "num_position_embeddings": model.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": [number for number, is_deep in enumerate(deep) if is_deep],
        "hidden_act": "gelu_pytorch_tanh",
    }
    is_mixture = model.text_config["model_type"] == "qwen3_moe"
    return {
        "model_type": "qwen3_vl_moe" if is_mixture else "qwen3_vl",
        "vision_config": _grid(model) | sizes,
        "text_config": _in_three_axes(model, mrope_interleaved=True),
    }


def _patches(model: ModelFiles, least: int, most: int, **more: object) -> Config:
    """Return the settings of Qwen's processors; an image's area is from ``least`` to ``most`` pixels."""
    area = {"shortest_edge": model.vision.number("image_min_pixels", least)}
    area |= {"longest_edge": model.vision.number("image_max_pixels", most)}
    patch = {"patch_size": model.vision.number("patch_size"), "temporal_patch_size": 2}
    merge = {"merge_size": model.vision.number("spatial_merge_size", 2)}
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": area} | patch | merge | model.image | more


def _qwen2_processors(model: ModelFiles) -> Mapping[str, Config]:
    """Files have no sizes of images: these are those of the published models."""
    return {PREPROCESSOR_CONFIG: _patches(model, 56 * 56, 28 * 28 * 16384)}


def _qwen3_processors(model: ModelFiles) -> Mapping[str, Config]:
    video = {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 24576}}
    return {
        PREPROCESSOR_CONFIG: _patches(model, 256 * 256, 32 * 32 * 16384),
        VIDEO_CONFIG: _patches(model, 0, 0) | video,
    }


def _merged(norm: str, first: str, second: str) -> dict[str, str]:
    """Return the names of what merges patches."""
    names = {"v.post_ln": norm, "mm.0": first, "mm.2": second}
    return {name: f"{VISUAL}.merger.{theirs}" for name, theirs in names.items()}


QWEN2_VL = Projector(
    config=_qwen2_vl,
    processors=_qwen2_processors,
    names={
        **_named(VISUAL, GRID_WHOLE, "blocks", GRID_LAYER | SEPARATE | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        **_merged("ln_q", "mlp.0", "mlp.2"),
    },
    output=("mm.2.weight", 0),
    tokens=VISION_TOKENS,
    stacked=GRID_STACKED,
)
QWEN2_5_VL = Projector(
    config=_qwen2_5_vl,
    processors=_qwen2_processors,
    names={
        **_named(
            VISUAL,
            GRID_WHOLE,
            "blocks",
            GRID_LAYER | SEPARATE | {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
        ),
        **_merged("ln_q", "mlp.0", "mlp.2"),
    },
    output=("mm.2.weight", 0),
    tokens=VISION_TOKENS,
    stacked=GRID_STACKED,
)
QWEN3_VL = Projector(
    config=_qwen3_vl,
    processors=_qwen3_processors,
    names={
        **_named(
            VISUAL,
            GRID_WHOLE,
            "blocks",
            GRID_LAYER | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        ),
        **_merged("norm", "linear_fc1", "linear_fc2"),
        **{
            f"v.deepstack.{{}}.{name}": f"{VISUAL}.deepstack_merger_list.{{}}.{theirs}"
            for name, theirs in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2"))
        },
    },
    output=("mm.2.weight", 0),
    tokens=VISION_TOKENS,
    stacked=GRID_STACKED,
)


# ── Qwen2.5-Omni ─────────────────────────────────────────────────────────────────────────────────────────────────

AUDIO = "model.audio_tower"
WHISPER_LAYER = {
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}


def _omni(model: ModelFiles) -> Config:
    audio, seeing = model.audio, _qwen2_5_vl(model)
    tower = {
        "num_mel_bins": audio.number("num_mel_bins"),
        "d_model": audio.number("embedding_length"),
        "encoder_layers": audio.number("block_count"),
        "encoder_attention_heads": audio.number("attention.head_count"),
        "encoder_ffn_dim": audio.number("feed_forward_length"),
        "output_dim": model.text_config["hidden_size"],
    }
    times = {"position_id_per_seconds": 25, "seconds_per_chunk": 2}
    return seeing | times | {"model_type": "qwen2_5_omni_thinker", "audio_config": tower}


def _omni_processors(model: ModelFiles) -> Mapping[str, Config]:
    bands = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": model.audio.number("num_mel_bins")}
    return {PREPROCESSOR_CONFIG: _patches(model, 56 * 56, 28 * 28 * 16384) | bands}


QWEN2_5_OMNI = replace(
    QWEN2_5_VL,
    config=_omni,
    processors=_omni_processors,
    names={
        **QWEN2_5_VL.names,
        **{f"v.blk.{{}}.attn_{one}": f"{VISUAL}.blocks.{{}}.attn.{one}" for one in "qkv"},
        **{f"a.blk.{{}}.{name}": f"{AUDIO}.layers.{{}}.{theirs}" for name, theirs in WHISPER_LAYER.items()},
        "a.conv1d.1": f"{AUDIO}.conv1",
        "a.conv1d.2": f"{AUDIO}.conv2",
        "a.post_ln": f"{AUDIO}.ln_post",
        "mm.a.fc": f"{AUDIO}.proj",
    },
    tokens={
        "image_token_id": ("<|IMAGE|>", "<|image_pad|>"),
        "video_token_id": ("<|VIDEO|>", "<|video_pad|>"),
        "vision_start_token_id": ("<|vision_bos|>", "<|vision_start|>"),
        "vision_end_token_id": ("<|vision_eos|>", "<|vision_end|>"),
        "audio_token_id": ("<|AUDIO|>", "<|audio_pad|>"),
        "audio_start_token_id": ("<|audio_bos|>", "<|audio_start|>"),
        "audio_end_token_id": ("<|audio_eos|>", "<|audio_end|>"),
    },
    dimensions={f"{AUDIO}.conv{number}.bias": 1 for number in (1, 2)},
    unused=("a.position_embd.",),  # sines, which the tower makes itself
)

# ── InternVL ─────────────────────────────────────────────────────────────────────────────────────────────────────

INTERN_VIT = "vision_model"


def _internvl(model: ModelFiles) -> Config:
    """Return the config in the original files' words: GGUF files have their templates."""
    vision, tensors = model.vision, model.tensors
    tower = _transformer(model) | {
        "hidden_act": "gelu",
        "qkv_bias": "v.blk.0.attn_q.bias" in tensors,
        "qk_normalization": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
    }
    tiles = {"min_dynamic_patch": vision.number("preproc_min_tiles", 1)}
    tiles |= {"max_dynamic_patch": vision.number("preproc_max_tiles", 12)}
    return tiles | {
        "model_type": "internvl_chat",
        "ps_version": "v2",
        "downsample_ratio": 1 / max(1, vision.number("projector.scale_factor", 2)),
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "vision_config": tower,
    }


INTERNVL = Projector(
    config=_internvl,
    processors=lambda model: {PREPROCESSOR_CONFIG: {"image_processor_type": "CLIPFeatureExtractor"} | model.image},
    names={
        **_named(
            INTERN_VIT,
            {
                "v.patch_embd": "embeddings.patch_embedding",
                "v.position_embd.weight": "embeddings.position_embedding",
                "v.class_embd": "embeddings.class_embedding",
            },
            "encoder.layers",
            SEPARATE
            | {"attn_qkv": "attn.qkv", "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm"}
            | {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2", "ls1.weight": "ls1", "ls2.weight": "ls2"}
            | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        ),
        **{f"mm.model.mlp.{number}": f"mlp1.{number}" for number in (0, 1, 3)},
    },
    output=("mm.model.mlp.3.weight", 0),
    tokens={"image_token_id": ("<IMG_CONTEXT>",)},
    text="language_model.model.",
    head="language_model.",
    dimensions={
        f"{INTERN_VIT}.embeddings.class_embedding": 3,
        f"{INTERN_VIT}.embeddings.position_embedding": 3,
    },
)

# ── Idefics3, SmolVLM ────────────────────────────────────────────────────────────────────────────────────────────


def _idefics3(model: ModelFiles) -> Config:
    return {
        "model_type": "idefics3",
        "vision_config": {"model_type": "idefics3_vision"} | _transformer(model),
        "scale_factor": model.vision.number("projector.scale_factor", 2),
    }


def _tiles(model: ModelFiles) -> Mapping[str, Config]:
    side = model.vision.number("image_size")
    edges: Config = {"size": {"longest_edge": model.vision.number("preproc_image_size", 4 * side)}}
    edges |= {"max_image_size": {"longest_edge": side}, "do_image_splitting": True, "resample": 1}
    return {PREPROCESSOR_CONFIG: {"image_processor_type": "Idefics3ImageProcessor"} | edges | model.image}


IDEFICS3 = Projector(
    config=_idefics3,
    processors=_tiles,
    names={
        **_named("model.vision_model", CLIP_WHOLE, "encoder.layers", CLIP_LAYER),
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    output=("mm.model.fc.weight", 0),
    tokens={"image_token_id": ("<image>",)},
    text="model.text_model.",
)

# ── Pixtral, Mistral 3 ───────────────────────────────────────────────────────────────────────────────────────────


def _pixtral(model: ModelFiles) -> Config:
    merges = "mm.patch_merger.weight" in model.tensors
    tower = {name: value for name, value in _transformer(model).items() if name != "layer_norm_eps"}
    activation = "silu" if model.clip.holds("use_silu") else "gelu"
    return {
        "model_type": "mistral3" if merges else "llava",
        "vision_config": tower | {"model_type": "pixtral", "hidden_act": activation},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in model.tensors,
    } | ({"spatial_merge_size": model.vision.number("spatial_merge_size", 2)} if merges else {})


def _pixtral_processors(model: ModelFiles) -> Mapping[str, Config]:
    patch, longest = model.vision.number("patch_size"), model.vision.number("image_size")
    sizes = {"size": {"longest_edge": longest}, "patch_size": {"height": patch, "width": patch}}
    return {PREPROCESSOR_CONFIG: {"image_processor_type": "PixtralImageProcessor", "resample": 3} | sizes | model.image}


PIXTRAL = Projector(
    config=_pixtral,
    processors=_pixtral_processors,
    names={
        **_named(
            TOWER,
            {"v.patch_embd": "patch_conv", "v.pre_ln": "ln_pre"},
            "transformer.layers",
            {f"attn_{one}": f"attention.{one}_proj" for one in "qkv"}
            | {"attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm"}
            | {f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
        ),
        "mm.1": f"{PROJECTOR}.linear_1",
        "mm.2": f"{PROJECTOR}.linear_2",
        "mm.input_norm": f"{PROJECTOR}.norm",
        "mm.patch_merger": f"{PROJECTOR}.patch_merger.merging_layer",
    },
    output=("mm.2.weight", 0),
    tokens={"image_token_index": ("[IMG]",)},
    rotated=tuple(f"{TOWER}.transformer.layers.{{}}.attention.{one}_proj.weight" for one in "qk"),
    unused=("v.token_embd.img_break",),  # a row of the language model's embedding
)

PROJECTORS: Mapping[str, Mapping[str, Projector]] = {
    "mlp": {"llama": LLAVA},
    "gemma3": {"gemma3": GEMMA3},
    "qwen2vl_merger": {"qwen2vl": QWEN2_VL},
    "qwen2.5vl_merger": {"qwen2vl": QWEN2_5_VL},
    "qwen3vl_merger": {"qwen3vl": QWEN3_VL, "qwen3vlmoe": QWEN3_VL},
    "qwen2.5o": {"qwen2vl": QWEN2_5_OMNI},
    "internvl": dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "llama"), INTERNVL),
    "idefics3": {"llama": IDEFICS3},
    "pixtral": {"llama": PIXTRAL, "mistral3": PIXTRAL},
}
"""By ``clip.projector_type``, then by the language model's ``general.architecture``."""
