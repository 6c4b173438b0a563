"""Limits of the language engine on this machine: the memory's bandwidth, and the weights that a token's step reads."""

from pathlib import Path

import torch

from bench.measuring import Work, medians_in_turns
from triptych.checkpoint.config_files import load_config
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.huge_pages import HugePages
from triptych.layers.linear import PackedFormat, WeightFormat
from triptych.layers.specs import AttentionSpec, DenseAndExpertsSpec
from triptych.models.registry import family_of, resolve

READ_BYTES = 2**30
COLUMNS = 4096
"""Of the matrix that is read."""
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Of a weight in each format."""
SENSITIVE = ("qkv", "down")
"""Of ``decoder_shapes``, layers that ``WeightFormat.sensitive`` makes."""


def read_bandwidth(threads: int) -> float:
    """Return the read bandwidth in GB/s: the best of sums and of a product with a vector.

    The memory is in huge pages, as packed weights are: in others it is read more slowly.
    """
    torch.set_num_threads(threads)
    matrix = HugePages(READ_BYTES).empty((READ_BYTES // 4 // COLUMNS, COLUMNS), torch.float32).fill_(1)
    vector = torch.ones(COLUMNS)
    ways: dict[str, Work] = {"sum": matrix.sum, "rows": lambda: matrix.sum(1), "product": lambda: matrix.mv(vector)}
    return READ_BYTES / min(medians_in_turns(ways, 7).values()) / 1e9


def weight_bytes_read(folder: Path, weights: WeightFormat) -> int | None:
    """Return the bytes of weights that a greedy token's step reads; of the head's those in int8 where it is a
    ``PrunedHead``. Scales aren't counted. None for a mixture of experts, for layers that aren't attention's and for
    unknown formats."""
    decoder = decoder_config(folder)
    sample = weights.head(torch.randn(64, decoder.hidden_size), torch.device("cpu"))
    head = "int8" if sample.pruned_head is not None else weights.high_precision_dtype
    has_others = any(not isinstance(layer.mixer, AttentionSpec) for layer in decoder.layers)
    if decoder.has_experts or has_others or not {head, weights.linear_dtype} <= BYTES.keys():
        return None
    more = weights.sensitive_dtype if isinstance(weights, PackedFormat) else ""
    layer = sum(
        BYTES[more if more and name in SENSITIVE else weights.linear_dtype] * rows * columns
        for name, (rows, columns) in decoder_shapes(folder).items()
    )
    return int(decoder.num_layers * layer + BYTES[head] * decoder.vocab_size * decoder.hidden_size)


def decoder_config(folder: Path) -> DecoderConfig:
    config = load_config(folder)
    decoder: DecoderConfig = resolve(family_of(config).adapter)(config).decoder_config
    return decoder


def attention_of(decoder: DecoderConfig) -> AttentionSpec:
    """The first layer's attention."""
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def decoder_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the first layer's linear layers, by name."""
    decoder = decoder_config(folder)
    mixer, ffn = attention_of(decoder), decoder.layers[0].ffn
    assert not isinstance(ffn, DenseAndExpertsSpec)
    heads = mixer.num_heads + 2 * mixer.num_kv_heads
    return {
        "qkv": (heads * mixer.head_dim, decoder.hidden_size),
        "o": (decoder.hidden_size, mixer.output_size),
        "gate_up": (2 * ffn.intermediate_size, decoder.hidden_size),
        "down": (decoder.hidden_size, ffn.intermediate_size),
    }
