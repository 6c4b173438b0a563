"""How long products with int8 weights take by our kernel, beside FBGEMM's and oneDNN's.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.int8 /tmp/mid --out bench/results/int8-mid.json

A decoder layer's products, one after the other, of as many layers as take more memory than caches have. FBGEMM's are
with one scale for all tokens, in 7 bits; oneDNN's in 7 bits, with PyTorch's operations around them, as where there is
no compiler, and by themselves.
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.language_limits import decoder_shapes
from bench.measuring import median_seconds, medians_in_turns, report
from triptych.bench.transfer import machine
from triptych.models import native
from triptych.models.int8 import CompiledProduct, OneDnnProduct, Product

READ_BYTES = 2**28
TOKENS = (1, 2, 4, 8, 16, 32, 64, 345, 1024, 2048)
ROUNDS = 9

Kernel = Callable[[Tensor, Tensor, Tensor], Product]
"""Of an int8 weight [outputs, inputs], scales and bias [outputs]."""


def fbgemm(weight: Tensor, scales: Tensor, zeros: Tensor) -> Product:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # deprecated
        quantized = torch._make_per_channel_quantized_tensor(weight, scales, zeros.long(), 0)
        packed = torch.ops.quantized.linear_prepack(quantized, zeros)
    return lambda activations: torch.ops.quantized.linear_dynamic(activations, packed, reduce_range=True)


def onednn_alone(weight: Tensor, scales: Tensor, zeros: Tensor) -> Product:
    packed, multiply = torch.ops.onednn.qlinear_prepack(weight, None), torch.ops.onednn.qlinear_pointwise
    operands, as_float = (1.0, 64, packed, scales, zeros.long(), None), (1.0, 0, torch.float32, "none", [], "")
    rounded = torch.randint(0, 128, (max(TOKENS), weight.shape[1]), dtype=torch.uint8)
    return lambda activations: multiply(rounded[: len(activations)], *operands, *as_float)


def layer_ms(kernels: dict[str, Kernel], shapes: list[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """By kernel and number of tokens, for a layer of such linear layers [outputs, inputs]."""
    num_layers = READ_BYTES // sum(outputs * inputs for outputs, inputs in shapes)
    weights = [torch.randint(-127, 128, shape, dtype=torch.int8) for shape in shapes * num_layers]
    layers = {
        name: [(weight.shape[1], packed(kernel, weight)) for weight in weights] for name, kernel in kernels.items()
    }
    found: dict[str, dict[str, float]] = {name: {} for name in kernels}
    for tokens in TOKENS:
        activations = {inputs: torch.randn(tokens, inputs) for _, inputs in shapes}
        ways = {name: partial(multiply_all, layers[name], activations) for name in kernels}
        for name, seconds in medians_in_turns(ways, ROUNDS).items():
            found[name][str(tokens)] = round(1e3 * seconds / num_layers, 2)
    return found


def packed(kernel: Kernel, weight: Tensor) -> Product:
    return kernel(weight, torch.rand(len(weight)), torch.zeros(len(weight)))


def multiply_all(layers: list[tuple[int, Product]], activations: dict[int, Tensor]) -> None:
    for inputs, product in layers:
        product(activations[inputs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = list(decoder_shapes(options.model).values())
    kernels: dict[str, Kernel] = {
        "fbgemm": fbgemm,
        "onednn": OneDnnProduct,
        "onednn alone": onednn_alone,
    }
    if (library := native.library()) is not None:
        kernels["ours"] = partial(CompiledProduct, library)
    with torch.inference_mode():
        weights = torch.randn(READ_BYTES // 4)
        read = median_seconds(weights.sum, 9)
        found = {
            "machine": machine(),
            "options": {"model": str(options.model), "threads": options.threads},
            "shapes": shapes,
            "read_gb_per_s": round(READ_BYTES / read / 1e9, 1),
            "layer_ms": layer_ms(kernels, shapes),
        }
    report(found, options.out)


if __name__ == "__main__":
    main()
