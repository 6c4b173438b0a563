"""Quantized checkpoints in each format, in decoders, experts and towers: they are what their dequantized weights are,
in transformers, too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import (
    Pool,
    Prompt,
    Running,
    assert_close,
    assert_rows,
    layers_of,
    make_prompt,
    random_input,
    reference_logits,
    step,
)
from tests.support.quantized import Encode, assert_same_weights, quantized_pair
from tests.support.stored_formats import AWQ, FORMATS, GPTQ, awq, but, fp8, gptq
from tests.support.tiny import make_tiny
from triptych.checkpoint.outline import META, StoredOutline
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.errors import CheckpointError, ConfigError
from triptych.layers import native
from triptych.layers.linear import WEIGHT_FORMATS, ConcatenatedLinear, PackedLinear, PlainFormat
from triptych.layers.parallel import SINGLE_RANK
from triptych.layers.products import WeightKind
from triptych.layers.stored.reader import StoredReader
from triptych.server.model_bundle import ModelBundle

CPU = torch.device("cpu")
FP32 = PlainFormat(torch.float32)


def modules(encoder: Any) -> Iterator[nn.Module]:
    """The modules of an encoder's towers."""
    yield from getattr(encoder, "towers", {"": encoder}).values()


FAMILIES = ("qwen2_5_vl", "qwen3_moe", "kimi_vl", "internvl", "gemma4+gemma4_vision", "phi3")
FIRST_FORMAT, FIRST_FAMILY = next(iter(FORMATS)), FAMILIES[0]
PAIRS = [
    pytest.param(family, name, marks=() if family == FIRST_FAMILY or name == FIRST_FORMAT else pytest.mark.slow)
    for family in FAMILIES
    for name in FORMATS
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_decoders_experts_and_towers(tmp_path: Path, name: str, family: str) -> None:
    """Towers of several kinds, reordered layers, separate experts, fused layers. Fast tests have
    each format and each family once."""
    one = FORMATS[name]
    source = make_tiny(tmp_path / "source", BACKBONES.get(family, family))
    stored, dense = quantized_pair(source, tmp_path, one.section, one.encode)
    adapter = load_adapter(dense)
    decoders = [adapter.load_decoder(Checkpoint(folder), FP32, CPU) for folder in (stored, dense)]
    assert_same_weights(*decoders)
    if adapter.encoder_keys(Checkpoint(dense).tensors):
        ours, expected = (adapter.load_encoder(Checkpoint(folder), FP32, CPU) for folder in (stored, dense))
        for one_tower, other in zip(modules(ours), modules(expected), strict=True):
            assert_same_weights(one_tower, other)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantized_model_in_transformers(tmp_path: Path, name: str) -> None:
    one, image = FORMATS[name], random_input((1, 4, 6), patch_values=3 * 2 * 14 * 14)
    stored, dense = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    adapter, checkpoint, reference = load_adapter(stored), Checkpoint(stored), load_reference(dense)
    [rows] = adapter.load_encoder(checkpoint, FP32, CPU).encode([image])
    [expected_rows] = load_adapter(dense).load_encoder(Checkpoint(dense), FP32, CPU).encode([image])
    assert_rows(rows, expected_rows)
    prompt = make_prompt(reference, list(b"hello"), [image], [rows], adapter.embedding_width)
    pool = Pool(adapter.load_decoder(checkpoint, FP32, CPU))
    ours = step(pool, [(Running(prompt), len(prompt.tokens))])
    expected = reference_logits(reference, prompt, [image])
    assert_close(ours, expected, 1e-4 * expected.abs().max().item())
    assert len(set(expected.argmax(-1).tolist())) > 5


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in {"awq", "nvfp4-pack-quantized"} else pytest.mark.slow)
        for family in ("llama", "qwen3_moe")
        for name in FORMATS
    ],
)
def test_logits_of_models_for_text(tmp_path: Path, family: str, name: str) -> None:
    """Dense, and a mixture of experts."""
    one, source = FORMATS[name], make_tiny(tmp_path / "source", BACKBONES.get(family, family))
    stored, dense = quantized_pair(source, tmp_path, one.section, one.encode)
    decoder, tokens = load_adapter(stored).load_decoder(Checkpoint(stored), FP32, CPU), torch.arange(3, 33)
    positions = torch.arange(30.0).double().expand(3, -1)
    prompt = Prompt(tokens, positions, torch.arange(0), torch.zeros(0, decoder.embedding.shape[1]))
    with torch.inference_mode():
        expected = load_reference(dense)(input_ids=tokens[None]).logits[0]
    ours = step(Pool(decoder), [(Running(prompt), 30)])
    assert_close(ours, expected, 1e-4 * expected.abs().max().item())
    assert len(set(expected.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_layers_of_unlike_shards_are_multiplied_apart(tmp_path: Path, weights: str) -> None:
    one = FORMATS["pack-quantized"]
    encode = but(one.encode, "k_proj", "layers.1.mlp.up_proj")
    source = make_tiny(tmp_path / "source", "qwen2_5_vl")
    stored, dense = quantized_pair(source, tmp_path, one.section, encode)
    adapter = load_adapter(stored)
    whole, mixed = (
        layers_of(adapter.load_decoder(Checkpoint(folder), form, CPU))[1]
        for folder, form in ((dense, FP32), (stored, WEIGHT_FORMATS[weights]))
    )
    tokens = torch.randn(5, 64)
    for ours, expected in ((mixed.mixer.qkv, whole.mixer.qkv), (mixed.mlp.gate_up, whole.mlp.gate_up)):
        assert isinstance(ours, ConcatenatedLinear)
        assert all(isinstance(part, PackedLinear) for part in ours.linears)
        values = expected(tokens)
        assert (ours(tokens) - values).norm() < 0.02 * values.norm()
        assert ours(tokens).shape == values.shape
    loaded = [adapter.load_decoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], CPU) for folder in (stored, dense)]
    prompt = Prompt(torch.arange(3, 43), torch.arange(40.0).double().expand(3, -1), torch.arange(0), torch.zeros(0, 64))
    logits = [step(Pool(decoder), [(Running(prompt), 40)]) for decoder in loaded]
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[1].norm()


@pytest.mark.parametrize("name", FORMATS)
def test_outlines_read_every_tensor(tmp_path: Path, name: str) -> None:
    """As ``triptych doctor`` does, without values."""
    one = FORMATS[name]
    stored, _ = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    adapter, outline = load_adapter(stored), StoredOutline(stored)
    adapter.load_encoder(outline, FP32, META)
    assert outline.names_read == set(adapter.encoder_keys(outline.tensors))
    adapter.load_decoder(outline, FP32, META)
    assert outline.names_read == set(outline.tensors)


IN_4_BITS = (
    "pack-quantized",
    "pack-quantized, asymmetric",
    "awq",
    "awq by output",
    "gptq",
    "gptq_v2",
    "gptq, unlike layers",
)
IN_8_BITS = (
    "pack-quantized, 8 bits by output",
    "pack-quantized, unlike layers",
    "int-quantized",
    "int-quantized, tensors",
    "bitsandbytes int8",
)


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_kernels_take_stays_as_it_is(tmp_path: Path, name: str) -> None:
    """All else is packed as the values that it has."""
    if native.library() is None:
        pytest.skip("there are no compiled kernels")
    one = FORMATS[name]
    stored, dense = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    adapter = load_adapter(stored)
    ours, expected = (
        layers_of(adapter.load_decoder(Checkpoint(folder), form, CPU))[1].mlp.down
        for folder, form in ((stored, WEIGHT_FORMATS["float32"]), (dense, FP32))
    )
    kind = WeightKind.INT4 if name in IN_4_BITS else WeightKind.INT8 if name in IN_8_BITS else WeightKind.FLOAT
    assert ours.product.operands.kind == kind
    tokens = torch.randn(5, 96)
    error = (ours(tokens) - expected(tokens)).norm() / expected(tokens).norm()
    assert error < (1e-5 if kind == WeightKind.FLOAT else 0.02)


@pytest.mark.parametrize(
    ("name", "quantization", "kinds"),
    [
        ("modelopt", "int8", ["int8", "int8"]),
        ("fp8, blocks", "int4", ["int4", "int8"]),
        ("mixed-precision", "int4", ["int8", "int8"]),
        ("mixed-precision", "int8", ["int8", "int8"]),
        ("mixed-precision", "none", ["int8", "float"]),
        ("awq", "int8", None),
    ],
)
def test_what_is_dequantized_has_the_format_of_the_settings(
    tmp_path: Path, name: str, quantization: str, kinds: list[str] | None
) -> None:
    if native.library() is None:
        pytest.skip("there are no compiled kernels")
    one = FORMATS[name]
    stored, _ = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    engine = EngineConfig(device="cpu", quantization=quantization)
    if kinds is None:
        with pytest.raises(ConfigError, match=f"--quantization {quantization}: .* quantized already, to int4"):
            ModelBundle(Checkpoint(stored), engine)
        return
    layer = layers_of(ModelBundle(Checkpoint(stored), engine).load_decoder(SINGLE_RANK))[1]
    quantized = {WeightKind.INT8: "int8", WeightKind.INT4: "int4"}
    found = [linear.product.operands.kind for linear in (layer.mixer.output, layer.mlp.down)]
    assert [quantized.get(kind, "float") for kind in found] == kinds


LAYER = "model.layers.1.mlp.down_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


def text(words: str) -> Tensor:
    return torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)


def state_with(offset: str) -> Tensor:
    return text(f'{{"blocksize": 64, "shape": [64, 96], "nested_blocksize": 256, "nested_offset": {offset}}}')


@pytest.mark.parametrize(
    ("name", "kind", "tensor", "words"),
    [
        ("fp8, blocks", "weight_scale_inv", torch.ones(3, 4), r"weight_scale_inv' has shape \[3, 4\]"),
        ("fp8, blocks", "weight_scale_inv", torch.ones(3), r"weight_scale_inv' has shape \[3\]"),
        ("fp8, blocks", "weight_scale_inv", torch.full((4, 4), torch.inf), "weight_scale_inv has values that aren't"),
        ("fp8, blocks", "weight_scale_inv", torch.ones(4, 4, dtype=torch.int32), "weight_scale_inv: is int32, not "),
        ("fp8, blocks", "weight_scale_inv", None, "weight: is float8_e4m3fn, not bfloat16"),
        ("fp8, blocks", "weight", torch.ones(64, 96), "weight: is float32, not float8_e4m3fn"),
        ("fp8, blocks", "weight", torch.ones(64, 97).to(torch.float8_e4m3fn), r"has shape \[64, 97\]"),
        ("fp8, blocks", "weight_zero_point", torch.ones(1), "no place for tensor"),
        ("awq", "qzeros", torch.ones(2, 8, dtype=torch.int32), r"qzeros' has shape \[2, 8\]"),
        ("awq", "scales", torch.full((3, 64), torch.nan), "scales has values that aren't finite"),
        ("awq", "scales", None, "scales' is missing"),
        ("awq", "g_idx", torch.zeros(96, dtype=torch.int32), "no place for tensor"),
        ("gptq", "qweight", torch.ones(12, 64), "qweight: is float32, not int32"),
        ("gptq", "g_idx", torch.full((96,), 3, dtype=torch.int32), "g_idx has groups from 3 to 3"),
        ("gptq", "g_idx", torch.full((96,), -1, dtype=torch.int32), "g_idx has groups from -1 to -1"),
        ("int-quantized", "weight", torch.ones(64, 96, dtype=torch.int16), "weight: is int16, not int8"),
        ("int-quantized", "weight_scale", torch.full((64, 1), torch.nan), "weight_scale has values that aren't finite"),
        ("int-quantized", "weight_scale", torch.ones(64, 2), r"weight_scale' has shape \[64, 2\]"),
        ("int-quantized, asymmetric", "weight_zero_point", torch.zeros(64, 2, dtype=torch.int8), r"shape \[64, 2\]"),
        ("nvfp4-pack-quantized", "weight_global_scale", torch.zeros(1), "weight_scale has values that aren't finite"),
        ("nvfp4-pack-quantized", "weight_global_scale", torch.ones(2), r"weight_global_scale' has shape \[2\]"),
        ("nvfp4-pack-quantized", "weight_global_scale", None, "weight_global_scale' is missing"),
        ("nvfp4-pack-quantized", "weight_packed", torch.zeros(64, 47, dtype=torch.uint8), r"shape \[64, 47\]"),
        ("mxfp4-pack-quantized", "weight_scale", torch.full((64, 3), 255, dtype=torch.uint8), "aren't finite"),
        ("nvfp4-pack-quantized", "weight_global_scale", torch.full((1,), torch.inf), "weight_global_scale has values"),
        ("nvfp4-pack-quantized", "weight_global_scale", torch.full((1,), torch.nan), "weight_global_scale has values"),
        ("modelopt", "weight_scale_2", torch.tensor(torch.inf), "weight_scale_2 has values that aren't finite"),
        ("bitsandbytes nf4", "weight", torch.zeros(3071, 1, dtype=torch.uint8), r"has shape \[3071, 1\]"),
        ("bitsandbytes nf4", "weight.absmax", torch.ones(95), r"absmax' has shape \[95\]"),
        ("bitsandbytes nf4", "weight.quant_map", torch.full((16,), torch.nan), "quant_map has values that aren't"),
        ("bitsandbytes nf4", STATE, torch.zeros(10**5, dtype=torch.uint8), "must be a short text"),
        ("bitsandbytes nf4", STATE, torch.full((2000,), ord("["), dtype=torch.uint8), "isn't valid JSON"),
        ("bitsandbytes nf4", STATE, text('{"blocksize": 0, "shape": [64, 96]}'), "blocksize is 0, not 64 or 32"),
        (
            "bitsandbytes nf4",
            STATE,
            text('{"blocksize": 64, "shape": [96, 64]}'),
            r"shape is \[96, 64\], not \[64, 96\]",
        ),
        ("bitsandbytes nf4", STATE, text("[]"), "must be a JSON object"),
        ("bitsandbytes nf4", STATE, text('{"blocksize": 64.0, "shape": [64, 96]}'), "blocksize is 64.0, not 64 or 32"),
        ("bitsandbytes nf4, nested", STATE, state_with("true"), "nested_offset is True, not a number in floating"),
        ("bitsandbytes nf4, nested", STATE, state_with("1" * 400), r"nested_offset is 1+\.\.\.1+, not a number"),
        ("bitsandbytes nf4, nested", STATE, state_with("1e400"), "absmax has values that aren't finite"),
        ("bitsandbytes nf4, nested", "weight.nested_absmax", torch.ones(2), r"nested_absmax' has shape \[2\]"),
        ("bitsandbytes nf4, nested", "weight.nested_quant_map", torch.ones(16), r"nested_quant_map' has shape \[16\]"),
        ("bitsandbytes int8", "SCB", torch.full((64,), torch.inf), "SCB has values that aren't finite"),
        ("bitsandbytes int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format is 2; 0, for rows"),
        ("gptq, unlike layers", "qweight", torch.ones(11, 64, dtype=torch.int32), r"qweight' has shape \[11, 64\]"),
        ("pack-quantized, ordered", "weight_g_idx", torch.zeros(95, dtype=torch.int32), r"has shape \[95\]"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    tmp_path: Path, name: str, kind: str, tensor: Tensor | None, words: str
) -> None:
    one = FORMATS[name]
    stored, _ = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    weights = load_file(stored / "model.safetensors")
    weights.pop(f"{LAYER}.{kind}", None)
    save_file(weights | ({} if tensor is None else {f"{LAYER}.{kind}": tensor}), stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as error:
        load_adapter(stored).load_decoder(Checkpoint(stored), FP32, CPU)
    assert LAYER in str(error.value)


ENDLESS = 10**30


@pytest.mark.parametrize(
    ("section", "encode"),
    [
        (AWQ | {"group_size": ENDLESS}, awq(None)),
        (AWQ | {"group_size": 2**44}, awq(None)),
        (GPTQ | {"group_size": ENDLESS, "bits": 8}, gptq(8, None, version=1, symmetric=False)),
        ({"quant_method": "fp8", "weight_block_size": [ENDLESS, 24]}, fp8((10**6, 24), "weight_scale_inv")),
    ],
)
def test_groups_larger_than_a_layer_are_all_of_it(tmp_path: Path, section: dict[str, Any], encode: Encode) -> None:
    stored, dense = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, section, encode)
    assert_same_weights(*(load_adapter(dense).load_decoder(Checkpoint(one), FP32, CPU) for one in (stored, dense)))


def test_biases_of_zeros_that_the_model_does_not_have(tmp_path: Path) -> None:
    one = FORMATS["gptq"]
    stored, _ = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    weights = load_file(stored / "model.safetensors")
    for value in (0.0, 0.5):
        save_file(weights | {f"{LAYER}.bias": torch.full((64,), value)}, stored / "model.safetensors")
        if not value:
            load_adapter(stored).load_decoder(Checkpoint(stored), FP32, CPU)
            continue
        with pytest.raises(CheckpointError, match=f"no place for tensor '{LAYER}.bias'"):
            load_adapter(stored).load_decoder(Checkpoint(stored), FP32, CPU)


def test_a_quantized_head_is_dequantized(tmp_path: Path) -> None:
    one, source = FORMATS["gptq"], make_tiny(tmp_path / "source", "qwen2_5_vl")
    weights = load_file(source / "model.safetensors")
    tensors, value = one.encode("lm_head", weights.pop("lm_head.weight")) or ({}, None)
    assert value is not None
    head = {f"lm_head.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}
    stored, dense = quantized_pair(source, tmp_path, one.section, one.encode)
    for folder, added in ((stored, head), (dense, {"lm_head.weight": value})):
        kept = load_file(folder / "model.safetensors")
        del kept["lm_head.weight"]
        save_file(kept | added, folder / "model.safetensors")
    assert_same_weights(*(load_adapter(one).load_decoder(Checkpoint(one), FP32, CPU) for one in (stored, dense)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_moe", "llama"])
def test_scales_of_quantized_caches_are_left_out(tmp_path: Path, family: str) -> None:
    """As compressed-tensors names them, and as ModelOpt does."""
    one = FORMATS["fp8, tensors"]
    source = make_tiny(tmp_path / "source", BACKBONES.get(family, family))
    section = one.section | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    stored, dense = quantized_pair(source, tmp_path, section, one.encode)
    weights = load_file(stored / "model.safetensors")
    layers = {key.partition(".self_attn.")[0] for key in weights if ".self_attn.q_proj." in key and "visual" not in key}
    for layer in layers:
        for name in ("k_scale", "v_scale", "k_zero_point", "q_scale", "k_proj.k_scale", "v_proj.v_scale"):
            weights[f"{layer}.self_attn.{name}"] = torch.tensor(0.5)
        weights[f"{layer}.self_attn.v_proj.output_scale"] = torch.tensor(0.5)
    save_file(weights, stored / "model.safetensors")
    assert_same_weights(*(load_adapter(dense).load_decoder(Checkpoint(one), FP32, CPU) for one in (stored, dense)))


def test_words_of_gptq_may_be_filled_up(tmp_path: Path) -> None:
    """Of 70 inputs and 30 outputs, which don't fill them."""
    weight = torch.randn(30, 70)
    whole, value = gptq(4, 32, version=1, symmetric=False)("layer", weight) or ({}, weight)
    save_file({f"layer.{kind}": one.contiguous() for kind, one in whole.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    stored = StoredReader(Checkpoint(tmp_path), str, FP32, CPU).stored("layer", 30, 70)
    assert (stored.dequantized() - value).abs().max() < 1e-6
