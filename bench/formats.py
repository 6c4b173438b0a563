"""A model in several weight formats: how long encoding, prefill and decoding take, as ratios
to the first format, and how far its answers are from those in float32.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.formats /tmp/mid --out bench/results/formats-mid.json

Formats alternate, so that other work on the machine slows all of them. ``--processor-time`` counts the processor time
of one thread instead, for machines that are never quiet. Encoder and decoder are called directly; the KV cache is fp16,
or where a line says so, int8.
The divergence is that of the next token's distribution from the one in float32 with a KV cache in float32, for a prompt
with a picture, each format with its own tower's embeddings.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.language_limits import attention_of
from bench.measuring import like_an_instance, report
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.attention.kv_format import cache_format, to_stored
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.encoder import Encoder
from triptych.layers.parallel import SINGLE_RANK
from triptych.measure.machine import machine
from triptych.models.base import EncoderInput
from triptych.server.model_bundle import ModelBundle

CPU = torch.device("cpu")
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8, int8 towers": {"quantization": "int8", "encoder_quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""The settings of each format; float32 is the reference."""
SIDE = 448
"""Pixels along each side of the picture."""
PREFILL = 1024
CHUNK = 512
"""Tokens per step of a prompt, as in the default of ``--max-num-batched-tokens``."""
CONTEXT = 345
BATCHES = (1, 8)
PAGE_SIZE = 16
SCORED = 256
"""Text tokens of the prompt that is scored."""


@dataclass
class Model:
    """Encoder and decoder in one format, and a KV cache for ``max(BATCHES)`` sequences."""

    encoder: Encoder
    decoder: Decoder
    picture: EncoderInput

    def __post_init__(self) -> None:
        self.cache = self.new_cache(torch.float16)

    def new_cache(self, dtype: torch.dtype) -> KVTensors:
        pages = max(-(-PREFILL // PAGE_SIZE), max(BATCHES) * -(-CONTEXT // PAGE_SIZE))
        cache = KVTensors.allocate(self.decoder.config.cache_specs(cache_format(dtype)), [pages], PAGE_SIZE, CPU)
        for tensor in cache.tensors:
            tensor.copy_(to_stored(torch.randn(*tensor.shape[:-1], attention_of(self.decoder.config).head_dim), dtype))
        return cache

    def encode(self) -> Tensor:
        return self.encoder.encode([self.picture])[0]

    def step(self, lens: list[tuple[int, int]]) -> Tensor:
        """Run sequences, given as (new tokens, length with them), and return the logits of their last tokens."""
        pages = -(-max(length for _, length in lens) // PAGE_SIZE)
        tables = [torch.arange(pages) + row * pages for row in range(len(lens))]
        slots = torch.cat(
            [
                table[0] * PAGE_SIZE + torch.arange(length - new, length)
                for table, (new, length) in zip(tables, lens, strict=True)
            ]
        )
        positions = torch.cat([torch.arange(length - new, length) for new, length in lens])
        ends = torch.tensor([new for new, _ in lens]).cumsum(0) - 1
        return self.forward(
            torch.randint(self.decoder.config.vocab_size, (len(slots),)),
            positions,
            AttentionBatch([new for new, _ in lens], [length for _, length in lens], tables, slots),
            logits_index=ends,
            num_largest=[1] * len(ends),
        )

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, **wanted: Any) -> Tensor:
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions.double().expand(3, -1),
            media_index=torch.empty(0, dtype=torch.int64),
            media_embeddings=torch.empty(0, self.width),
            attention=[attention],
            **wanted,
        )
        return self.decoder(batch, self.cache)

    @property
    def width(self) -> int:
        return self.decoder.config.hidden_size * (1 + self.decoder.config.num_deepstack_layers)

    def prefill(self) -> None:
        for first in range(0, PREFILL, CHUNK):
            self.step([(CHUNK, first + CHUNK)])

    def decode(self, batch: int) -> None:
        self.step([(1, CONTEXT)] * batch)

    def log_probabilities(self, cache_dtype: torch.dtype) -> Tensor:
        """Return float32 [T, vocabulary] for a picture and then random text."""
        rows = self.encode()
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(self.decoder.config.vocab_size, (SCORED,), generator=generator)
        tokens = torch.cat((text.new_zeros(len(rows)), text))
        count = len(tokens)
        batch = ForwardBatch(
            tokens=tokens,
            positions=torch.arange(count, dtype=torch.float64).expand(3, -1),
            media_index=torch.arange(len(rows)),
            media_embeddings=rows,
            logits_index=torch.arange(len(rows), count),
            attention=[
                AttentionBatch(
                    [count], [count], [torch.arange(-(-count // PAGE_SIZE))], torch.arange(count), generated=[False]
                )
            ],
        )
        return self.decoder(batch, self.new_cache(cache_dtype)).log_softmax(dim=1)


WORKS: dict[str, Callable[[Model], object]] = {
    "encode": Model.encode,
    f"prefill {PREFILL}": Model.prefill,
    **{f"decode {batch}": partial(Model.decode, batch=batch) for batch in BATCHES},
}


def bundle(folder: Path, name: str) -> ModelBundle:
    """Return a checkpoint with the settings of a format, on the CPU."""
    settings: dict[str, Any] = {"device": "cpu", "page_size": PAGE_SIZE} | FORMATS[name]
    return ModelBundle(Checkpoint(folder), EngineConfig(**settings))


def load(folder: Path, name: str) -> Model:
    model = bundle(folder, name)
    vision = model.config["vision_config"]
    grid = (1, SIDE // vision["patch_size"], SIDE // vision["patch_size"])
    values = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = np.random.default_rng(0).standard_normal((grid[1] * grid[2], values), dtype=np.float32)
    return Model(
        model.load_encoder(),
        model.load_decoder(SINGLE_RANK),
        EncoderInput(patches=patches, grid=grid, name="picture"),
    )


def times(models: dict[str, Model], rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, Any]]:
    """By work and format, milliseconds (the least and the median) and the median of ratios to the first format."""
    found: dict[str, dict[str, Any]] = {}
    for name, work in WORKS.items():
        taken: dict[str, list[float]] = {format_name: [] for format_name in models}
        for _ in range(1 + rounds * (4 if "decode" in name else 1)):
            for format_name, model in models.items():
                began = clock()
                work(model)
                taken[format_name].append(1e3 * (clock() - began))
        base = next(iter(taken.values()))[1:]
        found[name] = {
            format_name: {
                "least_ms": round(min(ms[1:]), 2),
                "median_ms": round(statistics.median(ms[1:]), 2),
                "ratio": round(statistics.median(own / other for own, other in zip(ms[1:], base, strict=True)), 3),
                "ratio_of_least": round(min(ms[1:]) / min(base), 3),
            }
            for format_name, ms in taken.items()
        }
    return found


def accuracy(models: dict[str, Model], reference: Tensor) -> dict[str, dict[str, float]]:
    """Return the divergence from the reference's distributions in nats, mean and 99th percentile, and the share of
    tokens whose likeliest next token is the same: of each format, and of each with a KV cache in int8."""
    ways = {}
    for name, model in models.items():
        ways[name] = model, torch.float32 if name == "float32" else torch.float16
        ways[f"{name}, KV cache in int8"] = model, torch.int8
    found = {}
    for name, (model, dtype) in ways.items():
        ours = model.log_probabilities(dtype)
        divergence = F.kl_div(ours, reference, reduction="none", log_target=True).sum(dim=1)
        found[name] = {
            "kl_mean": float(f"{divergence.mean():.3g}"),
            "kl_p99": float(f"{divergence.quantile(0.99):.3g}"),
            "top_1": round((ours.argmax(1) == reference.argmax(1)).double().mean().item(), 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder of a family with pictures")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--processor-time", action="store_true", help="measure one thread's processor time")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=[name for name in FORMATS if name != "float32"]
    )
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    threads = 1 if options.processor_time else options.threads
    like_an_instance(threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        reference = load(options.model, "float32").log_probabilities(torch.float32)
        models = {name: load(options.model, name) for name in options.formats}
        clock = time.thread_time if options.processor_time else time.perf_counter
        found = {
            "machine": machine(),
            "options": {"model": str(options.model), "threads": threads, "processor_time": options.processor_time},
            "accuracy": accuracy(models, reference),
            "times": times(models, 1 if options.quick else options.rounds, clock),
        }
    report(found, options.out)


if __name__ == "__main__":
    main()
