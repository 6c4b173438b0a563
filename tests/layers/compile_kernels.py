"""Compiles the Triton kernels for GPUs that needn't be there, for shapes of real models, and prints what shared memory
each takes. Not a test: ``test_triton_compiles.py`` runs it in a process in which Triton doesn't interpret."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triptych.layers.attention import triton_kernels
from triptych.layers.attention.triton_backend import MIN_ROWS, constants, tile_tokens
from triptych.layers.delta_rule import triton_backend as delta_backend
from triptych.layers.delta_rule import triton_kernels as delta_kernels
from triptych.layers.delta_rule.base import BLOCK, DeltaHeads
from triptych.layers.pointwise_gpu import triton_kernels as pointwise_kernels

SHAPES = [
    (16, 8, 128, 16, None),
    (64, 4, 128, 16, None),
    (16, 16, 256, 32, None),
    (6, 2, 80, 4, None),
    (128, 1, 576, 16, 512),
]
"""Heads, kv heads, head_dim, page size, and how many of a key's values are those of its value."""
DELTA_SHAPES = [DeltaHeads(16, 32, 128, 128), DeltaHeads(2, 2, 256, 80)]
POINTWISE: dict[str, dict[str, int]] = {
    "rms_norm_kernel": {"HEADS": 1, "WIDTH": 4096, "BLOCK": 4096},
    "rotate_kernel": {"HEADS": 40, "HEAD_BLOCK": 64, "HALF": 64, "BLOCK": 64},
    "gate_kernel": {"WIDTH": 12288, "KIND": 3, "BLOCK": 1024},
}
TARGETS = [80, 89, 90]
POINTERS = {
    "activations",
    "weight",
    "heads",
    "cos",
    "sin",
    "gate_up",
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "output",
    "mixed",
    "taps",
    "conv",
    "a",
    "b",
}
"""In the activations' dtype."""
FLOATS = {"partial_sums", "partial_maxima", "partial_totals", "sinks", "convolved", "rates", "dt_bias", "recurrent"}
"""Pointers to fp32."""
LIMIT = 99 * 2**10
"""Bytes of shared memory that a program may have on the smallest of these GPUs."""


def compiled(kernel: Any, target: int, dtype: str, **values: float) -> Any:
    """A kernel for a target, with these constants."""
    names = kernel.arg_names
    signature = {}
    for argument in names:
        if argument in values:
            signature[argument] = "constexpr"
        elif argument in POINTERS:
            signature[argument] = f"*{dtype}"
        elif argument in FLOATS:
            signature[argument] = "*fp32"
        elif argument.endswith(("scale", "eps")):
            signature[argument] = "fp32"
        else:
            signature[argument] = "i32" if argument.endswith(("stride", "channels")) else "*i64"
    aligned = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind[0] in "*i"}
    source = ASTSource(kernel, signature, {(names.index(key),): value for key, value in values.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": 4, "num_stages": 2})


def main() -> None:
    for target in TARGETS:
        for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
            for heads, kv_heads, dim, page_size, value_dim in SHAPES:
                if value_dim is not None and itemsize == 4:
                    continue  # 512 values in fp32 need more shared memory than the smallest of these GPUs have
                shape = constants(heads, kv_heads, dim, page_size, itemsize, value_dim)
                group = triton.next_power_of_2(heads // shape["GROUPS"])
                tile = tile_tokens(heads, kv_heads, shape["DIM"], itemsize)
                reduced = {name: shape[name] for name in ("HEADS", "DIM", "DIM_BLOCK")} | {"SPLITS": 32}
                written = {"WIDTH": kv_heads * dim, "BLOCK": triton.next_power_of_2(kv_heads * dim)}
                written["SHARED"] = shape["SHARED"]
                plain = {"WINDOW": 0, "CHUNKED": 0, "CAP": 0.0, "SINKS": 0}
                opted = {"WINDOW": 128, "CHUNKED": 1, "CAP": 50.0, "SINKS": 1}
                decode, prefill = {"GROUP_BLOCK": max(MIN_ROWS, group)}, {"GROUP_BLOCK": group, "TILE": tile}
                for name, values in (
                    ("decode_kernel", shape | decode | plain | {"SPLITS": 1}),
                    ("decode_kernel", shape | decode | opted | {"SPLITS": 32}),
                    ("prefill_kernel", shape | prefill | plain | {"SPANS": 0}),
                    ("prefill_kernel", shape | prefill | opted | {"SPANS": 1}),
                    ("reduce_kernel", reduced),
                    ("write_kernel", written),
                ):
                    shared = compiled(getattr(triton_kernels, name), target, dtype, **values).metadata.shared
                    print(name, target, dtype, heads, kv_heads, dim, shared)
                    assert shared <= LIMIT, name
            for name, values in POINTWISE.items():
                shared = compiled(getattr(pointwise_kernels, name), target, dtype, **values).metadata.shared
                print(name, target, dtype, shared)
                assert shared <= LIMIT, name
        for delta_heads in DELTA_SHAPES:
            several = delta_backend.constants(delta_heads)
            convolution = delta_backend.convolution_constants(delta_heads)
            for name, values in (
                ("convolve_kernel", convolution | {"TOKENS": BLOCK}),
                ("several_kernel", several | {"TOKENS": BLOCK}),
                ("single_kernel", several),
            ):
                shared = compiled(getattr(delta_kernels, name), target, "bf16", **values).metadata.shared
                print(name, target, delta_heads, shared)
                assert shared <= LIMIT, name


if __name__ == "__main__":
    main()
