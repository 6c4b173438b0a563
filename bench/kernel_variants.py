"""Time of matrix products by each variant of the kernels that this processor supports, and by kernels compiled with
``-march=native``.

    python -m bench.kernel_variants --out bench/results/kernel-variants.json

Variants take turns, and each time is the shortest of its rounds: a product is short enough that some rounds are not
disturbed by other processes.
"""

import argparse
import platform
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from bench.measuring import like_an_instance, report, seconds_in_turns
from bench.products import KERNELS
from triptych.layers import native
from triptych.layers.kernel_variants import Variant, compiled, find_compiler
from triptych.measure.machine import machine
from triptych.user_cache import user_cache

TOKENS = (1, 8, 64)
SHAPE = (2048, 1024)
"""[out, in] of the linear layer: its weights fit into the processor's caches in any format."""


def product_us(libraries: dict[str, Path], name: str, rounds: int) -> dict[str, list[float]]:
    """By variant, microseconds for each of TOKENS, in the format ``name``."""
    torch.manual_seed(0)
    weight, products = torch.randn(SHAPE), {}
    for variant, path in libraries.items():
        with patch.object(native, "library", return_value=native.load(path)):
            products[variant] = KERNELS[name]["ours"](weight)
    found: dict[str, list[float]] = {variant: [] for variant in libraries}
    for tokens in TOKENS:
        activations = torch.randn(tokens, SHAPE[1])
        ways = {variant: partial(product, activations) for variant, product in products.items()}
        for variant, seconds in seconds_in_turns(ways, rounds).items():
            found[variant].append(round(1e6 * min(seconds), 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--variants", nargs="+", help="all, if none is named")
    parser.add_argument("--formats", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    like_an_instance(threads=1)
    kind = platform.machine()
    measured = native.usable_variants()
    measured.insert(0, Variant("native", {"": "-march=native"}, kind))
    if options.variants:
        measured = [variant for variant in measured if variant.name in options.variants]
    with torch.inference_mode():
        libraries = {variant.name: compiled(find_compiler(), variant, user_cache()) for variant in measured}
        found = {
            "machine": machine(),
            "options": {"rounds": options.rounds, "threads": 1},
            "shape": SHAPE,
            "tokens": TOKENS,
            "product_us": {name: product_us(libraries, name, options.rounds) for name in options.formats},
        }
    report(found, options.out)


if __name__ == "__main__":
    main()
