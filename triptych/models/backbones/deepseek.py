"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention, and mixtures of experts after the first, dense layers.
DeepSeek-OCR's decoder has V2's mixtures, but usual attention.

V2 chooses experts by a softmax, from all of them (V2-Lite) or from the best groups; V3 by corrected sigmoids.
The references are ``DeepseekV2Model``, ``DeepseekV3Model`` and ``DeepseekOcr2TextModel`` in transformers.
"""

from dataclasses import replace

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig, YarnScaling
from triptych.layers.specs import AttentionSpec, ExpertGroups, LayerSpec, MLASpec, RoutingSpec
from triptych.models.backbones.base import COMMON_NAMES, MAX_HEAD_VALUES, Backbone, TextConfig, attention, decoder
from triptych.models.backbones.experts import deepseek_ffns, next_token_layers, sigmoid_routing
from triptych.models.backbones.rope import magnitude, read_rope, rope_settings
from triptych.models.shared.settings import positive_number, setting


def deepseek_v2(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    return _decoder(text, latent_attention(text, pairs=True), _softmax_routing(text), shared=2, dense=0)


def deepseek_v3(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    _check(text, "scoring_func", "sigmoid")
    _check(text, "topk_method", "noaux_tc")
    mixer = latent_attention(text, pairs=setting(text, "rope_interleave", bool, default=True))
    return _decoder(text, mixer, sigmoid_routing(text, groups=8, kept_groups=4, scale=2.5), shared=1, dense=3)


def deepseek_ocr(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``, which has no latent attention. Raises CheckpointError."""
    _check(text, "use_mla", False)
    has_bias = setting(text, "attention_bias", bool, default=False)
    heads = attention(text, read_rope(text, RopeConfig(10_000.0)))
    mixer = replace(heads, qkv_bias=has_bias, output_bias=has_bias)
    return _decoder(text, mixer, _softmax_routing(text), shared=2, dense=1)


def latent_attention(text: TextConfig, *, pairs: bool) -> MLASpec:
    """Return the config's attention; ``pairs`` is as in ``RopeConfig``. Raises CheckpointError."""
    key_dim, rotated_dim = setting(text, "qk_nope_head_dim", int), setting(text, "qk_rope_head_dim", int)
    latent_dim, num_heads = setting(text, "kv_lora_rank", int), setting(text, "num_attention_heads", int)
    value_dim, widest = setting(text, "v_head_dim", int), max(key_dim, latent_dim) + rotated_dim
    if num_heads * max(widest, value_dim) > MAX_HEAD_VALUES:
        raise CheckpointError(
            "config.json: num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim or v_head_dim: "
            f"{num_heads} heads of {max(widest, value_dim)} values can't be served"
        )
    rope = read_rope(text, RopeConfig(10_000.0, pairs=pairs))
    has_query_latent = text.get("q_lora_rank", 1536) is not None
    return MLASpec(
        num_heads=num_heads,
        latent_dim=latent_dim,
        key_dim=key_dim,
        rotated_dim=rotated_dim,
        value_dim=value_dim,
        rope=rope,
        scale=(key_dim + rotated_dim) ** -0.5 * _enlarged(text, rope) ** 2,
        query_latent_dim=setting(text, "q_lora_rank", int, default=1536) if has_query_latent else None,
        bias=setting(text, "attention_bias", bool, default=False),
    )


def _enlarged(text: TextConfig, rope: RopeConfig) -> float:
    """Return by how much a YaRN with ``mscale_all_dim`` enlarges queries and keys, rotated or not."""
    settings = rope_settings(text)
    if not isinstance(rope.scaling, YarnScaling) or not settings.get("mscale_all_dim"):
        return 1.0
    return magnitude(rope.scaling.factor, positive_number(settings, "mscale_all_dim"))


def _softmax_routing(text: TextConfig) -> RoutingSpec:
    _check(text, "scoring_func", "softmax")
    _check(text, "norm_topk_prob", False)  # transformers and DeepSeek's own code differ in what it does
    _check(text, "topk_method", "greedy", "group_limited_greedy")
    groups = None
    if text.get("topk_method") == "group_limited_greedy":
        groups = ExpertGroups(setting(text, "n_group", int), setting(text, "topk_group", int), ranked_by=1)
    scale = positive_number(text, "routed_scaling_factor", 1.0)
    return RoutingSpec(setting(text, "num_experts_per_tok", int), normalised=False, scale=scale, groups=groups)


def _decoder(
    text: TextConfig, mixer: MLASpec | AttentionSpec, routing: RoutingSpec, *, shared: int, dense: int
) -> DecoderConfig:
    """``shared`` and ``dense`` are defaults, as in ``deepseek_ffns``."""
    _check(text, "mlp_bias", False)
    _check(text, "moe_layer_freq", 1)
    names = replace(COMMON_NAMES, ignored_modules=next_token_layers(text))
    layers = [LayerSpec(mixer, ffn) for ffn in deepseek_ffns(text, routing, shared=shared, dense=dense)]
    return decoder(text, layers, eps=1e-6, names=names)


def _check(text: TextConfig, name: str, *served: object) -> None:
    """Raise CheckpointError for a setting that is there and has another value than those ``served``."""
    if (found := text.get(name)) is not None and found not in served:
        raise CheckpointError(f"config.json: {name} {found!r} is not served; only {' or '.join(map(repr, served))}")


DEEPSEEK_V2 = Backbone("DeepSeek-V2 (latent attention, softmax routing with shared experts)", deepseek_v2)
DEEPSEEK_V3 = Backbone("DeepSeek-V3 (latent attention, sigmoid routing with a shared expert)", deepseek_v3)
DEEPSEEK_OCR = Backbone("DeepSeek-V2's mixtures (softmax routing with shared experts), usual attention", deepseek_ocr)
