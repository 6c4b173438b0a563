"""Writes the towers of tiny checkpoints as ``mmproj`` files, and their language models as GGUF files.

Names and settings are those that ``convert_hf_to_gguf.py --mmproj`` of llama.cpp (llama-cpp-python 0.3.36) writes for
the same checkpoints; LLaVA's are those of its ``legacy-models/convert_image_encoder_to_gguf.py``.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import DENSE, make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.published_files import make_original_internvl
from tests.support.random_checkpoint import write_json
from tests.support.tiny import OWN_TOWERS, TINY, Tiny, make_tiny

F32 = GGMLQuantizationType.F32
Array = NDArray[Any]
Rules = Sequence[tuple[str, str]]
"""Beginnings of transformers' names, and what files have instead."""
TOWERS = (
    *("visual.", "vision_tower.", "multi_modal_projector.", "audio_tower.", "connector."),
    *("vision_model.", "mlp1.", "image_newline"),
)
ENCODER: Rules = (
    *((rf"vision_tower.encoder.layers.(\d+).self_attn.{one}_proj", rf"v.blk.\1.attn_{one}") for one in "qkv"),
    (r"vision_tower.encoder.layers.(\d+).self_attn.out_proj", r"v.blk.\1.attn_out"),
    (r"vision_tower.encoder.layers.(\d+).layer_norm", r"v.blk.\1.ln"),
    (r"vision_tower.encoder.layers.(\d+).mlp.fc1", r"v.blk.\1.ffn_up"),
    (r"vision_tower.encoder.layers.(\d+).mlp.fc2", r"v.blk.\1.ffn_down"),
    (r"vision_tower.embeddings.patch_embedding", "v.patch_embd"),
    (r"vision_tower.embeddings.position_embedding", "v.position_embd"),
    (r"vision_tower.embeddings.class_embedding", "v.class_embd"),
    (r"vision_tower.pre_layrnorm", "v.pre_ln"),
    (r"vision_tower.post_layernorm", "v.post_ln"),
)
GRID: Rules = (
    (r"visual.blocks.(\d+).attn.qkv", r"v.blk.\1.attn_qkv"),
    (r"visual.blocks.(\d+).attn.proj", r"v.blk.\1.attn_out"),
    (r"visual.blocks.(\d+).norm", r"v.blk.\1.ln"),
    (r"visual.patch_embed.proj", "v.patch_embd"),
    (r"visual.pos_embed", "v.position_embd"),
)
QWEN2_MERGER: Rules = (
    (r"visual.merger.ln_q", "v.post_ln"),
    (r"visual.merger.mlp.(\d)", r"mm.\1"),
)
PIXTRAL: Rules = (
    *((rf"vision_tower.transformer.layers.(\d+).attention.{one}_proj", rf"v.blk.\1.attn_{one}") for one in "qkv"),
    (r"vision_tower.transformer.layers.(\d+).attention.o_proj", r"v.blk.\1.attn_out"),
    (r"vision_tower.transformer.layers.(\d+).attention_norm", r"v.blk.\1.ln1"),
    (r"vision_tower.transformer.layers.(\d+).ffn_norm", r"v.blk.\1.ln2"),
    (r"vision_tower.transformer.layers.(\d+).feed_forward.(\w+)_proj", r"v.blk.\1.ffn_\2"),
    (r"vision_tower.patch_conv", "v.patch_embd"),
    (r"vision_tower.ln_pre", "v.pre_ln"),
    (r"multi_modal_projector.linear_", "mm."),
)


@dataclass(frozen=True)
class Source:
    """A tiny checkpoint and how files name its parts."""

    make: Callable[[Path], Path]
    architecture: str
    projector: str
    rules: Rules
    settings: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}
    """Those besides the towers' sizes, by name without ``clip.``."""
    changed: Callable[[str, Array], Iterator[tuple[str, Array]]] = lambda name, array: iter([(name, array)])
    """Yields what the converter makes of a tensor."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Special tokens of the tiny vocabulary, and what the files call them."""


def _tiny(family: str, preprocessor: dict[str, Any] | None = None, **changes: Any) -> Callable[[Path], Path]:
    tiny: Tiny = (TINY | OWN_TOWERS)[family]
    text = tiny.config.get("text_config", {}) | changes.pop("text_config", {})
    config = tiny.config | ({"text_config": text} if text else {}) | changes
    return lambda folder: make_tiny(
        folder, replace(tiny, config=config, preprocessor=(tiny.preprocessor or {}) | (preprocessor or {}))
    )


def _qwen3_vl(folder: Path) -> Path:
    sizes = replace(DENSE, min_pixels=256 * 256, max_pixels=4096 * 4096)
    return make_checkpoint(folder, sizes=replace(sizes, min_video_pixels=64 * 64, max_video_pixels=32 * 32 * 24576))


def _halves(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """The two frames of a patch apart, and queries, keys and values."""
    if name == "v.patch_embd.weight" and array.ndim == 5:
        yield from ((name, array[:, :, 0]), (f"{name}.1", array[:, :, 1]))
    elif ".attn_qkv." in name and name.startswith("v."):
        for kind, part in zip("qkv", np.split(array, 3), strict=True):
            yield name.replace("_qkv", f"_{kind}"), part
    else:
        yield name, array


def _frames(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    if name == "v.patch_embd.weight" and array.ndim == 5:
        yield from _halves(name, array)
    else:
        yield name, array


def _shifted(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    yield name, array + np.float32(1) if name == "mm.soft_emb_norm.weight" else array


def _first_layers(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """Without the layers after the features', with an MLP's layers named as the older converter does."""
    if not name.startswith(("v.blk.2.", "v.post_ln")):
        swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        yield re.sub("ffn_(up|down)", lambda found: swap[found[0]], name), array


def _omni(folder: Path) -> Path:
    """The files have positions for 1,500 states, as all published ones."""
    thinker = TINY["qwen2_5_omni"].config["thinker_config"]
    vision, audio = thinker["vision_config"] | {"window_size": 112}, thinker["audio_config"]
    audio = {name: value for name, value in audio.items() if name != "max_source_positions"}
    times = {"position_id_per_seconds": 25, "seconds_per_chunk": 2}
    config = {"thinker_config": thinker | times | {"vision_config": vision, "audio_config": audio}}
    processor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 20, "chunk_length": 30}
    return _tiny("qwen2_5_omni", PUBLISHED_AREA | processor, **config)(folder)


def _omni_parts(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """With a convolution's bias of two dimensions."""
    for one, part in _halves(name, array):
        yield one, part[:, None] if re.fullmatch(r"a\.conv1d\.\d\.bias", one) else part


def _squeezed(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """Without leading dimensions of one, as files are that were quantized."""
    for one, part in _halves(name, array):
        yield one, part.squeeze() if one in ("v.class_embd", "v.position_embd.weight") else part


def _paired(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """Rows of the queries and keys of both heads in the order of pairs."""
    if re.search(r"v\.blk\.\d+\.attn_[qk]\.", name):
        array = array.reshape(2, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    yield name, array


def _pixtral_settings(config: dict[str, Any]) -> dict[str, Any]:
    merges = {"vision.spatial_merge_size": config["spatial_merge_size"]} if "spatial_merge_size" in config else {}
    return {"use_silu": True, "vision.attention.layer_norm_epsilon": 1e-5} | merges


_PIXTRAL_FILES: Any = {"settings": _pixtral_settings, "changed": _paired, "renamed": {"<|image_pad|>": "[IMG]"}}
PUBLISHED_AREA = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}
GEMMA_TEXT = {"query_pre_attn_scalar": 24, "num_hidden_layers": 6, "sliding_window_pattern": 6}
SOURCES: dict[str, Source] = {
    "llava": Source(
        make=_tiny("llava"),
        architecture="llama",
        projector="mlp",
        rules=(
            *ENCODER,
            (r"multi_modal_projector.linear_1", "mm.0"),
            (r"multi_modal_projector.linear_2", "mm.2"),
        ),
        settings=lambda config: {"use_gelu": False, "vision.block_count": 2},
        changed=_first_layers,
        renamed={"<|image_pad|>": "<image>"},
    ),
    "llava_next": Source(
        make=_tiny("llava_next"),
        architecture="llama",
        projector="mlp",
        rules=(
            *ENCODER,
            (r"multi_modal_projector.linear_1", "mm.0"),
            (r"multi_modal_projector.linear_2", "mm.2"),
            (r"image_newline", "model.image_newline"),
        ),
        settings=lambda config: {
            "vision.block_count": 2,
            "vision.image_grid_pinpoints": [side for pair in config["image_grid_pinpoints"] for side in pair],
        },
        changed=_first_layers,
        renamed={"<|image_pad|>": "<unk>"},
    ),
    "gemma3": Source(
        make=_tiny("gemma3", text_config=GEMMA_TEXT),
        architecture="gemma3",
        projector="gemma3",
        rules=(
            *ENCODER,
            (r"multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
            (r"multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
        ),
        settings=lambda _: {"use_gelu": True, "vision.projector.scale_factor": 3},
        changed=_shifted,
    ),
    "qwen2_vl": Source(
        make=_tiny("qwen2_vl", PUBLISHED_AREA),
        architecture="qwen2vl",
        projector="qwen2vl_merger",
        rules=(
            *GRID,
            *QWEN2_MERGER,
            (r"visual.blocks.(\d+).mlp.fc1", r"v.blk.\1.ffn_up"),
            (r"visual.blocks.(\d+).mlp.fc2", r"v.blk.\1.ffn_down"),
        ),
        settings=lambda config: {"vision.feed_forward_length": config["hidden_size"]},  # as the converter has it
        changed=_halves,
    ),
    "qwen2_5_vl": Source(
        make=_tiny(
            "qwen2_5_vl",
            PUBLISHED_AREA,
            vision_config=TINY["qwen2_5_vl"].config["vision_config"] | {"window_size": 112},
        ),
        architecture="qwen2vl",
        projector="qwen2.5vl_merger",
        rules=(*GRID, *QWEN2_MERGER, (r"visual.blocks.(\d+).mlp.(\w+)_proj", r"v.blk.\1.ffn_\2")),
        settings=lambda _: {"use_silu": True, "vision.n_wa_pattern": 2},
        changed=_halves,
    ),
    "qwen3_vl": Source(
        make=_qwen3_vl,
        architecture="qwen3vl",
        projector="qwen3vl_merger",
        rules=(
            *GRID,
            (r"visual.blocks.(\d+).mlp.linear_fc1", r"v.blk.\1.ffn_up"),
            (r"visual.blocks.(\d+).mlp.linear_fc2", r"v.blk.\1.ffn_down"),
            (r"visual.deepstack_merger_list.0.linear_fc(\d)", r"v.deepstack.0.fc\1"),
            (r"visual.deepstack_merger_list.1.linear_fc(\d)", r"v.deepstack.2.fc\1"),
            (r"visual.deepstack_merger_list.0.norm", "v.deepstack.0.norm"),
            (r"visual.deepstack_merger_list.1.norm", "v.deepstack.2.norm"),
            (r"visual.merger.norm", "v.post_ln"),
            (r"visual.merger.linear_fc1", "mm.0"),
            (r"visual.merger.linear_fc2", "mm.2"),
        ),
        settings=lambda _: {
            "use_gelu": True,
            "vision.spatial_merge_size": 2,
            "vision.is_deepstack_layers": [True, False, True],
        },
        changed=_frames,
    ),
    "qwen2_5_omni": Source(
        make=_omni,
        architecture="qwen2vl",
        projector="qwen2.5o",
        rules=(
            *((rf"visual.blocks.(\d+).attn.{one}\.", rf"v.blk.\1.attn_{one}.") for one in "qkv"),
            *GRID,
            *QWEN2_MERGER,
            (r"visual.blocks.(\d+).mlp.(\w+)_proj", r"v.blk.\1.ffn_\2"),
            (r"audio_tower.layers.(\d+).self_attn.(.)_proj", r"a.blk.\1.attn_\2"),
            (r"audio_tower.layers.(\d+).self_attn.out_proj", r"a.blk.\1.attn_out"),
            (r"audio_tower.layers.(\d+).self_attn_layer_norm", r"a.blk.\1.ln1"),
            (r"audio_tower.layers.(\d+).final_layer_norm", r"a.blk.\1.ln2"),
            (r"audio_tower.layers.(\d+).fc1", r"a.blk.\1.ffn_up"),
            (r"audio_tower.layers.(\d+).fc2", r"a.blk.\1.ffn_down"),
            (r"audio_tower.conv(\d)", r"a.conv1d.\1"),
            (r"audio_tower.ln_post", "a.post_ln"),
            (r"audio_tower.proj", "mm.a.fc"),
        ),
        settings=lambda _: {
            "use_silu": True,
            "vision.n_wa_pattern": 2,
            "has_audio_encoder": True,
            "audio.embedding_length": 32,
            "audio.feed_forward_length": 48,
            "audio.block_count": 2,
            "audio.attention.head_count": 2,
            "audio.num_mel_bins": 20,
        },
        changed=_omni_parts,
    ),
    "internvl_chat": Source(
        make=make_original_internvl,
        architecture="qwen2",
        projector="internvl",
        rules=(
            (r"vision_model.encoder.layers.(\d+).attn.qkv", r"v.blk.\1.attn_qkv"),
            (r"vision_model.encoder.layers.(\d+).attn.proj", r"v.blk.\1.attn_out"),
            (r"vision_model.encoder.layers.(\d+).norm", r"v.blk.\1.ln"),
            (r"vision_model.encoder.layers.(\d+).ls(.)", r"v.blk.\1.ls\2.weight"),
            (r"vision_model.encoder.layers.(\d+).mlp.fc1", r"v.blk.\1.ffn_up"),
            (r"vision_model.encoder.layers.(\d+).mlp.fc2", r"v.blk.\1.ffn_down"),
            (r"vision_model.embeddings.patch_embedding", "v.patch_embd"),
            (r"vision_model.embeddings.position_embedding", "v.position_embd.weight"),
            (r"vision_model.embeddings.class_embedding", "v.class_embd"),
            (r"mlp1", "mm.model.mlp"),
        ),
        settings=lambda _: {
            "vision.image_size": 56,
            "vision.image_std": [0.229, 0.224, 0.225],
            "vision.projector.scale_factor": 2,
            "vision.preproc_min_tiles": 1,
            "vision.preproc_max_tiles": 6,
        },
        changed=_squeezed,
    ),
    "idefics3": Source(
        make=_tiny("idefics3"),
        architecture="llama",
        projector="idefics3",
        rules=(*ENCODER, (r"connector.modality_projection.proj", "mm.model.fc")),
        settings=lambda _: {"vision.projector.scale_factor": 3, "vision.preproc_image_size": 240},
        renamed={"<|image_pad|>": "<image>"},
    ),
    "llava+pixtral": Source(
        make=_tiny("llava+pixtral"), architecture="llama", projector="pixtral", rules=PIXTRAL, **_PIXTRAL_FILES
    ),
    "mistral3": Source(
        make=_tiny("mistral3"),
        architecture="mistral3",
        projector="pixtral",
        rules=(
            *PIXTRAL,
            (r"multi_modal_projector.norm", "mm.input_norm"),
            (r"multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger"),
        ),
        **_PIXTRAL_FILES,
    ),
}
"""By the model type that folders name."""


def write_both(family: str, folder: Path) -> tuple[Path, Path, Path]:
    """Write a tiny checkpoint into ``folder``. Returns its folder, the file of its language model, and that of its
    towers."""
    source = SOURCES[family]
    checkpoint = source.make(folder / "source")
    for name in ("tokenizer.json", "chat_template.jinja"):
        text = (checkpoint / name).read_text()
        for ours, theirs in source.renamed.items():
            text = text.replace(ours, theirs)
        (checkpoint / name).write_text(text)
    tensors = {_plain(key): array for key, array in load_file(checkpoint / "model.safetensors").items()}
    write_gguf(_text_folder(checkpoint, tensors, folder / "text"), folder / "model.gguf", source.architecture, F32)
    write_mmproj(family, checkpoint, folder / "mmproj.gguf")
    return checkpoint, folder / "model.gguf", folder / "mmproj.gguf"


def write_mmproj(family: str, checkpoint: Path, path: Path, **changes: Any) -> Path:
    """Write the towers of a checkpoint to ``path``. ``changes`` override settings."""
    source = SOURCES[family]
    config = _described(checkpoint)
    vision, processor = config["vision_config"], json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = GGUFWriter(path, "clip")
    settings = {"has_vision_encoder": True, "projector_type": source.projector} | _sizes(vision)
    means = {f"vision.image_{name}": processor.get(f"image_{name}") for name in ("mean", "std")}
    settings |= {name: value for name, value in means.items() if value}
    for name, value in (settings | source.settings(config) | changes).items():
        _add(writer, f"clip.{name}", value)
    for key, array in load_file(checkpoint / "model.safetensors").items():
        if not (plain := _plain(key)).startswith(TOWERS) or "audio_bos_eos_token" in plain:  # nothing reads the latter
            continue
        name = next(re.sub(f"^{rule}", theirs, plain) for rule, theirs in source.rules if re.match(rule, plain))
        for changed, values in source.changed(name, array):
            writer.add_tensor(changed, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(vision: dict[str, Any]) -> dict[str, Any]:
    names = {
        "vision.image_size": ("image_size",),
        "vision.patch_size": ("patch_size",),
        "vision.embedding_length": ("embed_dim", "hidden_size"),
        "vision.feed_forward_length": ("intermediate_size",),
        "vision.block_count": ("num_hidden_layers", "depth"),
        "vision.attention.head_count": ("num_attention_heads", "num_heads"),
    }
    found = {name: next((vision[one] for one in ours if one in vision), None) for name, ours in names.items()}
    eps = vision.get("layer_norm_eps", 1e-5 if vision.get("model_type") == "clip_vision_model" else 1e-6)
    known = {name: value for name, value in found.items() if value is not None}
    return {"vision.image_size": 560} | known | {"vision.attention.layer_norm_epsilon": eps}


def _described(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return config.get("thinker_config", config)


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](name, value)


def _plain(key: str) -> str:
    """A tensor's name, whatever the layout of the checkpoint's names."""
    key = re.sub(r"^(language_model\.model|(model\.)?(language|text)_model)\.", "text.", key.removeprefix("thinker."))
    key = re.sub(r"^model\.(visual|vision_tower|multi_modal_projector|audio_tower|connector)\b", r"\1", key)
    key = key.replace("model.vision_model.", "vision_tower.").replace("vision_tower.vision_model.", "vision_tower.")
    return key.replace("text.lm_head", "lm_head")


def _text_folder(checkpoint: Path, tensors: dict[str, Array], folder: Path) -> Path:
    """A checkpoint of the language model alone."""
    folder.mkdir()
    config = _described(checkpoint)
    write_json(folder / "config.json", config | config.get("text_config", config.get("llm_config", {})))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text((checkpoint / name).read_text())
    text = {
        key.replace("text.", "model.", 1) if key.startswith("text.") else key: array
        for key, array in tensors.items()
        if not key.startswith(TOWERS)
    }
    save_file(text, folder / "model.safetensors")
    return folder
