"""Checkpoint folders with random weights: Qwen3-VL's published files and names, of any size, and weights of other
models as transformers' modules hold them."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL_TOKENS = {  # with their ids in the published tokenizer
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ("image", "image_url") -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == "audio" -%}
<|audio_start|><|audio_pad|><|audio_end|>
{%- elif part.type == "text" -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@dataclass(frozen=True)
class Sizes:
    """A model's sizes. ``experts`` of 0 makes it dense; ``gain`` scales the random weights."""

    hidden: int = 1024
    layers: int = 12
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 151936
    context: int = 32768
    mrope_section: tuple[int, ...] = (24, 20, 20)
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    vision_depth: int = 12
    vision_hidden: int = 768
    vision_heads: int = 12
    vision_intermediate: int = 3072
    vision_positions: int = 2304
    deepstack: tuple[int, ...] = (3, 6, 9)
    patch: int = 16
    merge: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    min_video_pixels: int = 4096
    max_video_pixels: int = 25165824
    gain: float = 1.5


def token_ids(vocabulary: int) -> dict[str, int]:
    """Ids of the special tokens: the published ones where they fit, else the first after the 256 bytes."""
    if vocabulary > max(SPECIAL_TOKENS.values()):
        return SPECIAL_TOKENS
    return {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}


def model_config(sizes: Sizes) -> dict[str, Any]:
    """``config.json`` in the published files' spelling."""
    ids = token_ids(sizes.vocabulary)
    kind = "qwen3_vl_moe" if sizes.experts else "qwen3_vl"
    architecture = "Qwen3VLMoeForConditionalGeneration" if sizes.experts else "Qwen3VLForConditionalGeneration"
    return {
        "architectures": [architecture],
        "model_type": kind,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": sizes.tied,
        "text_config": text_config(sizes, kind),
        "vision_config": vision_config(sizes, kind),
    }


def text_config(sizes: Sizes, kind: str) -> dict[str, Any]:
    """The text section of ``config.json``."""
    ids = token_ids(sizes.vocabulary)
    text = {
        "model_type": f"{kind}_text",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": sizes.context,
        "rope_theta": 5000000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": list(sizes.mrope_section),
        },
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }
    if sizes.experts:
        text |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(sizes.dense_layers),
        }
    return text


def vision_config(sizes: Sizes, kind: str) -> dict[str, Any]:
    """The vision section of ``config.json``; like the published ones, it gives the whole model's type."""
    return {
        "model_type": kind,
        "depth": sizes.vision_depth,
        "hidden_size": sizes.vision_hidden,
        "num_heads": sizes.vision_heads,
        "intermediate_size": sizes.vision_intermediate,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": sizes.patch,
        "temporal_patch_size": 2,
        "spatial_merge_size": sizes.merge,
        "out_hidden_size": sizes.hidden,
        "num_position_embeddings": sizes.vision_positions,
        "deepstack_visual_indexes": list(sizes.deepstack),
    }


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight as transformers' modules hold them; found out without allocating any."""
    model_class: Any = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return shapes


def random_weight(name: str, shape: tuple[int, ...], sizes: Sizes, seed: int, dtype: torch.dtype) -> Tensor:
    """A weight that depends on ``seed`` and ``name`` alone.

    Matrices keep their input's scale times ``gain``, and embeddings are small beside what the layers add: so that
    what a random model says depends on its whole context and greedy outputs vary.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest)))
    if name.endswith(("pos_embed.weight", "embed_tokens.weight", "position_embedding_table")):
        noise *= 0.5
    elif name.endswith(("put_min", "put_max")):  # bounds that clip some values
        noise = (1.5 + 0.1 * noise) * (1 if name.endswith("max") else -1)
    elif name.endswith(".bias"):
        noise *= 0.1
    elif name.endswith((".A_log", ".dt_bias")):
        noise -= 2  # states decay slowly, so that what a delta net says depends on many tokens
    elif len(shape) == 1:
        noise = 1 + 0.1 * noise
    else:
        fan_in = shape[-1] if ".experts." in name else math.prod(shape[1:])
        noise *= sizes.gain / math.sqrt(fan_in)
    return noise.to(dtype)


def published(config: dict[str, Any], name: str, weight: Tensor) -> Tensor:
    """A weight in the published files' layout: Qwen3-VL's stacked experts are transposed."""
    is_transposed = config["model_type"] == "qwen3_vl_moe" and ".experts." in name
    return weight.transpose(1, 2).contiguous() if is_transposed else weight


def write_weights(
    folder: Path,
    config: dict[str, Any],
    seed: int,
    dtype: torch.dtype,
    *,
    num_shards: int = 1,
    sizes: Sizes | None = None,
) -> int:
    """Writes the safetensors files of a model with this ``config.json``, holding one shard at a time. Returns how many
    parameters there are. ``sizes`` are those that the config was made from, if any."""
    shapes = weight_shapes(config)
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" if num_shards > 1 else "model.safetensors"
        mine = names[shard::num_shards]
        random = {name: random_weight(name, shapes[name], sizes or Sizes(), seed, dtype) for name in mine}
        weights = {name: published(config, name, weight) for name, weight in random.items()}
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    if num_shards > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    return sum(math.prod(shape) for shape in shapes.values())


def made_up_words(ids: Iterable[int]) -> dict[str, int]:
    """A distinct word, with the space before it, for each id. Encoding never yields them: that would take merges."""
    return {"Ġ" + "".join(chr(ord("a") + int(digit)) for digit in str(index)): index for index in ids}


def write_tokenizer(folder: Path, vocabulary: int, ids: Mapping[str, int] | None = None) -> None:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``. ``ids`` are the special tokens',
    if they are other ones."""
    ids = dict(ids or token_ids(vocabulary))
    bytes_vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = made_up_words(range(256, min(ids.values())))
    tokenizer = Tokenizer(models.BPE(vocab=bytes_vocabulary | words | ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ids])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_settings(folder: Path, sizes: Sizes) -> None:
    """``config.json``, ``generation_config.json`` and the two preprocessors' configurations."""
    ids = token_ids(sizes.vocabulary)
    generation = {
        "do_sample": False,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": sizes.min_pixels, "longest_edge": sizes.max_pixels},
        "patch_size": sizes.patch,
        "temporal_patch_size": 2,
        "merge_size": sizes.merge,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    write_json(folder / "config.json", model_config(sizes))
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "preprocessor_config.json", preprocessor)
    video = {"shortest_edge": sizes.min_video_pixels, "longest_edge": sizes.max_video_pixels}
    processor = {"video_processor_type": "Qwen3VLVideoProcessor", "size": video}
    write_json(folder / "video_preprocessor_config.json", preprocessor | processor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file as the Hub has them, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n")
