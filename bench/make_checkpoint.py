"""Writes a Qwen3-VL checkpoint folder with random weights, for benchmarks and tests without downloads::

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.make_checkpoint /tmp/wide --preset mid --hidden 2048 --layers 24 --dtype float32
    python -m bench.make_checkpoint /tmp/mid --tokenizer package/models    # a published tokenizer's files

Files and names follow the published Hub folders. The tokenizer is byte-level without merges. The rest of a large
vocabulary is filled with invented words, so that every token decodes to text. ``--tokenizer`` takes a published one
instead, with the ids of ``SPECIAL_TOKENS``: converters of other engines accept no invented tokenizer.
"""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.support.random_checkpoint import (
    SPECIAL_TOKENS,
    Sizes,
    model_config,
    write_json,
    write_settings,
    write_tokenizer,
    write_weights,
)

PRESETS = {
    "mid": Sizes(),
    "small": Sizes(
        hidden=512,
        layers=8,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate=1536,
        vocabulary=32000,
        mrope_section=(12, 10, 10),
        vision_depth=8,
        vision_hidden=384,
        vision_heads=6,
        vision_intermediate=1536,
        deepstack=(2, 4, 6),
    ),
    "qwen2-vl-2b": Sizes(
        hidden=1536,
        layers=28,
        heads=12,
        kv_heads=2,
        intermediate=8960,
        vision_depth=32,
        vision_hidden=1280,
        vision_heads=16,
        vision_intermediate=5120,
        deepstack=(8, 16, 24),
    ),
}
"""``mid`` answers in seconds on a laptop, ``small`` in fractions of one: for loads of many requests.

``qwen2-vl-2b`` has the sizes of Qwen2-VL-2B's decoder and tower, from its config.json on the Hub, in Qwen3-VL's
architecture.
"""


def parse_arguments() -> argparse.Namespace:
    """Flags: the folder, a preset, one flag per size that overrides the preset's, and how to write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="mid")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a published Qwen tokenizer; default: made up")
    for field in fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, tuple):
            parser.add_argument(flag, type=int, nargs="*")
        elif isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=type(field.default))
    return parser.parse_args()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Replaces the tokenizer, but not the chat template. Exits if the special tokens have other ids."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if wrong := [token for token, number in SPECIAL_TOKENS.items() if tokenizer.token_to_id(token) != number]:
        raise SystemExit(f"{source}: other ids than Qwen's for {', '.join(wrong)}")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    write_json(folder / "tokenizer_config.json", settings)


def main() -> None:
    """Writes the folder that the command line asks for."""
    arguments = parse_arguments()
    given = {field.name: getattr(arguments, field.name) for field in fields(Sizes)}
    overrides: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
    sizes = replace(PRESETS[arguments.preset], **overrides)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder, sizes)
    write_tokenizer(folder, sizes.vocabulary)
    if arguments.tokenizer:
        copy_tokenizer(arguments.tokenizer, folder)
    dtype = getattr(torch, arguments.dtype)
    config = model_config(sizes)
    count = write_weights(folder, config, arguments.seed, dtype, num_shards=arguments.shards, sizes=sizes)
    print(f"{folder}: {count / 1e6:.1f} M parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
