"""Limits of the language engine on this machine: memory bandwidth, and the speed of matrix products of the model's
shapes."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench.measuring import median_seconds
from bench.serve import Load
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import read_folder
from triptych.layers import native
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.pruned_head import is_faster
from triptych.models.registry import family_of, resolve

READ_BYTES = 2**30


def read_bandwidth(threads: int) -> float:
    """Return the read bandwidth of a sum over memory, in GB/s."""
    torch.set_num_threads(threads)
    memory = torch.ones(READ_BYTES // 4)
    return READ_BYTES / median_seconds(memory.sum, 7) / 1e9


def linear_ms(folder: Path, load: Load, prompt_tokens: int, threads: int) -> float:
    """What F.linear in float32 takes for all products of encoding and prefilling one such request. Attention isn't
    counted."""
    torch.set_num_threads(threads)
    products = request_products(folder, load, prompt_tokens)
    return 1e3 * sum(count * _linear(*shape) for shape, count in products.items())


def request_products(folder: Path, load: Load, prompt_tokens: int) -> Counter[tuple[int, int, int]]:
    """How often there is a product of (rows, outputs, inputs) in encoding a request's pictures and prefilling it. What
    a decoder reads together (queries, keys and values; gate and up) is one product, as in ``models/layers.py``."""
    config: dict[str, Any] = load_config(folder)
    vision = config["vision_config"]
    patches = load.images * (load.height // vision["patch_size"]) * (load.width // vision["patch_size"])
    products: Counter[tuple[int, int, int]] = Counter()
    for name, info in read_folder(folder).items():
        if ".visual." in name and name.endswith(".weight") and len(info.shape) > 1 and "pos_embed" not in name:
            out, inner = info.shape[0], torch.Size(info.shape[1:]).numel()
            rows = patches // vision["spatial_merge_size"] ** 2 if "merger" in name else patches
            products[rows, out, inner] += 1
    decoder = decoder_config(folder)
    for out, inner in decoder_shapes(folder).values():
        products[prompt_tokens, out, inner] += decoder.num_layers
    products[1, decoder.vocab_size, decoder.hidden_size] += 1
    return products


def weight_bytes_read(folder: Path) -> int:
    """Of the weights that a greedy token's step reads in fp16, of the head's in int8 where there is a pruned_head."""
    decoder, library = decoder_config(folder), native.library()
    layer = sum(rows * columns for rows, columns in decoder_shapes(folder).values())
    head = 1 if library is not None and is_faster(library) else 2
    return 2 * layer * decoder.num_layers + head * decoder.vocab_size * decoder.hidden_size


def _linear(rows: int, out: int, inner: int) -> float:
    weight, tokens = torch.randn(out, inner), torch.randn(rows, inner)
    return median_seconds(lambda: F.linear(tokens, weight), 3)


def decoder_config(folder: Path) -> DecoderConfig:
    config = load_config(folder)
    decoder: DecoderConfig = resolve(family_of(config).adapter)(config).decoder_config
    return decoder


def decoder_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's linear layers, by name."""
    decoder = decoder_config(folder)
    heads = decoder.num_heads + 2 * decoder.num_kv_heads
    return {
        "qkv": (heads * decoder.head_dim, decoder.hidden_size),
        "o": (decoder.hidden_size, decoder.num_heads * decoder.head_dim),
        "gate_up": (2 * decoder.intermediate_size, decoder.hidden_size),
        "down": (decoder.hidden_size, decoder.intermediate_size),
    }
