"""Time of matrix products with packed weights: Triptych's kernels compared with FBGEMM and oneDNN.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.products /tmp/mid --out bench/results/products-mid.json
    python -m bench.products /tmp/mid --formats bf16 --kernels ours "ours, fp16" --tokens 1 16 512

The products of a decoder layer run one after the other, over enough layers to exceed the processor's caches.
With bf16, oneDNN is measured with rounding around it, as used without a compiler, and by itself.
With int8, FBGEMM uses 7 bits and one scale for all tokens. oneDNN uses 7 bits and is measured with PyTorch's
operations around it, as used without a compiler, and by itself. PyTorch's own int4 has activations in bfloat16.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.language_limits import decoder_shapes, read_bandwidth
from bench.measuring import like_an_instance, medians_in_turns, report
from triptych.layers import float_product, int4, int8, native
from triptych.layers.block_product import blocks_product
from triptych.layers.block_weight import BlockType, BlockWeight
from triptych.layers.float_product import FbgemmProduct, OneDnnBf16Product
from triptych.layers.products import Product
from triptych.measure.machine import machine

READ_BYTES = 2**28
TOKENS = (1, 2, 4, 8, 16, 32, 64, 345, 1024, 2048)
ROUNDS = 9
INT4_GROUP = 32
"""Inputs that share a scale, as in ours."""

Pack = Callable[[Tensor], Product]
"""Of a weight [outputs, inputs]."""


def fbgemm_int8(weight: Tensor) -> Product:
    scales, zeros = weight.abs().amax(dim=1) / 127, torch.zeros(len(weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # deprecated
        quantized = torch.quantize_per_channel(weight, scales, zeros.long(), 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, zeros)
    return lambda activations: torch.ops.quantized.linear_dynamic(activations, packed, reduce_range=True)


def onednn_int8(weight: Tensor) -> int8.OneDnnInt8Product:
    return int8.OneDnnInt8Product(int8.Int8Weight(*int8.quantize_rows(weight)), None)


def onednn_int8_alone(weight: Tensor) -> Product:
    rounded, scales = int8.quantize_rows(weight)
    packed, multiply = torch.ops.onednn.qlinear_prepack(rounded, None), torch.ops.onednn.qlinear_pointwise
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    operands = (1.0, 64, packed, scales, zeros, None)
    as_float: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    activations = torch.randint(0, 128, (max(TOKENS), weight.shape[1]), dtype=torch.uint8)
    return lambda given: multiply(activations[: len(given)], *operands, *as_float)


def onednn_bf16_alone(weight: Tensor) -> Product:
    """In oneDNN's own layout, with activations that are bfloat16 already, and so are outputs."""
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16()), torch.ops.mkldnn._linear_pointwise
    activations = torch.randn(max(TOKENS), weight.shape[1]).bfloat16()
    return lambda given: multiply(activations[: len(given)], packed, None, "none", [], "")


def pytorch_int4(weight: Tensor) -> Product:
    """PyTorch's own product with int4 weights in groups, in its own layout."""
    grouped = weight.unflatten(1, (-1, INT4_GROUP))
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    scale = (high - low) / 15
    values = ((grouped - low) / scale).round().clamp(0, 15).flatten(1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    # it computes (value - 8) scale + zero
    scales_and_zeros = torch.cat([scale, low + 8 * scale], dim=2).transpose(0, 1).contiguous().bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda given: multiply(given.bfloat16(), packed, INT4_GROUP, scales_and_zeros)


def blocks(weight: Tensor, kind: BlockType) -> Product:
    """In a GGUF file's blocks of random bits: time doesn't depend on them, and no library makes all types."""
    outputs, inputs = weight.shape
    raw = torch.randint(0, 60, (outputs, inputs // kind.inputs * kind.num_bytes), dtype=torch.uint8)  # finite halves
    product = blocks_product([BlockWeight(raw, kind, inputs)], None)
    assert product is not None
    return product


KERNELS: dict[str, dict[str, Pack]] = {
    "fp16": {
        "ours": partial(float_product.half_product, bias=None),
        "fbgemm": partial(FbgemmProduct, bias=None),
    },
    "float32": {
        "ours": partial(float_product.float_product, bias=None),
        "onednn": partial(float_product.OneDnnFloatProduct, bias=None),
        "F.linear": lambda weight: partial(F.linear, weight=weight),
    },
    "bf16": {
        "ours": partial(float_product.bf16_product, bias=None),
        "onednn": partial(OneDnnBf16Product, bias=None),
        "onednn alone": onednn_bf16_alone,
        "ours, fp16": partial(float_product.half_product, bias=None),
    },
    "int8": {
        "ours": partial(int8.int8_product, bias=None),
        "fbgemm": fbgemm_int8,
        "onednn": onednn_int8,
        "onednn alone": onednn_int8_alone,
    },
    "int4": {
        "ours": partial(int4.int4_product, bias=None),
        "ours, int8": partial(int8.int8_product, bias=None),
        "pytorch": pytorch_int4,
    },
}
BYTES = {"fp16": 2, "float32": 4, "bf16": 2, "int8": 1, "int4": 0.5}
for kind in (BlockType.Q8_0, BlockType.Q4_K, BlockType.Q6_K):
    own: dict[str, Pack] = {"ours": partial(blocks, kind=kind)}
    KERNELS[kind.name] = own | {f"ours, {name}": KERNELS[name]["ours"] for name in ("bf16", "int8", "int4")}
    BYTES[kind.name] = kind.num_bytes / kind.inputs


def layer_ms(
    kernels: dict[str, Pack], shapes: list[tuple[int, int]], width: float, numbers: Sequence[int]
) -> dict[str, dict[str, float]]:
    """By kernel and each of these ``numbers`` of tokens, for a layer of such linear layers [outputs, inputs], ``width``
    bytes a weight."""
    num_layers = int(READ_BYTES / (width * sum(outputs * inputs for outputs, inputs in shapes)))
    weights = [torch.randn(shape) for shape in shapes * num_layers]
    layers = {name: [(weight.shape[1], pack(weight)) for weight in weights] for name, pack in kernels.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in kernels}
    for tokens in numbers:
        activations = {inputs: torch.randn(tokens, inputs) for _, inputs in shapes}
        ways = {name: partial(multiply_all, layers[name], activations) for name in kernels}
        for name, seconds in medians_in_turns(ways, ROUNDS).items():
            found[name][str(tokens)] = round(1e3 * seconds / num_layers, 2)
    return found


def multiply_all(layers: list[tuple[int, Product]], activations: dict[int, Tensor]) -> None:
    for inputs, product in layers:
        product(activations[inputs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", choices=KERNELS, default=list(KERNELS))
    names = sorted({name for kernels in KERNELS.values() for name in kernels})
    parser.add_argument("--kernels", nargs="+", choices=names, default=names, help="those of the formats to measure")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help=f"numbers of tokens, up to {max(TOKENS)}")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    if native.library() is None:
        parser.error("there are no kernels of ours to measure without a C compiler")
    if max(options.tokens) > max(TOKENS):
        parser.error(f"more than {max(TOKENS)} tokens")
    kernels = {
        name: {kernel: pack for kernel, pack in KERNELS[name].items() if kernel in options.kernels}
        for name in options.formats
    }
    like_an_instance(options.threads)
    shapes = list(decoder_shapes(options.model).values())
    with torch.inference_mode():
        found = {
            "machine": machine(),
            "options": {"model": str(options.model), "threads": options.threads},
            "shapes": shapes,
            "read_gb_per_s": round(read_bandwidth(options.threads), 1),
            "layer_ms": {
                name: layer_ms(chosen, shapes, BYTES[name], options.tokens) for name, chosen in kernels.items()
            },
        }
    report(found, options.out)


if __name__ == "__main__":
    main()
