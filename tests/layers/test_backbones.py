"""Backbones without towers against transformers, from both spellings of configs, and the rotary embeddings they use."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from tests.support.backbones import BACKBONES, YARN
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import Pool, Prompt, Running, assert_close, layers_of, step
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.compiled_layer import RunExperts
from triptych.layers.delta_net import GatedDeltaNet
from triptych.layers.latent import LatentAttention
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.mixture import DenseAndExperts, MixtureOfExperts
from triptych.layers.parallel import SingleRank
from triptych.layers.rope import Rope, inverse_frequencies
from triptych.layers.rope_config import LENGTH_AXIS, RopeConfig
from triptych.models.backbones.gemma import GEMMA3
from triptych.models.backbones.gpt_oss import GPT_OSS
from triptych.models.backbones.rope import context_length, read_rope, short_length
from triptych.models.shared.settings import text_section
from triptych.models.text.adapter import TextAdapter

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
TOKENS = torch.arange(3, 43)

Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Of a backbone, by name and layout, made once. Tests don't write to it."""
    return cache(lambda name, *layout: make_tiny(tmp_path_factory.mktemp("tiny"), BACKBONES[name], *layout))


def prompt(name: str = "llama") -> Prompt:
    """For a backbone; short where its ropes depend on the length."""
    positions = torch.arange(len(TOKENS), dtype=torch.float64).repeat(3, 1)
    if short_length(text_section(BACKBONES[name].config)) is not None:
        positions[LENGTH_AXIS] = 0
    return Prompt(TOKENS, positions, torch.arange(0), torch.zeros(0, 96))


@pytest.mark.parametrize("layout", ["published", "saved"])
@pytest.mark.parametrize("name", BACKBONES)
def test_logits(folder: Folder, name: str, layout: str) -> None:
    """Of a whole prompt and of chunks."""
    path = folder(name, layout)
    decoder = load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU)
    expected = load_reference(path)(TOKENS[None]).logits[0]
    assert len(set(expected.argmax(-1).tolist())) > 10
    assert_close(step(Pool(decoder), [(Running(prompt(name)), len(TOKENS))]), expected, 1e-4)
    pool, running = Pool(decoder), Running(prompt(name))
    chunks = [step(pool, [(running, min(7, running.left))]) for _ in range(0, len(TOKENS), 7)]
    assert_close(torch.cat(chunks), expected, 1e-4)


@pytest.mark.parametrize("name", BACKBONES)
def test_plain_layers_run_in_compiled_calls(folder: Folder, name: str) -> None:
    """Latents, gates and scaled queries need the kernels one by one; experts have a call of their own."""
    path = folder(name, "published")
    decoder = load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU)
    backends = [layer.mixer.backend for layer in layers_of(decoder) if not isinstance(layer.mixer, GatedDeltaNet)]
    if not isinstance(backend := backends[0], CpuAttention) or backend.kernel is None:
        pytest.skip("there are no compiled kernels")
    has_delta_nets = name in {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
    for index, layer in enumerate(layers_of(decoder)):
        is_plain = name != "ministral3" and not has_delta_nets and (name, index) != ("llama4", 2)
        assert (layer.compiled_attend is not None) == (is_plain and not isinstance(layer.mixer, LatentAttention))
        assert not isinstance(layer.mixer, LatentAttention) or layer.mixer.to_latent.in_one_call is not None
        mixture = layer.mlp.experts if isinstance(layer.mlp, DenseAndExperts) else layer.mlp
        is_mixture = isinstance(mixture, MixtureOfExperts)
        assert (layer.compiled_finish is not None) == (not is_mixture)
        assert not is_mixture or isinstance(mixture.run_experts, RunExperts)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_ties_embeddings_by_default(tmp_path: Path, name: str) -> None:
    """The head has the embeddings as they are stored; tokens have them scaled."""
    tiny = BACKBONES[name]
    settings = {key: value for key, value in tiny.config.items() if key != "tie_word_embeddings"}
    path = make_tiny(tmp_path, replace(tiny, config=settings), "saved")
    saved = json.loads((path / "config.json").read_text())
    saved.pop("tie_word_embeddings", None)
    (path / "config.json").write_text(json.dumps(saved))
    decoder = load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU)
    assert decoder.config.tie_embeddings
    assert_close(
        step(Pool(decoder), [(Running(prompt()), len(TOKENS))]), load_reference(path)(TOKENS[None]).logits[0], 1e-4
    )


@pytest.mark.parametrize("name", ["llama", "phi3", "glm4"])
def test_ranks_have_their_parts(folder: Folder, name: str) -> None:
    """Whatever is stored as one tensor, and in whatever order."""
    path = folder(name, "published")

    def products(rank: int, size: int) -> list[torch.Tensor]:
        group = SingleRank()
        group.rank, group.size = rank, size
        layer: Any = load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU, group).layers[0]
        inputs = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
        heads = layer.mixer.qkv(inputs).split([n * layer.mixer.head_dim for n in layer.mixer.head_counts], 1)
        mlp = layer.mlp.module if size > 1 else layer.mlp
        return [*heads, *mlp.gate_up(inputs).chunk(2, 1)]

    ranks = [products(rank, 2) for rank in range(2)]
    for whole, *parts in zip(products(0, 1), *ranks, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_ranks_have_their_sinks(folder: Folder) -> None:
    path, sinks = folder("gpt_oss", "published"), []
    for rank in range(2):
        group = SingleRank()
        group.rank, group.size = rank, 2
        layer = layers_of(load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU, group))[1]
        assert layer.mixer.options.sinks is not None
        sinks.append(layer.mixer.options.sinks)
    whole = load_file(path / "model.safetensors")["model.layers.1.self_attn.sinks"]
    assert torch.equal(torch.cat(sinks), whole)


def test_layers_for_multi_token_prediction_are_ignored(folder: Folder, tmp_path: Path) -> None:
    """Not those of other numbers."""
    path = folder("glm4_moe", "published")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    weights, sizes = load_file(path / "model.safetensors"), []
    for layer in (3, 4):
        extra = {f"model.layers.{layer}.{name}.weight": torch.ones(96) for name in ("enorm", "shared_head.norm")}
        save_file(weights | extra, tmp_path / "model.safetensors")
        adapter, checkpoint = load_adapter(tmp_path), Checkpoint(tmp_path)
        sizes.append(adapter.weight_bytes_by_stage(checkpoint.tensors)["decoder"])
        if layer == 3:
            adapter.load_decoder(checkpoint, FP32, CPU)
            continue
        with pytest.raises(CheckpointError, match=r"no place for tensor 'model\.layers\.4\.enorm\.weight'"):
            adapter.load_decoder(checkpoint, FP32, CPU)
    assert sizes == [sum(tensor.nbytes for tensor in weights.values()) + extra for extra in (0, 2 * 96 * 4)]


def test_tensors_that_decoders_do_not_need_are_ignored(folder: Folder, tmp_path: Path) -> None:
    """Frequencies in old files, and scales of FP8 caches. Other tensors without a place are errors."""
    path = folder("llama", "published")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")

    def load(*names: str) -> None:
        extra = {f"model.layers.0.self_attn.{name}": torch.ones(8) for name in names}
        save_file(weights | extra, tmp_path / "model.safetensors")
        load_adapter(tmp_path).load_decoder(Checkpoint(tmp_path), FP32, CPU)

    load(
        "rotary_emb.inv_freq", "k_proj.k_scale", "v_proj.v_scale", "attn.k_scale", "attn.v_scale", "kv_scale", "q_scale"
    )
    unknown = {
        "rotary_emb.phase": "no place for tensor",
        "k_proj.x_scale": "no place for tensor",
        "k_proj.weight_scale": "no quantization_config, but the checkpoint has a tensor",
    }
    for name, why in unknown.items():
        with pytest.raises(CheckpointError, match=rf"{why} .*{re.escape(name)}"):
            load(name)


LONGROPE = {"type": "longrope", "short_factor": [2.0] * 6, "long_factor": [3.0] * 6}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3, without a transition": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "attention_factor": 1.25,
    },
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 8.0},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1 + n / 7 for n in range(32)],
        "long_factor": [1 + n for n in range(32)],
        "original_max_position_embeddings": 4096,
    },
    "longrope, factor": {
        "rope_type": "longrope",
        "short_factor": [1.5] * 24,
        "long_factor": [9.0] * 24,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "factor": 32.0,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_frequencies(name: str) -> None:
    parameters: dict[str, Any] = {"rope_type": name, "rope_theta": 500_000.0} | ROPES[name]
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=dict(parameters)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    text = {"max_position_embeddings": 131_072, "rope_parameters": parameters}
    rope = read_rope(text, RopeConfig(10_000.0))
    found, ours = inverse_frequencies(64, rope)
    still = expected[len(found) :]
    assert not still.any(), "those that don't rotate"
    torch.testing.assert_close(found, expected[: len(found)], rtol=1e-6, atol=1e-9)
    assert ours == pytest.approx(factor, rel=1e-9)
    cos, sin = Rope(64, rope, CPU)(torch.arange(9.0, dtype=torch.float64).expand(3, -1), torch.float32)
    torch.testing.assert_close(
        cos.square() + sin.square(), cos.square()[:1].expand_as(cos), msg="values that don't rotate keep their size"
    )
    published = {"rope_theta": 500_000.0, "rope_scaling": {k: v for k, v in parameters.items() if k != "rope_theta"}}
    assert read_rope(text | published | {"rope_parameters": None}, RopeConfig(10_000.0)) == rope


def test_part_of_a_head_in_three_axes() -> None:
    """As in Qwen3.5: a quarter of each head, by interleaved axes."""
    parameters = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}
    config = Qwen3_5TextConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        rope_parameters=parameters | {"rope_type": "default", "mrope_interleaved": True},
    )
    positions = torch.randint(0, 10_000, (3, 9), generator=torch.Generator().manual_seed(0)).double()
    expected = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    rope = read_rope({"rope_parameters": parameters}, RopeConfig(1e4, (11, 11, 10), interleaved=True))
    for ours, theirs, still in zip(Rope(64, rope, CPU)(positions, torch.float32), expected, (1, 0), strict=True):
        for half in ours[:, 0].chunk(2, 1):
            assert torch.equal(half[:, :8], theirs[0, :, :8])
            assert (half[:, 8:] == still).all()


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_dynamic_scaling_has_frequencies_for_each_length(partial: float) -> None:
    """Those that transformers has for a sequence of that length; requests are side by side in a step."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 3.0, "partial_rotary_factor": partial}
    text = {"max_position_embeddings": 2048, "rope_parameters": dynamic}
    assert (short_length(text), context_length(text)) == (2048, 6144)
    rope = read_rope(text, RopeConfig(10_000.0))
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dynamic)
    lengths = (0, 2049, 4000, 6144)
    positions = torch.ones(3, len(lengths), dtype=torch.float64)
    positions[LENGTH_AXIS] = torch.tensor(lengths)
    _, sin = Rope(64, rope, CPU)(positions, torch.float32)
    for row, length in zip(sin[:, 0], lengths, strict=True):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
        torch.testing.assert_close(row[: len(expected)], expected.sin(), rtol=2e-6, atol=0)
        assert not row[len(expected) : 32].any()


@pytest.mark.parametrize(
    ("factor", "head_dim", "message"),
    [
        (None, 64, "factor must be a number"),
        (1e9, 64, "a context of .* tokens can't be served"),
        (2.0, 2, "needs heads that rotate 4 values, not 2"),
    ],
)
def test_dynamic_scaling_that_is_not_served(factor: float | None, head_dim: int, message: str) -> None:
    text = {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": factor}}
    with pytest.raises(CheckpointError, match=message):
        assert context_length(text) and Rope(head_dim, read_rope(text, RopeConfig(10_000.0)), CPU)


def test_ropes_by_length_have_one_axis() -> None:
    text = {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(CheckpointError, match="'dynamic' in three axes is not served"):
        read_rope(text, RopeConfig(10_000.0, mrope_section=(8, 12, 12)))


def test_longrope_has_frequencies_for_each_length() -> None:
    text = BACKBONES["phi3"].config
    assert short_length(text) == 160 and short_length(BACKBONES["llama"].config) is None
    rope = read_rope(text, RopeConfig(10_000.0))
    theirs = Phi3RotaryEmbedding(Phi3Config(**text))
    for length, is_long in ((160, 0.0), (161, 1.0)):
        positions = torch.arange(length, dtype=torch.float64).repeat(3, 1)
        positions[LENGTH_AXIS] = is_long
        ours = Rope(16, rope, CPU)(positions, torch.float32)
        expected = theirs(torch.zeros(1), torch.arange(length)[None])
        for one, other in zip(ours, expected, strict=True):
            still = (one[:, 0] == 1) | (one[:, 0] == 0)
            rotated = [column for column in range(16) if not still[:, column].all()]
            torch.testing.assert_close(one[:, 0, rotated], other[0], rtol=0, atol=1e-5)


def test_fp8_without_scales_is_refused(folder: Folder, tmp_path: Path) -> None:
    """The config of DeepSeek-V3 as published, with weights that it doesn't describe."""
    path = folder("deepseek_v3", "published")
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the checkpoint has no tensor \*\.weight_scale_inv"):
        load_adapter(tmp_path).load_decoder(Checkpoint(tmp_path), FP32, CPU)


def test_gpt_oss_has_yarn_by_default() -> None:
    """As in transformers."""
    config = {key: value for key, value in BACKBONES["gpt_oss"].config.items() if not key.startswith("rope_")}
    (_, rope), *others = GPT_OSS.describe(config).ropes
    expected = read_rope(GptOssConfig(**config).to_dict(), RopeConfig(1.0))
    assert (rope, others) == (expected, [])


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": 1e4}, "must be settings of full_attention and sliding_attention"),
        ({"full_attention": 3}, "rope settings must be an object"),
        ({"sliding_attention": {"rope_theta": "big"}}, "rope_theta must be a number"),
        (
            {"full_attention": {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [1.0] * 12}},
            "'longrope' is not served",
        ),
    ],
)
def test_ropes_of_gemma_that_are_not_served(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GEMMA3.describe(BACKBONES["gemma3"].config | {"rope_parameters": rope})


@pytest.mark.parametrize(("partial", "pairs"), [(1.0, False), (0.5, False), (0.25, True), (1.0, True)])
def test_order_of_rotated_values(partial: float, pairs: bool) -> None:
    """Value i rotates with value i + half of the head, by the frequency that the checkpoint gives them."""
    rope, head_dim = RopeConfig(10_000.0, partial=partial, pairs=pairs), 24
    order = rope.order(head_dim) or tuple(range(head_dim))
    assert sorted(order) == list(range(head_dim))
    count = rope.num_frequencies(head_dim)
    for index in range(count):
        first, second = (2 * index, 2 * index + 1) if pairs else (index, index + count)
        assert (order[index], order[index + head_dim // 2]) == (first, second)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "factor must be a number, not None"),
        ({"rope_type": "linear", "factor": -1}, "factor must be a positive number"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor must be a positive number"),
        (ROPES["llama3"] | {"rope_type": "llama3", "low_freq_factor": 5.0}, "must be at most high_freq"),
        ({"rope_type": "yarn", "original_max_position_embeddings": "4k"}, "original_max_position_embeddings must be"),
        ({"rope_type": "longrope", "short_factor": [1, 0]}, "short_factor must be positive numbers"),
        ({"rope_type": "longrope", "short_factor": None}, "short_factor must be a list"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [-1]}, "long_factor must be positive"),
        ({"rope_type": "longrope", "short_factor": [1, 10**400]}, "short_factor must be positive numbers"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "rope_theta must be more than 1"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}, "beta_fast must be a positive number"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320}, "beta_slow must be a positive number"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 10**400}, "must be a positive integer below 2"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        ({"rope_type": "spiral"}, "'spiral' is not served"),
        ({"rope_type": ["yarn"]}, "is not served"),
    ],
)
def test_rope_settings_that_are_not_served(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope({"max_position_embeddings": 4096, "rope_parameters": rope}, RopeConfig(10_000.0))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "'relu' is not served; served are silu, gelu_pytorch_tanh"),
        ("llama", {"hidden_act": ["silu"]}, "is not served"),
        ("mistral", {"sliding_window": "all"}, "sliding_window must be a positive integer"),
        ("ministral", {"sliding_window": None}, "there is no sliding_window"),
        ("ministral", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "with rope type 'yarn' only"),
        ("glm4", {"head_dim": 10}, "5 of 10 values of a head"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [2.0] * 5}}, "5 rope factors for 6 frequencies"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 7}}, "7 rope factors for 6 frequencies"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not served"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number"),
        ("gemma2", {"query_pre_attn_scalar": -1.0}, "query_pre_attn_scalar must be a positive number"),
        ("gemma3", {"hidden_activation": "relu"}, "'relu' is not served"),
        ("gemma3", {"sliding_window": "all"}, "sliding_window must be a positive integer"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a positive number"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc' is not served; only 'greedy' or 'group_limited"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not served"),
        ("deepseek_v2", {"n_group": 5}, "12 experts can't be routed"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not served"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not served; only 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not served"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank must be a positive integer"),
        ("deepseek_v3", {"qk_rope_head_dim": 11}, "11 of 11 values of a head"),
        ("deepseek_v3", {"kv_lora_rank": 44}, r"kv_a_proj_with_mqa\.weight' has shape \[52, 96\]"),
        ("gpt_oss", {"num_local_experts": 2}, "3 experts per token can't be chosen from 2"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("llama4", {"attention_chunk_size": -8}, "attention_chunk_size must be a positive integer"),
        ("llama4", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers must have a 0 or 1 for each of 4 layers"),
        ("llama4", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers must have a 0 or 1"),
        ("llama4", {"no_rope_layers": [1, 0, [], "1"]}, "no_rope_layers must have a 0 or 1"),
        ("llama4", {"rope_scaling": YARN}, "use_qk_norm is served with rope types"),
        ("llama4", {"floor_scale": 0}, "floor_scale must be a positive integer"),
        ("llama4", {"attn_scale": -1.0}, "attn_scale must be a positive number"),
        ("llama4", {"moe_layers": 3}, "moe_layers must be a list"),
        ("llama4", {"moe_layers": ["1"]}, "moe_layers must be numbers of layers"),
        ("llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be a positive integer"),
    ],
)
def test_unsupported_configs_are_rejected(
    folder: Folder, tmp_path: Path, name: str, changes: dict[str, object], message: str
) -> None:
    source = folder(name, "published")
    (tmp_path / "config.json").write_text(json.dumps(BACKBONES[name].config | changes))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_adapter(tmp_path).load_decoder(Checkpoint(tmp_path), FP32, CPU)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": ["llama"]}, "is not served"),
        ("llama", {"attention_bias": "no"}, "attention_bias must be a bool"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1000"),
        ("llama", {"hidden_size": 10**400}, "hidden_size must be a positive integer below 2"),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads: 3 key"),
        ("llama", {"head_dim": None, "hidden_size": 1}, "heads of 0 values"),
        ("gemma3", {"head_dim": 10**9}, "heads of 1000000000 values"),
        ("deepseek_v2", {"kv_lora_rank": 10**9}, "6 heads of 1000000012 values"),
        ("deepseek_v2", {"v_head_dim": 10**9}, "6 heads of 1000000000 values"),
        ("deepseek_v2", {"qk_nope_head_dim": None}, "qk_nope_head_dim must be a positive integer"),
        ("gemma3", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
        ("glm4_moe", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be at most 1000"),
        ("glm4_moe", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be a positive number"),
    ],
)
def test_damaged_configs_are_rejected(name: str, changes: dict[str, object], message: str) -> None:
    """Before anything of a size they claim is allocated."""
    with pytest.raises(CheckpointError, match=message):
        TextAdapter(BACKBONES[name].config | changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_num_key_heads": 5}, "linear_num_key_heads: 5 key heads don't divide 12"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim must be 4, not 3"),
        ({"linear_key_head_dim": 2**30}, "can't be served"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types: a model without a layer of full"),
        ({"layer_types": ["sliding_attention"] * 5}, "must name full_attention or linear_attention"),
        ({"attn_output_gate": False}, "attn_output_gate must be true"),
    ],
)
def test_delta_nets_that_are_not_served(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TextAdapter(BACKBONES["qwen3_5"].config | settings)


def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, BACKBONES["qwen3_5"])
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.zeros(3, 3)}, path / "model.safetensors", metadata={"format": "pt"})
    load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU)
