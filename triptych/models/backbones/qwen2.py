"""Qwen2 and Qwen2.5, also as the language model of Qwen2-VL, Qwen2.5-VL and Qwen2.5-Omni: queries, keys and values have
biases, and the upper layers may have a sliding window.

The reference is ``Qwen2Model`` in transformers.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import LayerSpec
from triptych.models.backbones.base import (
    SLIDING,
    Backbone,
    TextConfig,
    attention,
    decoder,
    gated_mlp,
    layer_types,
    layers_up_to,
    num_layers,
)
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting


def describe(text: TextConfig, *, rope: RopeConfig, eps: float) -> DecoderConfig:
    """Return the decoder of ``text``; ``rope`` and ``eps`` are defaults. Raises CheckpointError."""
    mixer = replace(attention(text, read_rope(text, rope)), qkv_bias=True)
    mlp = gated_mlp(text)
    layers = [LayerSpec(replace(mixer, window=window), mlp) for window in layer_windows(text)]
    return decoder(text, layers, eps=eps)


def layer_windows(text: TextConfig, is_windowed: Callable[[int, int], bool] = operator.ge) -> list[int | None]:
    """Return each layer's sliding window: that of the layers that ``layer_types`` names or, without it, of those for
    which ``is_windowed`` is true of index and ``max_window_layers``: by default, of the upper ones."""
    layers, window = range(num_layers(text)), window_if_enabled(text)
    if window is None:
        return [None for _ in layers]
    if not (types := layer_types(text)):
        limit = layers_up_to(text, "max_window_layers", 28)
        return [window if is_windowed(index, limit) else None for index in layers]
    return [window if kind == SLIDING else None for kind in types]


def window_if_enabled(text: TextConfig) -> int | None:
    """Return the size of the sliding window, if the config switches it on."""
    # files saved by transformers have a null for a disabled window
    if not text.get("use_sliding_window") or text.get("sliding_window", 0) is None:
        return None
    return setting(text, "sliding_window", int, default=4096)


QWEN2 = Backbone("Qwen2 (query, key and value biases)", partial(describe, rope=RopeConfig(10_000.0), eps=1e-6))
QWEN2_VL = Backbone(
    "Qwen2 (query, key and value biases), M-RoPE in sections",
    partial(describe, rope=RopeConfig(1_000_000.0, (16, 24, 24)), eps=1e-5),
)
QWEN2_5_OMNI = replace(QWEN2_VL, describe=partial(describe, rope=RopeConfig(1_000_000.0, (16, 24, 24)), eps=1e-6))
