"""InternLM2, which transformers lacks, against its formulas written out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.forward import Pool, Prompt, Running, assert_close, layers_of, step
from tests.support.published_files import make_original_internvl
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.parallel import SingleRank

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
TOKENS = torch.arange(3, 43)
HEADS, KV_HEADS, DIM, HIDDEN, WIDTH, VOCABULARY = 6, 2, 20, 96, 104, 264
CONFIG = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": WIDTH,
    "hidden_act": "silu",
    "bias": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    found = {"model.tok_embeddings.weight": random(VOCABULARY, HIDDEN), "output.weight": random(VOCABULARY, HIDDEN)}
    found["model.norm.weight"] = 1 + random(HIDDEN)
    for layer in range(3):
        fused = (HEADS + 2 * KV_HEADS) * DIM
        shapes = {"attention.wqkv": (fused, HIDDEN), "attention.wo": (HIDDEN, HEADS * DIM)}
        shapes |= {f"feed_forward.{name}": (WIDTH, HIDDEN) for name in ("w1", "w3")}
        shapes["feed_forward.w2"] = (HIDDEN, WIDTH)
        found |= {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        found |= {
            f"model.layers.{layer}.attention.{name}.bias": random(shapes[f"attention.{name}"][0])
            for name in ("wqkv", "wo")
        }
        found |= {f"model.layers.{layer}.{name}.weight": 1 + random(HIDDEN) for name in ("attention_norm", "ffn_norm")}
        found[f"model.layers.{layer}.attention.rotary_emb.inv_freq"] = torch.ones(DIM // 2)
        found[f"model.layers.{layer}.attention.k_scale"] = torch.ones(1)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    path = tmp_path_factory.mktemp("internlm2")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, path / "model.safetensors")
    return path


def written_out(weights: dict[str, Tensor]) -> Tensor:
    """Logits [T, vocab] of ``TOKENS``."""
    stream = weights["model.tok_embeddings.weight"][TOKENS]
    for layer in range(3):
        own = {name.split(".", 3)[3]: one for name, one in weights.items() if name.startswith(f"model.layers.{layer}.")}
        fused = (
            normed(stream, own["attention_norm.weight"]) @ own["attention.wqkv.weight"].T + own["attention.wqkv.bias"]
        )
        by_kv_head = fused.view(len(TOKENS), KV_HEADS, HEADS // KV_HEADS + 2, DIM)
        heads = []
        for kv_head in range(KV_HEADS):
            key, value = rotated(by_kv_head[:, kv_head, -2]), by_kv_head[:, kv_head, -1]
            for query in by_kv_head[:, kv_head, :-2].unbind(1):
                scores = rotated(query) @ key.T * DIM**-0.5
                later = torch.ones_like(scores).triu(1).bool()
                heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value)
        stream = stream + torch.cat(heads, dim=1) @ own["attention.wo.weight"].T + own["attention.wo.bias"]
        inputs = normed(stream, own["ffn_norm.weight"])
        gate, up = (inputs @ own[f"feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        stream = stream + (gate * gate.sigmoid() * up) @ own["feed_forward.w2.weight"].T
    return normed(stream, weights["model.norm.weight"]) @ weights["output.weight"].T


def normed(values: Tensor, weight: Tensor) -> Tensor:
    return values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(head: Tensor) -> Tensor:
    """Value i of [T, d] with value i + d / 2, as complex numbers."""
    turns = torch.arange(len(head))[:, None] * 1e6 ** (-2 * torch.arange(DIM // 2) / DIM)
    turned = torch.complex(*head.chunk(2, dim=1)) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((turned.real, turned.imag), dim=1)


@pytest.mark.parametrize("chunk", [7, len(TOKENS)])
def test_logits(folder: Path, weights: dict[str, Tensor], chunk: int) -> None:
    expected = written_out(weights)
    assert len(set(expected.argmax(-1).tolist())) > 10
    pool = Pool(load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU))
    positions = torch.arange(len(TOKENS), dtype=torch.float64).expand(3, -1)
    running = Running(Prompt(TOKENS, positions, torch.arange(0), torch.zeros(0, HIDDEN)))
    found = [step(pool, [(running, min(chunk, running.left))]) for _ in range(0, len(TOKENS), chunk)]
    assert_close(torch.cat(found), expected, 1e-4)


def test_ranks_have_their_parts(folder: Path) -> None:
    def heads(rank: int, size: int) -> list[Tensor]:
        group = SingleRank()
        group.rank, group.size = rank, size
        mixer: Any = layers_of(load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU, group))[0].mixer
        inputs = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
        return list(mixer.qkv(inputs).split([count * DIM for count in mixer.head_counts], dim=1))

    for whole, *parts in zip(heads(0, 1), heads(0, 2), heads(1, 2), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_other_names_are_errors(folder: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights | {"model.layers.0.attention.wk.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for tensor 'model\.layers\.0\.attention\.wk\.weight'"):
        load_adapter(tmp_path).load_decoder(Checkpoint(tmp_path), FP32, CPU)


def test_in_original_files_of_internvl(folder: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """The same decoder, of a model whose embeddings and head are named as InternLM2's."""
    original = make_original_internvl(tmp_path, text=BACKBONES["llama"], llm_config=CONFIG)
    others = load_file(original / "model.safetensors")
    others = {name: one for name, one in others.items() if not name.startswith("language_model.")}
    save_file(others | {f"language_model.{name}": one for name, one in weights.items()}, original / "model.safetensors")
    adapter, checkpoint = load_adapter(original), Checkpoint(original)
    assert len(adapter.encoder_keys(checkpoint.tensors)) == len(others)
    adapter.load_encoder(checkpoint, FP32, CPU)
    ours, alone = (load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU) for path in (original, folder))
    pairs = list(zip(ours.named_parameters(), alone.named_parameters(), strict=True))
    assert all(name == other and torch.equal(one, same) for (name, one), (other, same) in pairs)
