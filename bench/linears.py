"""Weight formats in isolation: how fast a decoder's linear layers read their weights for a few tokens, how long the
vision tower takes per image, and how long greedy sampling takes.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.linears /tmp/mid --out bench/results/linears-mid.json

There are enough layers of each shape to exceed the processor's caches. They run one after the other. Each
format is compared with F.linear in float32.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.language_limits import decoder_shapes
from bench.measuring import like_an_instance, median_seconds, report
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS, PlainFormat, WeightFormat
from triptych.layers.pointwise import argmax_rows
from triptych.measure.machine import machine
from triptych.models.base import EncoderInput
from triptych.models.registry import family_of, resolve

CPU = torch.device("cpu")
FORMATS = {
    "fp16": WEIGHT_FORMATS["float16"],
    "bf16": WEIGHT_FORMATS["bfloat16"],
    "float32": WEIGHT_FORMATS["float32"],
    "int8": QUANTIZED_FORMATS["int8"],
}
TOKENS = (1, 8)
READ_BYTES = 2**28
SIDE = 448
"""Pixels along each side of the image."""


def read_rates(shape: tuple[int, int], tokens: int) -> dict[str, float]:
    """By format, the bytes of float32 weights [out, in] that are used up per second, in GB: what is read is fewer bytes
    in a smaller format, but the same layer."""
    weights = [torch.randn(shape) for _ in range(max(1, READ_BYTES // (4 * shape[0] * shape[1])))]
    activations = torch.randn(tokens, shape[1])
    found = {"F.linear": _seconds([partial(F.linear, weight=weight) for weight in weights], activations)}
    for name, weight_format in FORMATS.items():
        found[name] = _seconds([weight_format.linear(weight, None, CPU) for weight in weights], activations)
    num_bytes = sum(4 * weight.numel() for weight in weights)
    return {name: round(num_bytes / seconds / 1e9, 1) for name, seconds in found.items()}


def _seconds(layers: list[Any], activations: Tensor) -> float:
    return median_seconds(lambda: [layer(activations) for layer in layers], 7)


def encode_ms(folder: Path) -> dict[str, float]:
    """By format, for one image."""
    config, checkpoint = load_config(folder), Checkpoint(folder)
    adapter = resolve(family_of(config).adapter)(config)
    vision = config["vision_config"]
    grid = (1, SIDE // vision["patch_size"], SIDE // vision["patch_size"])
    values = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = np.random.default_rng(0).standard_normal((grid[1] * grid[2], values), dtype=np.float32)
    image = EncoderInput(patches=patches, grid=grid, name="image")
    formats: dict[str, WeightFormat] = {"F.linear": PlainFormat(torch.float32)}
    formats |= {name: FORMATS[name] for name in ("fp16", "bf16", "float32")}
    towers = {name: adapter.load_encoder(checkpoint, weight_format, CPU) for name, weight_format in formats.items()}
    return {name: round(1e3 * median_seconds(partial(tower.encode, [image]), 7), 1) for name, tower in towers.items()}


def likeliest_ms(rows: int, vocabulary: int) -> dict[str, float]:
    logits = torch.randn(rows, vocabulary)
    searches = {"ours": partial(argmax_rows, logits), "torch": partial(logits.argmax, dim=-1)}
    return {name: round(1e3 * median_seconds(search, 30), 3) for name, search in searches.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    like_an_instance(options.threads)
    with torch.inference_mode():
        shapes = decoder_shapes(options.model)
        found = {
            "machine": machine(),
            "options": {"model": str(options.model), "threads": options.threads},
            "gb_per_s": {
                f"{name} {list(shape)}, {tokens} tokens": read_rates(shape, tokens)
                for name, shape in shapes.items()
                for tokens in TOKENS
            },
            "encode_ms": encode_ms(options.model),
            "likeliest_of_8_rows_ms": likeliest_ms(8, load_config(options.model)["text_config"]["vocab_size"]),
        }
    report(found, options.out)


if __name__ == "__main__":
    main()
