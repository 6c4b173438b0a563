"""What GGUF files call a model's settings and tensors, and what transformers' files do.

A file's ``general.architecture`` names an entry of ``ARCHITECTURES``. The names and the changes that llama.cpp makes to
weights are those of its ``conversion`` folder.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.checkpoint.gguf.file import GgufFile
from triptych.errors import CheckpointError

Config = dict[str, Any]

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
GLM_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""``{}`` is an expert's number."""
DEEPSEEK2 = {
    **ATTENTION,
    **MLP,
    **NORMS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj"),
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{one}_exps": f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
    **{f"ffn_{one}_shexp": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")},
}
GPT_OSS = {
    **ATTENTION,
    "attn_sinks.weight": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **{f"ffn_{one}_exps": f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
}
LLAMA4 = {
    **ATTENTION,
    **NORMS,
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
    **{f"ffn_{one}_exps": f"feed_forward.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
    **{f"ffn_{one}_shexp": f"feed_forward.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
}
FACTORS = "rope_freqs.weight"
"""Divisors of the rope's frequencies (Llama 3.1 and later)."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
UNPLACED = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that become settings."""
MAX_VALUES = 2**16
SOFTMAX, SIGMOID = 1, 2
"""How experts are scored."""
DEEPSEEK_V3_EXPERTS = 256
LLAMA4_SCOUT = 16
"""Experts of the smaller model."""
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class ModelSettings:
    """A file's settings of its architecture. Each method raises CheckpointError, naming the setting, for one that is
    missing or of another type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._architecture = architecture

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a finite number, the same for all layers; ``default`` None: there must be one."""
        key = f"{self._architecture}.{name}"
        found = self.file.settings.get(key, default)
        if isinstance(found, np.ndarray) and len(set(found.tolist())) == 1:
            found = found[0].item()
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise CheckpointError(f"{self.file.path}: {key} must be a number, not {found!r}")
        return decimal(found) if isinstance(found, float) else found

    def numbers(self, name: str) -> list[Any]:
        """Return a list of finite numbers."""
        key = f"{self._architecture}.{name}"
        found = self.file.settings.get(key)
        if not isinstance(found, np.ndarray) or not np.isfinite(found).all():
            raise CheckpointError(f"{self.file.path}: {key} must be numbers, not {found!r}")
        return [decimal(one) if isinstance(one, float) else one for one in found.tolist()]

    def values(self, name: str) -> list[float]:
        """Return the values of a small tensor. Raises CheckpointError for one that is missing, too large or not of
        positive numbers in float32."""
        found = self.file.tensors.get(name)
        if found is None or found.kind.name != "F32" or found.num_bytes > MAX_VALUES * 4:
            raise CheckpointError(f"{self.file.path}: tensor {name!r} must be at most {MAX_VALUES} numbers in float32")
        try:
            values = np.fromfile(found.path, "<f4", found.num_bytes // 4, offset=found.offset)
        except OSError as error:
            raise CheckpointError(f"{found.path}: can't be read: {error.strerror}") from error
        if not np.isfinite(values).all() or values.min(initial=1) <= 0:
            raise CheckpointError(f"{found.path}: tensor {name!r} must be positive numbers")
        return [float(one) for one in values]

    def has(self, name: str) -> bool:
        return f"{self._architecture}.{name}" in self.file.settings

    def holds(self, name: str) -> bool:
        """Return whether a setting is true."""
        return self.file.settings.get(f"{self._architecture}.{name}") is True

    def flags(self, name: str) -> list[bool]:
        """Return a list of truth values."""
        found = self.file.settings.get(f"{self._architecture}.{name}")
        if not isinstance(found, np.ndarray) or found.dtype != np.bool_:
            raise CheckpointError(f"{self.file.path}: {self._architecture}.{name} must be true or false, not {found!r}")
        return [bool(one) for one in found]

    def text(self, name: str) -> str:
        return str(self.file.settings.get(f"{self._architecture}.{name}", ""))


def decimal(number: float) -> float:
    """Return the number of six digits that rounds to this one in float32, if there is one: of a config's 1e-06, files
    have 9.999999974752427e-07."""
    short = float(f"{number:.6g}")
    return short if float(np.float32(short)) == number else number


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture are read."""

    model_type: str
    names: Mapping[str, str]
    """By the part of a layer's name: what transformers calls it."""
    more: Callable[[ModelSettings], Config]
    """What its config has beyond ``_common``."""
    rotated: bool = False
    """Whether rows of queries and keys are in the order of pairs, and transformers' in the order of halves."""
    norm_offset: int = 0
    """What the file's norms have been added to."""
    transposed: tuple[str, ...] = ()
    """Parts of layers' names whose matrices are transposed. Tensors of one name are joined head by head."""


def config_of(file: GgufFile) -> tuple[Architecture, Config]:
    """Return a file's architecture and the ``config.json`` that transformers' files of the model have. Raises
    CheckpointError for an architecture that isn't served, and for settings that are missing or contradict tensors."""
    name = file.settings.get("general.architecture")
    found = ARCHITECTURES.get(str(name))
    if found is None:
        served = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: general.architecture {name!r} is not served; served: {served}")
    settings = ModelSettings(file, str(name))
    return found, {"model_type": found.model_type, **_common(settings), **found.more(settings)}


def _common(settings: ModelSettings) -> Config:
    heads, width = settings.number("attention.head_count"), settings.number("embedding_length")
    tensors = settings.file.tensors
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise CheckpointError(f"{settings.file.path}: tensor 'token_embd.weight' is missing")
    config = {
        "hidden_size": width,
        "num_hidden_layers": settings.number("block_count"),
        "intermediate_size": settings.number("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.number("attention.head_count_kv", heads),
        "head_dim": settings.number("attention.key_length", width // heads if heads else 0),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.number("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": settings.number("rope.freq_base", 10_000.0),
        "dtype": "float32",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }
    kind = settings.text("rope.scaling.type")
    if kind == "linear" and settings.number("rope.scaling.factor") != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": settings.number("rope.scaling.factor")}
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(settings)
    elif kind not in ("", "none", "linear"):
        raise CheckpointError(f"{settings.file.path}: rope.scaling.type {kind!r} is not served")
    if FACTORS in tensors:
        length, factors = config["max_position_embeddings"], settings.values(FACTORS)
        config["rope_scaling"] = _longrope(length, factors, factors) | {"attention_factor": 1.0}
    return config


def _longrope(length: int, short: list[float], long: list[float]) -> Config:
    """Return rotary settings with a divisor for each frequency, ``short`` up to a length."""
    factors = {"short_factor": short, "long_factor": long}
    return {"rope_type": "longrope", "original_max_position_embeddings": length} | factors


def _phi3(settings: ModelSettings) -> Config:
    """A window of zero means none."""
    config: Config = _partial(settings) | {"sliding_window": settings.number("attention.sliding_window", 0) or None}
    if LONG_FACTORS in settings.file.tensors:
        length = settings.number("rope.scaling.original_context_length")
        scaling = _longrope(length, settings.values(SHORT_FACTORS), settings.values(LONG_FACTORS))
        if settings.has("rope.scaling.attn_factor"):
            scaling["attention_factor"] = settings.number("rope.scaling.attn_factor")
        config |= {"original_max_position_embeddings": length, "rope_scaling": scaling}
    return config


def _partial(settings: ModelSettings) -> Config:
    """Return the share of a head's values that are rotated."""
    heads, width = settings.number("attention.head_count"), settings.number("embedding_length")
    length = settings.number("attention.key_length", width // heads if heads else 0)
    return {"partial_rotary_factor": settings.number("rope.dimension_count", length) / max(1, length)}


def _windows(settings: ModelSettings) -> Config:
    if settings.has("attention.sliding_window"):
        raise CheckpointError(f"{settings.file.path}: attention.sliding_window is not served for this architecture")
    return {}


def _ministral3(settings: ModelSettings) -> Config:
    """All its files have YaRN, and queries that grow with their position."""
    magnitude = settings.number("rope.scaling.yarn_log_multiplier", 1.0)
    grown = {"mscale": magnitude, "mscale_all_dim": magnitude}
    beta = settings.number("attention.temperature_scale", 0.0)
    return {"rope_scaling": _yarn(settings) | grown | ({"llama_4_scaling_beta": beta} if beta else {})}


def _yarn(settings: ModelSettings) -> Config:
    betas = {f"beta_{end}": f"rope.scaling.yarn_beta_{end}" for end in ("fast", "slow")}
    return {
        "rope_type": "yarn",
        "factor": settings.number("rope.scaling.factor"),
        "original_max_position_embeddings": settings.number("rope.scaling.original_context_length"),
    } | {name: settings.number(key) for name, key in betas.items() if settings.has(key)}


def _gemma2(settings: ModelSettings) -> Config:
    return {
        "sliding_window": settings.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(settings, 46),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(settings: ModelSettings) -> Config:
    return {
        "sliding_window": settings.number("attention.sliding_window"),
        "sliding_window_pattern": settings.number("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": settings.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _query_scale(settings, 62),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _query_scale(settings: ModelSettings, largest: int) -> int:
    """Return what attention divides by the root of. The largest model of each generation, known by its number of
    layers, has the width of a head without its own length."""
    if settings.number("block_count") == largest:
        return int(settings.number("embedding_length") // settings.number("attention.head_count"))
    return int(settings.number("attention.key_length"))


def _experts(settings: ModelSettings) -> Config:
    return {
        "num_experts": settings.number("expert_count"),
        "num_experts_per_tok": settings.number("expert_used_count"),
        "moe_intermediate_size": settings.number("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
    }


def _qwen3_moe(settings: ModelSettings) -> Config:
    return _experts(settings) | {"norm_topk_prob": True}


def _qwen2_moe(settings: ModelSettings) -> Config:
    shared = settings.number("expert_shared_feed_forward_length", settings.number("feed_forward_length"))
    return _experts(settings) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _gpt_oss(settings: ModelSettings) -> Config:
    return {
        "num_local_experts": settings.number("expert_count"),
        "num_experts_per_tok": settings.number("expert_used_count"),
        "intermediate_size": settings.number("expert_feed_forward_length"),
        "sliding_window": settings.number("attention.sliding_window"),
        **({"rope_scaling": _yarn(settings) | {"truncate": False}} if settings.has("rope.scaling.factor") else {}),
    }


def _deepseek2(settings: ModelSettings) -> Config:
    """Scores are sigmoids in V3 and later."""
    is_mla = settings.has("attention.key_length_mla")
    key, value = (settings.number(f"attention.{one}_length{'_mla' if is_mla else ''}") for one in ("key", "value"))
    rotated, experts = settings.number("rope.dimension_count"), settings.number("expert_count", 0)
    is_sigmoid = settings.number("expert_gating_func", SOFTMAX) == SIGMOID
    groups = settings.number("expert_group_count", 8 if is_sigmoid and experts == DEEPSEEK_V3_EXPERTS else 1)
    kept = settings.number("expert_group_used_count", 4 if groups > 1 else 1)
    config = {
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        "num_key_value_heads": settings.number("attention.head_count"),
        "q_lora_rank": settings.number("attention.q_lora_rank") if settings.has("attention.q_lora_rank") else None,
        "kv_lora_rank": settings.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "n_routed_experts": experts,
        "num_experts_per_tok": settings.number("expert_used_count"),
        "n_shared_experts": settings.number("expert_shared_count"),
        "moe_intermediate_size": settings.number("expert_feed_forward_length"),
        "first_k_dense_replace": settings.number("leading_dense_block_count", 0),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
        "norm_topk_prob": settings.holds("expert_weights_norm"),
        "n_group": groups,
        "topk_group": kept,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in settings.file.tensors,
        "topk_method": "noaux_tc" if is_sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
    }
    if settings.text("rope.scaling.type") == "yarn":
        # a tenth of it, for no reason (llama.cpp's pull request 17945)
        magnitude = round(10 * settings.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        config["rope_scaling"] = _yarn(settings) | {"mscale": magnitude, "mscale_all_dim": magnitude}
    return config


def _llama4(settings: ModelSettings) -> Config:
    """Files don't say what all released models have alike, nor that queries and keys of those with 16 experts alone are
    normalised."""
    experts = settings.number("expert_count")
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": settings.number("expert_used_count"),
        "intermediate_size": settings.number("expert_feed_forward_length"),
        "intermediate_size_mlp": settings.number("feed_forward_length"),
        "interleave_moe_layer_step": settings.number("interleave_moe_layer_step"),
        "use_qk_norm": experts == LLAMA4_SCOUT,
    }


def tensor_name(key: str, architecture: Architecture) -> tuple[str | None, int | None]:
    """Return what files call one of transformers' tensors, and which expert's it is, of those that a file has in one;
    None: it has no name, or is no expert's."""
    part, _, kind = key.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
    if layer is None:
        own = next((name for name, theirs in WHOLE.items() if theirs == part), None)
        return own and f"{own}.{kind}", None
    if own := next((name for name, theirs in architecture.names.items() if theirs == f"{layer[2]}.{kind}"), None):
        return f"blk.{layer[1]}.{own}", None
    theirs, count = re.subn(r"(?<=experts\.)\d+(?=\.)", "{}", layer[2])
    own = next((name for name, one in architecture.names.items() if one == theirs), None)
    expert = int(layer[2].partition("experts.")[2].partition(".")[0]) if count else None
    return own and f"blk.{layer[1]}.{own}.{kind}", expert


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", ATTENTION | MLP | NORMS, _windows, rotated=True),
    "smollm3": Architecture("smollm3", ATTENTION | MLP | NORMS, _windows, rotated=True),
    "mistral3": Architecture("ministral3", ATTENTION | MLP | NORMS, _ministral3, rotated=True),
    "qwen2": Architecture("qwen2", ATTENTION | MLP | NORMS, _windows),
    "qwen2vl": Architecture("qwen2", ATTENTION | MLP | NORMS, _windows),
    "qwen2moe": Architecture("qwen2_moe", ATTENTION | EXPERTS | NORMS, _qwen2_moe),
    "qwen3": Architecture("qwen3", ATTENTION | MLP | NORMS, _windows),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | EXPERTS | NORMS, _qwen3_moe),
    "qwen3vl": Architecture("qwen3", ATTENTION | MLP | NORMS, _windows),
    "qwen3vlmoe": Architecture("qwen3_moe", ATTENTION | EXPERTS | NORMS, _qwen3_moe),
    "phi3": Architecture("phi3", ATTENTION | FUSED_MLP | NORMS, _phi3),
    "glm4": Architecture("glm4", ATTENTION | FUSED_MLP | GLM_NORMS, _partial),
    "deepseek2": Architecture("deepseek_v2", DEEPSEEK2, _deepseek2, transposed=("attn_k_b",)),
    "gpt-oss": Architecture("gpt_oss", GPT_OSS, _gpt_oss),
    "llama4": Architecture("llama4_text", LLAMA4, _llama4),
    "gemma2": Architecture("gemma2", ATTENTION | MLP | GEMMA_NORMS, _gemma2, norm_offset=1),
    "gemma3": Architecture("gemma3_text", ATTENTION | MLP | GEMMA_NORMS, _gemma3, norm_offset=1),
}
"""By the name in ``general.architecture``."""
