"""What only Gemma 4 has: layers that read earlier ones' keys and values, and embeddings per layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import is_mapped, load_adapter, load_reference
from tests.support.forward import Pool, Prompt, Running, Wanted, layers_of, step
from tests.support.paged_cases import BATCHES, SHAPES, make_case
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.attention.compiled import paged_attention
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import bytes_per_token
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.specs import GatedMLPSpec
from triptych.models.backbones.gemma4 import GEMMA4
from triptych.models.text.adapter import TextAdapter

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG = BACKBONES["gemma4-e"].config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), BACKBONES["gemma4-e"])


def test_layers_without_a_cache_of_their_own_take_no_memory() -> None:
    """The last three layers read those of layers 2, 4 and 2, the last ones of their types."""
    config = TextAdapter(CONFIG).decoder_config
    assert [layer.cache_of for layer in config.layers] == [None] * 5 + [2, 4, 2]
    assert config.caches == (0, 1, 2, 3, 4, 2, 4, 2)
    specs = config.cache_specs(cache_format(torch.float32))
    assert [spec.dims[0] for spec in specs] == [20, 20, 24, 20, 20]
    assert bytes_per_token(specs) == 4 * 2 * 2 * (4 * 20 + 24)
    assert config.cache_groups.of_layer == (1, 1, 0, 1, 1)
    wide = [isinstance(layer.ffn, GatedMLPSpec) and layer.ffn.intermediate_size for layer in config.layers]
    assert wide == [104] * 5 + [208] * 3


def test_steps_have_room_for_embeddings_per_layer() -> None:
    config, without = (TextAdapter(CONFIG | more).decoder_config for more in ({}, {"hidden_size_per_layer_input": 0}))
    assert config.step_bytes(100, 1, 200) == without.step_bytes(100, 1, 200) + 4 * 3 * 100 * 8 * 12


def test_the_second_embedding_stays_mapped(folder: Path) -> None:
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU)
    assert decoder.per_layer is not None
    assert is_mapped(decoder.per_layer.table, folder / "model.safetensors")


def test_keys_and_values_that_are_not_read_may_be_stored(folder: Path, tmp_path: Path) -> None:
    """In layers that read another's. A norm of values has no weight anywhere."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights, file = load_file(folder / "model.safetensors"), tmp_path / "model.safetensors"
    unread = {f"model.layers.5.self_attn.{name}.weight": torch.ones(48, 96) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(weights | unread, file)
    adapter = load_adapter(tmp_path)
    adapter.load_decoder(Checkpoint(tmp_path), FP32, CPU)
    sizes = adapter.weight_bytes_by_stage(Checkpoint(tmp_path).tensors)
    assert sizes["decoder"] == sum(tensor.nbytes for tensor in weights.values())
    save_file(weights | {"model.layers.4.self_attn.v_norm.weight": torch.ones(20)}, file)
    with pytest.raises(CheckpointError, match=r"no place for tensor 'model\.layers\.4\.self_attn\.v_norm\.weight'"):
        adapter.load_decoder(Checkpoint(tmp_path), FP32, CPU)


def test_towers_are_not_served(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, BACKBONES["gemma4-31b"])
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"model.vision_tower.pooler.weight": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="belongs to no part of a text-only model"):
        load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU)


def test_both_spellings_describe_the_same_decoder(tmp_path: Path) -> None:
    """Without settings, too."""
    path = make_tiny(tmp_path, BACKBONES["gemma4-moe"], "saved")
    saved = json.loads((path / "config.json").read_text())
    assert "per_layer_config" in saved
    assert "global_head_dim" not in saved
    assert GEMMA4.describe(saved) == GEMMA4.describe(BACKBONES["gemma4-moe"].config)
    ropes = saved.pop("rope_parameters")
    assert GEMMA4.describe(saved) == GEMMA4.describe(saved | {"rope_parameters": ropes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers leaves no layer with keys and values of its own"),
        ({"num_kv_shared_layers": 900}, "num_kv_shared_layers leaves no layer"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be a number of layers"),
        (
            {"num_kv_shared_layers": 6},
            "num_kv_shared_layers: layer 2 has no earlier layer of the same type, full_attention",
        ),
        ({"per_layer_config": {"5": {"head_dim": 32}}}, "layer 5 has no earlier layer of the same type"),
        ({"per_layer_config": {"5": {"intermediate_size": 32}}}, "per_layer_config may only set"),
        ({"per_layer_config": {"5": 3}}, "per_layer_config may only set"),
        ({"per_layer_config": {"8": {}, "first": {}}}, r"per_layer_config has no layers \['8', 'first'\], of 8"),
        ({"per_layer_config": [3]}, "per_layer_config must be a dict"),
        ({"per_layer_config": {"5": {"head_dim": 10**9}}}, "heads of 1000000000 values"),
        ({"global_head_dim": "512"}, "global_head_dim must be a positive integer"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be a positive integer"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input 9 is less than vocab_size 264"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not served"),
        ({"enable_moe_block": True}, "num_experts must be a positive integer"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must be settings of full_attention and sliding_attention"),
    ],
)
def test_damaged_configs_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TextAdapter(CONFIG | changes)


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("batch", ["mixed", "decodes"])
def test_attention_without_new_keys(batch: str, by_kernel: bool) -> None:
    """It reads what another layer has written, to the same result, and writes nothing."""
    kernel = paged_attention() if by_kernel else None
    if by_kernel and kernel is None:
        pytest.skip("there are no compiled kernels")
    check_without_new_keys(CpuAttention(kernel), batch)


def test_attention_without_new_keys_by_triton() -> None:
    backend = pytest.importorskip("triptych.layers.attention.triton_backend", reason="Triton isn't installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs without a GPU")
    check_without_new_keys(backend.TritonAttention(num_processors=8), "mixed")


def check_without_new_keys(backend: Callable[..., torch.Tensor], batch: str) -> None:
    case = make_case(SHAPES[-1], *BATCHES[batch], torch.float32, torch.float32, CPU)
    assert case.value is not None
    expected = backend(case.query, case.key, case.value, *case.caches, case.batch)
    before = case.caches.clone()
    found = backend(case.query, case.key[:0], case.value[:0], *case.caches, case.batch)
    assert torch.equal(found, expected)
    assert torch.equal(case.caches.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("wanted", ["last", "none", "odd"])
def test_layers_without_a_cache_continue_only_with_needed_tokens(folder: Path, wanted: Wanted) -> None:
    """A prompt in two chunks beside a whole one. Each step wants more tokens than it has sequences, if every second
    one; then all continue."""
    decoder, expected = load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU), load_reference(folder)
    counts: list[int] = []
    for layer in layers_of(decoder)[5:]:
        layer.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    prompts = [torch.arange(3, 43), torch.arange(90, 115)]
    both = [
        Running(Prompt(ids, torch.arange(float(len(ids))).double().expand(3, -1), torch.arange(0), torch.zeros(0, 96)))
        for ids in prompts
    ]
    logits = [expected(ids[None]).logits[0] for ids in prompts]
    pool = Pool(decoder)
    found = [step(pool, [(both[0], 23)], wanted), step(pool, [(both[0], 17), (both[1], 25)], wanted)]
    theirs = [logits[0][:23], torch.cat((logits[0][23:], logits[1]))]
    ends: list[Any] = [[22], [16, 41]]
    for ours, one, end in zip(found, theirs, ends, strict=True):
        needed = {"last": one[end], "none": one[:0], "odd": one[1::2]}[wanted]
        assert ours.shape == needed.shape
        torch.testing.assert_close(ours, needed, atol=1e-4, rtol=0)
    assert counts == {"last": [1] * 3 + [2] * 3, "none": [], "odd": [23] * 3 + [42] * 3}[wanted]
