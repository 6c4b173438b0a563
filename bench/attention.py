"""Time of a layer's attention with the compiled kernel and with PyTorch, over KV caches in float32, float16 and int8.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.attention /tmp/mid --out bench/results/attention-mid.json

Shapes come from the checkpoint; its weights aren't read. There are enough layers, each with a cache, to exceed
the processor's caches. They run one after the other, and the methods alternate. A sequence's pages are consecutive, so
PyTorch reads them in place in float32. Work done once per step, such as masks, isn't counted. A layer of the vision
tower over one image is measured too. ``--processor-time`` is for machines that are never quiet.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench.language_limits import attention_of, decoder_config
from bench.measuring import like_an_instance, medians_in_turns, report
from triptych.checkpoint.config_files import load_config
from triptych.layers.attention.base import AttentionBatch, KVTensors, pages_needed
from triptych.layers.attention.compiled import PagedAttention, paged_attention
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.attention.kv_format import cache_format, to_stored
from triptych.layers.cache_spec import bytes_per_token
from triptych.layers.decoder_config import DecoderConfig
from triptych.measure.machine import machine

CPU = torch.device("cpu")
PAGE_SIZE = 16
READ_BYTES = 2**28
SIDE = 448
"""Pixels along each side of the image."""


@dataclass(frozen=True)
class Way:
    """A backend, and the dtype of the KV cache."""

    attend: CpuAttention
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """``sequences`` sequences with ``new`` new tokens each, the last of ``kv_len``."""

    sequences: int
    new: int
    kv_len: int

    def __str__(self) -> str:
        what = f"{self.sequences} decoding" if self.new == 1 else f"chunk of {self.new}"
        return f"{what}, {self.kv_len} tokens"


STEPS = [
    *(Step(sequences, 1, kv_len) for kv_len in (345, 2_000) for sequences in (1, 8, 16, 64)),
    *(Step(1, 1, kv_len) for kv_len in (1_024, 8_192, 32_768)),
    Step(1, 345, 345),
    *(Step(1, new, 2_000) for new in (8, 16, 512)),
]


def seconds_per_layer(
    step: Step, decoder: DecoderConfig, ways: dict[str, Way], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the median over ``rounds`` by method."""
    mixer, pages = attention_of(decoder), pages_needed(step.kv_len, PAGE_SIZE)
    tables = torch.arange(step.sequences * pages).split(pages)
    new = torch.arange(step.kv_len - step.new, step.kv_len)
    slots = torch.cat([table[0] * PAGE_SIZE + new for table in tables])
    batch = AttentionBatch([step.new] * step.sequences, [step.kv_len] * step.sequences, list(tables), slots)
    dtypes = {way.dtype for way in ways.values()}
    num_layers = max(1, READ_BYTES // min(bytes_read(step, decoder, dtype) for dtype in dtypes))
    several = replace(decoder, layers=decoder.layers[:1] * num_layers)
    specs = {dtype: several.cache_specs(cache_format(dtype)) for dtype in dtypes}
    caches = {dtype: KVTensors.allocate(specs[dtype], [step.sequences * pages], PAGE_SIZE, CPU) for dtype in dtypes}
    for cache in caches.values():
        for layer in cache.tensors:
            random = torch.randn(*layer.shape[:-1], mixer.head_dim)
            layer.copy_(to_stored(random, layer.dtype))
    widths = mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads
    query, key, value = torch.randn(len(slots), sum(widths), mixer.head_dim).split(widths, dim=1)

    def all_layers(way: Way) -> None:
        cache = caches[way.dtype]
        for keys, values in cache.layers:
            way.attend(query, key, value, keys, values, batch)

    seconds = medians_in_turns({name: partial(all_layers, way) for name, way in ways.items()}, rounds, clock)
    return {name: one / num_layers for name, one in seconds.items()}


def tower_layer(config: dict[str, Any], kernel: PagedAttention, rounds: int) -> dict[str, dict[str, float]]:
    """Measure one image's attention in one layer: milliseconds and GFLOP/s."""
    tokens, heads = (SIDE // config["patch_size"]) ** 2, config["num_heads"]
    dim = config["hidden_size"] // heads
    packed = torch.randn(3, tokens, heads, dim)
    query, key, value = packed.unbind()
    by_heads = [tensor.transpose(0, 1)[None] for tensor in packed]
    ways = {
        "compiled": lambda: kernel.over_segments(query, key, value, [tokens]),
        "PyTorch": lambda: F.scaled_dot_product_attention(*by_heads),
    }
    seconds = medians_in_turns(ways, 5 * rounds)
    flop = 4 * tokens**2 * heads * dim
    return {
        "ms": {name: round(1e3 * one, 3) for name, one in seconds.items()},
        "gflop_per_s": {name: round(flop / one / 1e9) for name, one in seconds.items()},
    }


def bytes_read(step: Step, decoder: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a layer's keys and values, each read once."""
    one_layer = replace(decoder, layers=decoder.layers[:1])
    return step.sequences * step.kv_len * bytes_per_token(one_layer.cache_specs(cache_format(dtype)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="of which a figure is the median")
    parser.add_argument("--contexts", type=int, nargs="+", help="only one decoding sequence, with these lengths")
    parser.add_argument("--compiled-alone", action="store_true", help="don't measure PyTorch's attention")
    parser.add_argument("--processor-time", action="store_true", help="measure one thread's processor time")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    threads = 1 if options.processor_time else options.threads
    clock = time.thread_time if options.processor_time else time.perf_counter
    steps = [Step(1, 1, kv_len) for kv_len in options.contexts] if options.contexts else STEPS
    kernel = paged_attention()
    if kernel is None:
        raise SystemExit("there are no compiled kernels on this machine")
    like_an_instance(threads)
    decoder = decoder_config(options.model)
    ways = {
        f"{name}, {dtype}": Way(CpuAttention(by), getattr(torch, dtype))
        for name, by in (("compiled", kernel), *(() if options.compiled_alone else (("PyTorch", None),)))
        for dtype in ("float32", "float16", "int8")
    }
    with torch.inference_mode():
        tower = tower_layer(load_config(options.model)["vision_config"], kernel, options.rounds)
        seconds = {step: seconds_per_layer(step, decoder, ways, options.rounds, clock) for step in steps}
    found = {
        "machine": machine(),
        "options": {
            "model": str(options.model),
            "threads": threads,
            "rounds": options.rounds,
            "processor_time": options.processor_time,
        },
        "shape": {name: getattr(decoder.layers[0].mixer, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        "ms_per_layer": {
            str(step): {name: round(1e3 * one, 3) for name, one in taken.items()} for step, taken in seconds.items()
        },
        "gb_per_s": {
            str(step): {
                name: round(bytes_read(step, decoder, ways[name].dtype) / one / 1e9, 1) for name, one in taken.items()
            }
            for step, taken in seconds.items()
            if step.new == 1
        },
        "tower": tower,
    }
    report(found, options.out)


if __name__ == "__main__":
    main()
