"""Latent attention: what its cache holds, on each rank and in each format, and its heads' projections."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.forward import PAGE_SIZE, Pool, Prompt, Running, layers_of, step
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import ConfigError
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import bytes_per_token
from triptych.layers.compiled_layer import MultiplyHeads, compiled
from triptych.layers.decoder import Decoder
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS, WeightFormat
from triptych.layers.parallel import SINGLE_RANK, Group, SingleRank
from triptych.layers.specs import GatedMLPSpec, MLASpec, MoESpec
from triptych.models.registry import backbone_of

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
TOKENS = torch.arange(3, 43)
LATENT, ROTATED = 40, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("deepseek"), BACKBONES["deepseek_v3"])


def load(folder: Path, weights: WeightFormat = FP32, group: Group = SINGLE_RANK) -> Decoder:
    return load_adapter(folder).load_decoder(Checkpoint(folder), weights, CPU, group)


def attended(decoder: Decoder, dtype: torch.dtype = torch.float32, chunk: int = len(TOKENS)) -> tuple[Tensor, Tensor]:
    """What the first layer's attention yields, [T, heads * value_dim], and what it leaves in the cache. Later layers
    have experts, and would choose others after the slightest change."""
    mixer: Any = layers_of(decoder)[0].mixer
    found: list[Tensor] = []
    handle = mixer.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    positions = torch.arange(len(TOKENS), dtype=torch.float64).expand(3, -1)
    pool, running = Pool(decoder, dtype=dtype), Running(Prompt(TOKENS, positions, torch.arange(0), torch.zeros(0, 96)))
    while running.left:
        step(pool, [(running, min(chunk, running.left))])
    handle.remove()
    return torch.cat(found), pool.cache.layers[0][0][: len(TOKENS) // PAGE_SIZE]


def test_kimi_k2_is_described() -> None:
    """As published: its layers are DeepSeek-V3's, but transformers doesn't know its name."""
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
    sizes = {"vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64}
    latents = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    experts: dict[str, Any] = {
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 1,
    }
    experts |= {"topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "n_shared_experts": 1}
    text: dict[str, Any] = {
        **sizes,
        **latents,
        **experts,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "rope_theta": 50_000.0,
    }
    text |= {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}, "max_position_embeddings": 131072}
    config = backbone_of({"model_type": "kimi_k2"}).decoder_config(text, tie_embeddings=False)
    dense, *others = config.layers
    assert isinstance(dense.ffn, GatedMLPSpec)
    assert all(isinstance(layer.ffn, MoESpec) and layer.ffn.routing.groups is None for layer in others)
    assert bytes_per_token(config.cache_specs(cache_format(torch.float16))) == 61 * 576 * 2
    assert isinstance(dense.mixer, MLASpec)
    assert dense.mixer.scale == pytest.approx(192**-0.5 * yarn_get_mscale(32.0, 1.0) ** 2)


def test_a_token_leaves_one_vector(folder: Path) -> None:
    config = load_adapter(folder).decoder_config
    for size in (1, 2):
        for spec in config.shard(size).cache_specs(cache_format(torch.float16)):
            assert (spec.heads, spec.dims, spec.token_bytes) == (1, (LATENT + ROTATED,), 2 * (LATENT + ROTATED))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.int8, 0.02)], ids=str
)
def test_caches(folder: Path, dtype: torch.dtype, bound: float) -> None:
    """In chunks as whole, to the bit, and near what a cache in float32 gives."""
    decoder = load(folder)
    (exact, _), (found, kept) = attended(decoder), attended(decoder, dtype)
    assert (found - exact).norm() < bound * exact.norm()
    assert torch.equal(found, exact) == (dtype == torch.float32)
    in_chunks, kept_of_chunks = attended(decoder, dtype, chunk=7)
    torch.testing.assert_close(in_chunks, found)
    assert torch.equal(kept_of_chunks, kept)
    mixer: Any = layers_of(decoder)[0].mixer
    assert mixer.to_latent.in_one_call is None or torch.equal(in_chunks, found)


@pytest.mark.parametrize(("name", "bound"), [("float16", 2e-3), ("bfloat16", 0.03), ("int8", 0.05), ("int4", 0.3)])
def test_weight_formats(folder: Path, name: str, bound: float) -> None:
    exact, _ = attended(load(folder))
    found, _ = attended(load(folder, (WEIGHT_FORMATS | QUANTIZED_FORMATS)[name]))
    assert 0 < (found - exact).norm() < bound * exact.norm()


def test_ranks_divide_heads_and_share_latents(folder: Path) -> None:
    """Each rank's output is that of its heads, and its cache is the others'."""
    whole, parts, caches = attended(load(folder)), [], []
    for rank in range(2):
        group = SingleRank()
        group.rank, group.size = rank, 2
        found, kept = attended(load(folder, group=group))
        parts.append(found)
        caches.append(kept)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[0])
    assert all(torch.equal(kept, whole[1]) for kept in caches)


def test_heads_that_cannot_be_divided_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="query heads, of which there are 6"):
        load_adapter(folder).decoder_config.shard(4)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_heads_in_one_call_equal_each_by_itself(name: str) -> None:
    """Whatever is between tokens and heads."""
    products = [compiled(WEIGHT_FORMATS[name].linear(torch.randn(18, LATENT), None, CPU)) for _ in range(3)]
    there = [product for product in products if product is not None]
    if len(there) < len(products):
        pytest.skip("there are no compiled kernels")
    values = torch.randn(5, 4, LATENT + 3)[:, 1:, :LATENT]
    expected = torch.stack([product(values[:, head]) for head, product in enumerate(there)])
    assert torch.equal(MultiplyHeads(there)(values), expected)


@pytest.mark.parametrize("tokens", [4, 32, 250])
def test_heads_of_which_one_has_a_large_weight(tokens: int) -> None:
    """Which decides, where there is AMX, by which product a head is multiplied."""
    weights = torch.randn(3, 32, 64)
    weights[0, 7, 9] = 200
    products = [compiled(WEIGHT_FORMATS["float16"].linear(weight, None, CPU)) for weight in weights]
    there = [product for product in products if product is not None]
    if len(there) < len(products):
        pytest.skip("there are no compiled kernels")
    values = torch.randn(tokens, 3, 64)
    expected = torch.stack([product(values[:, head]) for head, product in enumerate(there)])
    assert torch.equal(MultiplyHeads(there)(values), expected)
