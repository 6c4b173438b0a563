"""Linear layers, weight formats, norm and rope by themselves."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRMSNorm,
    Qwen3VLTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from triptych.config import DTYPES, ENCODER_QUANTIZATIONS, QUANTIZATIONS, EngineConfig
from triptych.errors import CheckpointError, ConfigError
from triptych.layers.float_product import bf16_product, half_product
from triptych.layers.linear import (
    QUANTIZED_FORMATS,
    WEIGHT_FORMATS,
    Pack,
    PackedFormat,
    PackedLinear,
    PlainFormat,
    PlainLinear,
    RMSNorm,
)
from triptych.layers.pointwise import rotate
from triptych.layers.rope import Rope
from triptych.layers.rope_config import ProportionalScaling, RopeConfig, YarnScaling
from triptych.models.backbones.rope import read_rope

CPU = torch.device("cpu")
INTERLEAVED = RopeConfig(5e5, (24, 20, 20), interleaved=True)
CHUNKED = RopeConfig(1e6, (16, 24, 24))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_in_every_format(name: str, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16() if with_bias else None
    weights = WEIGHT_FORMATS[name]
    activations = torch.randn(5, 32).to(weights.activations)
    expected = activations.double() @ weight.double().T + (0 if bias is None else bias.double())
    output = weights.linear(weight, bias, CPU)(activations)
    assert output.dtype == weights.activations
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}.get(name, 2e-2)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=0)


def test_int8_weights_are_close_and_a_quarter_of_the_bytes() -> None:
    torch.manual_seed(0)
    weight, bias, activations = torch.randn(256, 512) / 16, torch.randn(256), torch.randn(7, 512)
    weight[3] = 0  # a row without a scale
    linear = QUANTIZED_FORMATS["int8"].linear(weight, bias, CPU)
    assert isinstance(linear, PackedLinear)
    expected = F.linear(activations, weight, bias)
    error = (linear(activations) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.03
    assert not list(linear.parameters())
    fine = QUANTIZED_FORMATS["int8"].high_precision(weight, None, CPU)
    assert torch.equal(fine(activations), WEIGHT_FORMATS["float16"].linear(weight, None, CPU)(activations))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_packed_in_float32(rows: int) -> None:
    weight, bias, activations = torch.randn(48, 40), torch.randn(48), torch.randn(rows, 40)
    linear = WEIGHT_FORMATS["float32"].linear(weight, bias, CPU)
    assert isinstance(linear, PackedLinear)
    torch.testing.assert_close(linear(activations), F.linear(activations, weight, bias), atol=1e-5, rtol=1e-5)
    assert not list(linear.parameters())


def test_a_weight_that_has_the_dtype_is_not_copied() -> None:
    weight = torch.randn(4, 3)
    linear = PlainFormat(torch.float32).linear(weight, None, CPU)
    assert isinstance(linear, PlainLinear)
    assert linear.weight.data_ptr() == weight.data_ptr()


def test_packed_weights_are_the_only_copy_and_for_cpus_only() -> None:
    weights = WEIGHT_FORMATS["float16"]
    linear = weights.linear(torch.randn(4, 3), None, CPU)
    assert not list(linear.parameters())
    with pytest.raises(ConfigError, match="CPUs only"):
        weights.linear(torch.randn(4, 3), None, torch.device("meta"))


def test_every_dtype_setting_has_a_format() -> None:
    assert {"auto", *WEIGHT_FORMATS} == set(DTYPES)
    assert {"none", *QUANTIZED_FORMATS} == set(QUANTIZATIONS)
    assert set(ENCODER_QUANTIZATIONS) <= set(QUANTIZATIONS)


@pytest.mark.parametrize(("dtype", "pack"), [("float16", half_product), ("bfloat16", bf16_product)])
def test_activations_are_fp32_between_products(dtype: str, pack: Pack) -> None:
    """As ``--help`` says."""
    weights = WEIGHT_FORMATS[dtype]
    assert isinstance(weights, PackedFormat)
    assert weights.pack_linear is weights.pack_high_precision is pack
    assert weights.activations == torch.float32
    (dtype_setting,) = [item for item in fields(EngineConfig) if item.name == "dtype"]
    assert "On CPUs activations are fp32 between products" in dtype_setting.metadata["help"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = Qwen3VLTextRMSNorm(32, eps=1e-6).to(dtype).requires_grad_(False)
    reference.weight.copy_(torch.randn(32))
    activations = (10 * torch.randn(7, 32)).to(dtype)
    exactly: Any = (
        {"atol": 0, "rtol": 0} if dtype == torch.bfloat16 else {}
    )  # a float32 kernel may add up in another order
    torch.testing.assert_close(RMSNorm(reference.weight, 1e-6)(activations), reference(activations), **exactly)


@pytest.mark.parametrize(("head_dim", "section"), [(16, (4, 2, 2)), (128, (24, 20, 20)), (16, (2, 3, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_equals_transformers(
    head_dim: int, section: tuple[int, int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    torch.manual_seed(0)
    parameters = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(section)}
    if interleaved:
        config: Any = Qwen3VLTextConfig(head_dim=head_dim, rope_parameters=parameters | {"mrope_interleaved": True})
        reference: Any = Qwen3VLTextRotaryEmbedding(config)
    else:
        config = Qwen2VLTextConfig(hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=parameters)
        reference = Qwen2VLRotaryEmbedding(config)
    positions = torch.randint(0, 300_000, (3, 9)) / torch.tensor(3, dtype=torch.float64)
    query = torch.randn(1, 3, 9, head_dim, dtype=dtype)  # [1, heads, T, head_dim]
    reference_cos, reference_sin = reference(query, positions[:, None])
    expected, _ = apply_rotary_pos_emb(query, query, reference_cos, reference_sin)
    cos, sin = Rope(head_dim, RopeConfig(5e6, section, interleaved), CPU)(positions, dtype)
    assert torch.equal(cos[:, 0], reference_cos[0])
    assert torch.equal(sin[:, 0], reference_sin[0])
    assert torch.equal(rotate(query[0].transpose(0, 1), cos, sin), expected[0].transpose(0, 1))


def test_rope_settings_in_both_spellings() -> None:
    scaling = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    published = read_rope({"rope_theta": 1e6, "rope_scaling": scaling}, INTERLEAVED)
    assert published == read_rope({"rope_parameters": scaling | {"rope_theta": 1e6}}, INTERLEAVED)
    assert published == RopeConfig(1e6, (4, 2, 2), interleaved=True)
    assert read_rope({"rope_scaling": None}, INTERLEAVED) == INTERLEAVED


def test_rope_settings_of_older_files() -> None:
    scaling = {"type": "mrope", "mrope_section": [4, 2, 2]}
    assert read_rope({"rope_theta": 1e5, "rope_scaling": scaling}, CHUNKED) == RopeConfig(1e5, (4, 2, 2))
    with pytest.raises(CheckpointError, match="'mrope' is not served"):
        read_rope({"rope_scaling": scaling}, RopeConfig(1e6))


def test_text_alone_has_one_axis() -> None:
    assert read_rope({"rope_theta": 1e5, "rope_scaling": None}, RopeConfig(1e6)) == RopeConfig(1e5)
    positions = torch.randint(0, 100_000, (1, 9))
    query = torch.randn(1, 3, 9, 16)
    expected = Qwen2RotaryEmbedding(Qwen2Config(hidden_size=64, num_attention_heads=4))(query, positions)
    for ours, theirs in zip(
        Rope(16, RopeConfig(1e4), CPU)(positions.expand(3, -1), torch.float32), expected, strict=True
    ):
        assert torch.equal(ours[:, 0], theirs[0])


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not served"),
        ({"mrope_interleaved": False}, "only M-RoPE that is interleaved"),
        ({"mrope_section": [4, 4]}, "three positive counts"),
        ({"mrope_section": [4, "2", 2]}, "three positive counts"),
        ({"mrope_section": 8}, "three positive counts"),
        ({"rope_theta": "big"}, "rope_theta"),
        (["default"], "must be an object"),
    ],
)
def test_rope_settings_that_are_not_served(rope: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope({"rope_scaling": rope}, INTERLEAVED)


@pytest.mark.parametrize("beta", [1e-30, 1e30])
def test_extreme_yarn_stays_finite(beta: float) -> None:
    """Its transition is beyond all integers of 64 bits."""
    scaling = YarnScaling(4.0, 2**31 - 1, attention_factor=1.0, beta_fast=beta, beta_slow=beta)
    rope = Rope(256, RopeConfig(1.0000000000000002, scaling=scaling), CPU)
    assert rope.inverse_frequencies.isfinite().all()


@pytest.mark.parametrize("scaling", [None, ProportionalScaling()])
def test_heads_of_odd_size_are_refused(scaling: ProportionalScaling | None) -> None:
    with pytest.raises(CheckpointError, match=r"head_dim, .* can't be rotated in pairs"):
        Rope(31, RopeConfig(1e6, partial=0.25, scaling=scaling), CPU)


def test_sections_must_fill_the_head() -> None:
    with pytest.raises(CheckpointError, match="adds up to 7"):
        Rope(16, RopeConfig(1e6, (3, 2, 2)), CPU)
