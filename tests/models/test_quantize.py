"""Checkpoints with 4-bit weights: the copy that ``triptych quantize`` writes is what quantizing at load makes, and
damaged ones are refused by name."""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import DENSE, edit_config, make_checkpoint
from tests.support.forward import layers_of
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.errors import CheckpointError, ConfigError
from triptych.layers import int4
from triptych.layers.decoder import Decoder
from triptych.layers.devices import weight_format
from triptych.layers.grouped_weight import quantize_groups
from triptych.layers.linear import QUANTIZED_FORMATS, PackedLinear, PlainFormat
from triptych.layers.parallel import SINGLE_RANK, Group, SingleRank
from triptych.layers.products import CompiledProduct, WeightKind, Zeros
from triptych.layers.stored.pack_quantized import GroupQuantization
from triptych.layers.stored.reader import StoredReader
from triptych.layers.stored.registry import read_formats
from triptych.models.quantize import quantize_checkpoint
from triptych.server.model_bundle import ModelBundle

SYMMETRIC = GroupQuantization(32, has_zeros=False)
WIDE = replace(DENSE, layers=2, intermediate=128, deepstack=(0,))
WHOLE = {"intermediate_size": 160, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
"""Whole groups."""
LAYER = "model.language_model.layers.1"
VLLM = os.environ.get("TRIPTYCH_TEST_VLLM", "")
DECOMPRESS = """
import json, sys
from pathlib import Path
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

folder, out = map(Path, sys.argv[1:])
config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
[scheme] = config.config_groups.values()
compressor, found = BaseCompressor.get_value_from_registry(config.format), {}
tensors = load_file(folder / "model.safetensors")
for name in [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")]:
    own = {"weight" + key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
    found[name] = compressor.decompress(own, scheme)["weight"].contiguous()
save_file(found, out)
"""


@dataclass
class Rank(SingleRank):
    rank: int = 0
    size: int = 2


def load(folder: Path, quantization: str = "none", group: Group = SINGLE_RANK) -> Decoder:
    return ModelBundle(Checkpoint(folder), EngineConfig(device="cpu", quantization=quantization)).load_decoder(group)


def quantized(source: Path, quantization: GroupQuantization = SYMMETRIC) -> Path:
    target = source.with_name(source.name + " quantized")
    assert list(quantize_checkpoint(source, target, quantization))
    return target


def packed_weights(decoder: Decoder) -> list[tuple[int, Tensor]]:
    """Kind and panels of all packed layers."""
    products = [module.product for module in decoder.modules() if isinstance(module, PackedLinear)]
    assert all(isinstance(product, CompiledProduct) for product in products)
    return [(product.operands.kind, product.panels) for product in products]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized checkpoint. Tests copy it before they change it."""
    return quantized(make_checkpoint(tmp_path_factory.mktemp("quantize") / "wide", sizes=WIDE))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: make_checkpoint(path, sharded=True, dtype=torch.bfloat16), id="qwen3_vl, bfloat16"),
        pytest.param(lambda path: make_checkpoint(path, layout="saved", dtype=torch.float16), id="qwen3_vl, saved"),
        pytest.param(lambda path: make_tiny(path, "qwen2"), id="qwen2, biases"),
        pytest.param(lambda path: make_tiny(path, "qwen2_5_vl"), id="qwen2_5_vl"),
        pytest.param(lambda path: make_tiny(path, BACKBONES["phi3"], config=WHOLE), id="phi3, fused"),
        pytest.param(lambda path: make_tiny(path, BACKBONES["glm4"], config=WHOLE), id="glm4, reordered"),
        pytest.param(lambda path: make_tiny(path, BACKBONES["qwen2_moe"], config=WHOLE), id="experts"),
    ],
)
def test_the_copy_is_what_quantizing_at_load_in_such_groups_makes(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "quantize_with_offsets", quantize_groups)
    monkeypatch.setitem(QUANTIZED_FORMATS, "int4", replace(QUANTIZED_FORMATS["int4"], pack_sensitive=None))
    source = make(tmp_path / "source")
    target = quantized(source)
    expected, found = packed_weights(load(source, "int4")), packed_weights(load(target))
    assert WeightKind.INT4 in {kind for kind, _ in found}
    for (kind, panels), (other_kind, others) in zip(found, expected, strict=True):
        assert kind == other_kind
        assert torch.equal(panels, others)
    before, after = ({file.name for file in path.iterdir()} for path in (source, target))
    assert before == after
    bundles = [ModelBundle(Checkpoint(path), EngineConfig(device="cpu")) for path in (source, target)]
    assert bundles[0].identity != bundles[1].identity
    assert bundles[1].kv_layout.weight_dtype == "int4"
    assert bundles[1].weights.high_precision_dtype == bundles[0].weights.high_precision_dtype
    if bundles[1].family.takes_media:
        bundles[1].load_encoder()


@pytest.mark.parametrize("quantization", [GroupQuantization(64, has_zeros=True), GroupQuantization(32, has_zeros=True)])
def test_asymmetric_weights_are_loaded(tmp_path: Path, quantization: GroupQuantization) -> None:
    source = make_checkpoint(tmp_path / "source", sizes=WIDE)
    target = quantized(source, quantization)
    down = layers_of(load(target))[1].mlp.down
    assert (down.product.operands.group, down.product.operands.zeros) == (quantization.group, Zeros.OWN)
    weight = load_file(source / "model.safetensors")[f"{LAYER}.mlp.down_proj.weight"]
    activations = torch.randn(3, 128)
    expected = activations @ weight.T
    assert (down(activations) - expected).norm() < 0.1 * expected.norm()
    assert len(load_file(target / "model.safetensors")[f"{LAYER}.mlp.down_proj.weight_zero_point"]) == 8


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="TRIPTYCH_TEST_VLLM doesn't say where vLLM's command is")
@pytest.mark.parametrize("quantization", [SYMMETRIC, GroupQuantization(64, has_zeros=True)], ids=str)
def test_the_published_library_decodes_the_same_weights(tmp_path: Path, quantization: GroupQuantization) -> None:
    """compressed-tensors, of vLLM's environment, by the copy's own ``config.json``."""
    source = make_checkpoint(tmp_path / "source", sizes=WIDE)
    target, decoded = quantized(source, quantization), tmp_path / "decoded.safetensors"
    python = Path(VLLM).with_name("python")
    subprocess.run([python, "-c", DECOMPRESS, target, decoded], check=True, timeout=120)
    theirs = load_file(decoded)
    reader = StoredReader(Checkpoint(target), str, PlainFormat(torch.float32), torch.device("cpu"))
    originals = load_file(source / "model.safetensors")
    assert len(theirs) == 7 * WIDE.layers
    for name, weight in theirs.items():
        original = originals[name]
        loaded = reader.stored(name.removesuffix(".weight"), original.shape[0], original.shape[1])
        assert torch.equal(weight, loaded.dequantized())
        assert (weight - original).norm() < 0.1 * original.norm()


def test_ranks_have_parts_of_the_whole(folder: Path, tmp_path: Path) -> None:
    whole, hidden, attended = layers_of(load(folder))[1], torch.randn(3, 64), torch.randn(3, 64)
    heads = whole.mixer.qkv(hidden).unflatten(1, (8, 16))  # 4 of queries, 2 of keys, 2 of values
    for rank in (0, 1):
        part = layers_of(load(folder, group=Rank(rank)))[1]
        own = heads[:, [2 * rank, 2 * rank + 1, 4 + rank, 6 + rank]].flatten(1)
        assert torch.equal(part.mixer.qkv(hidden), own)
        columns = slice(32 * rank, 32 * (rank + 1))
        alone = torch.zeros(3, 64)
        alone[:, columns] = attended[:, columns]
        output = part.mixer.output.module
        assert torch.equal(output(attended[:, columns]), whole.mixer.output(alone))
    narrow = quantized(make_checkpoint(tmp_path / "narrow"))
    with pytest.raises(ConfigError, match=r"inputs, 0 to 48 of 96, aren't whole groups of 32 .*--tensor-parallel-size"):
        load(narrow, group=Rank(0))


def test_what_stays_as_it_is_is_listed(tmp_path: Path) -> None:
    """Routers, gates, layers that aren't served and parts that aren't read; not the experts that have a layer's
    number."""
    unread = {"glm4_moe": "model.layers.3.eh_proj.weight", "gemma4-e": "model.layers.5.self_attn.k_proj.weight"}
    for name in ("qwen2_moe", "glm4_moe", "gemma4-e"):
        sizes = WHOLE | {"head_dim": 32, "global_head_dim": 16} if name == "gemma4-e" else WHOLE
        source = make_tiny(tmp_path / name, BACKBONES[name], config=sizes)
        if name in unread:
            file = source / "model.safetensors"
            save_file(load_file(file) | {unread[name]: torch.ones(96, 192)}, file)
        config = json.loads((quantized(source) / "config.json").read_text())
        assert (
            config["quantization_config"]["ignore"]
            == {
                "qwen2_moe": ["lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.mlp\.shared_expert_gate$"],
                "glm4_moe": ["lm_head", r"re:(.*\.)?layers\.3\..*", r"re:.*\.mlp\.gate$"],
                "gemma4-e": ["lm_head", r"re:(.*\.)?layers\.5\.self_attn\.k_proj\..*"]
                + [rf"re:.*\.per_layer_{kind}$" for kind in ("input_gate", "model_projection", "projection")],
            }[name]
        )


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_at_load_values_and_down_projections_have_8_bits(tmp_path: Path, name: str) -> None:
    source = make_tiny(tmp_path / "source", name if name == "qwen2" else BACKBONES[name])
    kinds: dict[str, set[WeightKind]] = defaultdict(set)
    for path, module in load(source, "int4").named_modules():
        if isinstance(module, PackedLinear) and isinstance(module.product, CompiledProduct):
            kinds[path.rpartition(".")[2]].add(WeightKind(module.product.operands.kind))
    assert kinds["qkv"] == kinds["down"] == {WeightKind.INT8}
    assert kinds["output"] == kinds["gate_up"] == {WeightKind.INT4}


def test_settings_that_contradict_the_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    tensors, stored = checkpoint.tensors, read_formats(checkpoint.quantization, checkpoint.tensors)
    for quantization in ("none", "int4"):
        weights = weight_format(EngineConfig(quantization=quantization), torch.device("cpu"), tensors, stored)
        assert weights.linear_dtype == "int4"
    with pytest.raises(ConfigError, match="--quantization int8: the checkpoint's weights are quantized already"):
        load(folder, "int8")
    assert weight_format(EngineConfig(), torch.device("cuda", 0), tensors, stored) == PlainFormat(torch.float32)


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy with other tensors."""
    to.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def test_a_layer_that_is_not_quantized_stays_so(folder: Path, tmp_path: Path) -> None:
    weight = torch.randn(64, 64)

    def dense(tensors: dict[str, Tensor]) -> None:
        for name in ("packed", "scale", "shape"):
            del tensors[f"{LAYER}.self_attn.o_proj.weight_{name}"]
        tensors[f"{LAYER}.self_attn.o_proj.weight"] = weight

    output = layers_of(load(changed(folder, tmp_path / "dense", dense)))[1].mixer.output
    assert output.product.operands.kind in {WeightKind.HALF, WeightKind.SPLIT_HALF}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mlp.down_proj.weight_packed", torch.zeros(64, 15, dtype=torch.int32), r"shape \[64, 15\].* \[64, 16\]"),
        ("mlp.down_proj.weight_packed", torch.zeros(64, 16), "weight_packed: is float32, not int32"),
        ("mlp.down_proj.weight_scale", torch.zeros(64, 2), r"shape \[64, 2\]"),
        ("mlp.down_proj.weight_scale", torch.zeros(64, 4, dtype=torch.int32), "weight_scale: is int32"),
        ("mlp.down_proj.weight_scale", torch.full((64, 4), torch.nan), "weight_scale has values"),
        ("mlp.down_proj.weight_shape", torch.tensor([64, 127]), r"weight_shape is \[64, 127\]"),
        ("mlp.down_proj.weight_shape", torch.tensor([64, 128, 1]), r"shape \[3\]"),
        ("mlp.down_proj.weight_scale", None, "weight_scale' is missing"),
        ("mlp.down_proj.weight_packed", None, "weight' is missing"),
        ("mlp.down_proj.weight_zero_point", torch.zeros(8, 4, dtype=torch.int32), "no place for tensor"),
        ("mlp.down_proj.weight_g_idx", torch.zeros(128, dtype=torch.int32), "no place for tensor"),
        ("self_attn.k_proj.weight_packed", None, "k_proj.weight' is missing"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    folder: Path, tmp_path: Path, name: str, value: Tensor | None, words: str
) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[f"{LAYER}.{name}"]
        else:
            tensors[f"{LAYER}.{name}"] = value

    with pytest.raises(CheckpointError, match=words) as error:
        load(changed(folder, tmp_path / "damaged", damage))
    assert LAYER in str(error.value)


def test_missing_zero_points_and_another_group_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "copy", lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for changes, words in (({"symmetric": False}, "weight_zero_point' is missing"), ({"group_size": 64}, "has shape")):
        with_changes = config | {"quantization_config": json.loads(json.dumps(config["quantization_config"]))}
        with_changes["quantization_config"]["config_groups"]["group_0"]["weights"] = weights | changes
        (copy / "config.json").write_text(json.dumps(with_changes))
        with pytest.raises(CheckpointError, match=words):
            load(copy)
    edit_config(copy, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match="quant_method 'hqq' is not served"):
        load(copy)


def test_what_cannot_be_quantized_is_refused_and_nothing_is_left(tmp_path: Path, folder: Path) -> None:
    def refused(source: Path, error: type[Exception], words: str, target: Path = tmp_path / "out") -> None:
        with pytest.raises(error, match=words):
            list(quantize_checkpoint(source, target, SYMMETRIC))
        assert not list(tmp_path.glob(".out*"))

    refused(folder, CheckpointError, "quantized already")
    refused(make_checkpoint(tmp_path / "stacked", moe=True), CheckpointError, "weights of all experts")
    refused(make_tiny(tmp_path / "moe", "qwen3_moe"), CheckpointError, r"\[64, 48\], which isn't in whole groups of 32")
    source = make_checkpoint(tmp_path / "dense")
    refused(source, ConfigError, "exists", target=tmp_path)
    refused(source, ConfigError, "can't be written", target=source / "config.json" / "out")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{LAYER}.mlp.down_proj.weight"][3, 5] = torch.inf
    tensors[f"{LAYER}.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, source / "model.safetensors")
    refused(source, CheckpointError, "up_proj.weight' has values that aren't finite")
    assert not (tmp_path / "out").exists()
