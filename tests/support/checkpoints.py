"""Tiny Qwen3-VL checkpoint folders with random weights, made offline in a fraction of a second.

The folder has all that a published one has: config, safetensors, byte-level tokenizer, chat template, and preprocessor
and generation settings.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.support import deepseek_ocr
from tests.support.independent import model_class
from tests.support.random_checkpoint import (
    Sizes,
    model_config,
    random_weight,
    weight_shapes,
    write_settings,
    write_tokenizer,
    write_weights,
)
from triptych.checkpoint.config_files import load_config
from triptych.layers.encoder import ModelAdapter
from triptych.models.registry import family_of, resolve

Layout = Literal["saved", "published"]
"""``saved``: what ``save_pretrained`` of transformers writes; ``published``: what the Hub folders hold."""

DENSE = Sizes(
    hidden=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocabulary=264,  # 256 bytes and eight special tokens
    context=4096,
    mrope_section=(4, 2, 2),
    vision_depth=3,
    vision_hidden=32,
    vision_heads=2,
    vision_intermediate=48,
    vision_positions=64,
    deepstack=(0, 2),
    min_pixels=64 * 64,
    max_pixels=256 * 256,
    max_video_pixels=8 * 128 * 128,
)
"""Images become 4 to 64 rows: patches of 16 pixels, merged two by two, so a row per 32 × 32 pixels."""

MOE = replace(DENSE, experts=8, experts_per_token=2, expert_intermediate=48, dense_layers=(1,))


def make_checkpoint(
    folder: Path,
    *,
    moe: bool = False,
    tied: bool = True,
    layout: Layout = "published",
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sizes: Sizes | None = None,
) -> Path:
    """Writes a checkpoint folder and returns it. ``sizes`` overrides the tiny ones, and then ``moe`` says nothing.

    The same ``seed``, ``sizes`` and ``dtype`` give the same model in both layouts.
    """
    sizes = replace(sizes or (MOE if moe else DENSE), tied=tied)
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder, sizes)
    write_tokenizer(folder, sizes.vocabulary)
    if layout == "published":
        write_weights(folder, model_config(sizes), seed, dtype, num_shards=3 if sharded else 1, sizes=sizes)
    else:
        _save_pretrained(folder, sizes, seed, dtype, sharded)
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The folder's model as transformers loads it, for inference."""
    config = load_config(folder)
    name: str = config["architectures"][0]
    if (thinker := config.get("thinker_config")) is not None:
        thinker_class = getattr(transformers, name.replace("ForConditional", "ThinkerForConditional"))
        loaded = thinker_class.from_pretrained(folder, config=thinker_class.config_class(**thinker), dtype=dtype)
        return loaded.eval().requires_grad_(False)
    if config["model_type"] == deepseek_ocr.PUBLISHED:
        image = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        [token] = [one["id"] for one in image if one["content"] == deepseek_ocr.IMAGE]
        own_class, made = deepseek_ocr.model_of(config, token)
        return own_class.from_pretrained(folder, config=made, dtype=dtype).eval().requires_grad_(False)
    # transformers' other attention makes Phi-4's tiles causal where no patch is masked
    eager = {"attn_implementation": "eager"} if config["model_type"] == "phi4_multimodal" else {}
    loaded = model_class(name).from_pretrained(folder, dtype=dtype, **eager)
    return loaded.eval().requires_grad_(False)


def load_adapter(folder: Path) -> ModelAdapter:
    """Return the adapter of a checkpoint folder, as instances do."""
    config = load_config(folder)
    adapter: ModelAdapter = resolve(family_of(config).adapter)(config)
    return adapter


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes top-level settings of ``config.json``; a dict changes a section's settings; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            config[name] |= value
        elif value is None:
            del config[name]
        else:
            config[name] = value
    path.write_text(json.dumps(config))


def _save_pretrained(folder: Path, sizes: Sizes, seed: int, dtype: torch.dtype, sharded: bool) -> None:
    """Weights and config as a model that transformers made, not loaded, saves them."""
    config = model_config(sizes)
    if sizes.experts:
        model: Any = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**config))
    else:
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config))
    model = model.to(dtype)
    weights = {name: random_weight(name, shape, sizes, seed, dtype) for name, shape in weight_shapes(config).items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing != (["lm_head.weight"] if sizes.tied else []):
        raise ValueError(f"weights left at their initial values: {missing}")
    model.save_pretrained(folder, max_shard_size="200KB" if sharded else "1GB")


def is_mapped(tensor: Tensor, file: Path) -> bool:
    """Whether the tensor's memory is a mapping of the file, by the kernel's account."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split(maxsplit=1)[0].partition("-")
        if int(start, 16) <= tensor.data_ptr() < int(end, 16):
            return line.endswith(str(file))
    return False
