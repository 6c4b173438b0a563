"""Second weights: tokens that have them get what a decoder with those weights alone computes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.engine_instances import generate
from tests.support.forward import Pool, Prompt, Running, assert_close, layers_of, step
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.engine.request import Request, make_request
from triptych.errors import CheckpointError, InvalidRequest
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import SECOND, SecondWeights
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.parallel import SINGLE_RANK, Group, SingleRank
from triptych.layers.token_choice import TokenChoice
from triptych.messages.work import PlacedItem
from triptych.types import Placement, Span

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "gate_proj", "up_proj",
          "down_proj")  # fmt: skip
SPEC = SecondWeights(
    fused=(("self_attn.seen_qkv", LAYERS[:3]),),
    renamed=(("self_attn.o_proj", "self_attn.seen_o"), ("mlp.", "seen_mlp.")),
    biased=("seen_qkv",),
)
LENGTHS = (9, 14)


def renamed(name: str) -> str:
    """The second weight's name, of a layer that is stored by itself."""
    for own, theirs in SPEC.renamed:
        name = name.replace(own, theirs)
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with second weights, of which queries, keys and values are stored as one and have a bias."""
    path = make_tiny(tmp_path_factory.mktemp("second") / "both", BACKBONES["llama"])
    weights = load_file(path / "model.safetensors")
    other = load_file(make_tiny(path.parent / "other", BACKBONES["llama"], seed=2) / "model.safetensors")
    for name, weight in other.items():
        if not name.endswith(tuple(f"{layer}.weight" for layer in LAYERS[3:])):
            continue
        weights[renamed(name)] = weight
    for layer in range(sum(name.endswith("q_proj.weight") for name in other)):
        stem = f"model.layers.{layer}.self_attn."
        parts = [other[f"{stem}{kind}_proj.weight"] for kind in "qkv"]
        weights[f"{stem}seen_qkv.weight"] = torch.cat(parts)
        weights[f"{stem}seen_qkv.bias"] = torch.linspace(-0.5, 0.5, sum(map(len, parts)))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(folder: Path, group: Group = SINGLE_RANK) -> Decoder:
    adapter: Any = load_adapter(folder)
    adapter.decoder_config = replace(adapter.decoder_config, second=SPEC)
    return adapter.load_decoder(Checkpoint(folder), FP32, CPU, group)


def alone(folder: Path, to: Path) -> Decoder:
    """A decoder that has the second weights as its own."""
    make_tiny(to, BACKBONES["llama"])
    stored, plain = load_file(folder / "model.safetensors"), load_file(to / "model.safetensors")
    for name in list(plain):
        if (found := stored.get(renamed(name))) is not None:
            plain[name] = found
        elif name.endswith(".bias"):  # the second weights have one of queries, keys and values alone
            del plain[name]
    for name in [one for one in stored if "seen_qkv" in one]:
        size = len(plain[name.rpartition("seen_qkv")[0] + "q_proj.weight"])
        rest = (len(stored[name]) - size) // 2
        for kind, part in zip("qkv", stored[name].split([size, rest, rest]), strict=True):
            plain[name.replace("seen_qkv", f"{kind}_proj")] = part.clone()
    save_file(plain, to / "model.safetensors", metadata={"format": "pt"})
    adapter: Any = load_adapter(to)
    config = adapter.decoder_config
    mixer = replace(config.layers[0].mixer, qkv_bias=True, output_bias=False)
    layer = replace(config.layers[0], mixer=mixer, ffn=replace(config.layers[0].ffn, bias=False))
    adapter.decoder_config = replace(config, layers=(layer,) * len(config.layers))
    return adapter.load_decoder(Checkpoint(to), FP32, CPU)


def running(length: int, number: int | None) -> Running:
    positions = torch.arange(length, dtype=torch.float64).repeat(3, 1)
    return Running(
        Prompt(torch.arange(length) + 3 * length, positions, torch.arange(0), torch.zeros(0, 96)), lora=number
    )


def logits(decoder: Decoder, numbers: Sequence[int | None]) -> list[Tensor]:
    requests = [running(length, number) for length, number in zip(LENGTHS, numbers, strict=True)]
    found = step(Pool(decoder), [(one, one.left) for one in requests])
    return list(found.split(list(LENGTHS)))


def test_tokens_have_their_own(folder: Path, tmp_path: Path) -> None:
    """All tokens of a step, those of one request, and none; without any, to the last bit as a plain decoder, whether
    the step's layers run in compiled calls or not."""
    decoder, second = load(folder), alone(folder, tmp_path / "second")
    plain = load_adapter(make_tiny(tmp_path / "plain", BACKBONES["llama"])).load_decoder(
        Checkpoint(tmp_path / "plain"), FP32, CPU
    )
    own, other = logits(plain, (None, None)), logits(second, (None, None))
    assert (decoder.run_layers is None) == (plain.run_layers is None)
    assert not torch.allclose(own[0], other[0], atol=0.01)
    for found, expected in zip(logits(decoder, (None, None)), own, strict=True):
        assert torch.equal(found, expected)
    mixed = logits(decoder, (SECOND, None))
    assert torch.equal(mixed[1], own[1])
    assert_close(mixed[0], other[0], 1e-4)
    for found, expected in zip(logits(decoder, (SECOND, SECOND)), other, strict=True):
        assert_close(found, expected, 1e-4)


def test_ranks_have_their_parts(folder: Path) -> None:
    tokens = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    choice = TokenChoice([None, SECOND, None, SECOND])

    def output(rank: int, size: int) -> Tensor:
        group = SingleRank()
        group.rank, group.size = rank, size
        mlp = layers_of(load(folder, group))[0].mlp
        return (mlp.module if size > 1 else mlp)(tokens, choice)

    torch.testing.assert_close(output(0, 2) + output(1, 2), output(0, 1))


def test_a_decoder_of_other_layers_is_refused(tmp_path: Path) -> None:
    config = load_adapter(make_tiny(tmp_path, "qwen3_moe")).decoder_config
    with pytest.raises(CheckpointError, match="attention and dense MLPs alone"):
        replace(config, second=SPEC)


def made(has_second_weights: bool, *spans: Span) -> Request:
    message = msgspec.structs.replace(generate("r", prompt=12), items=[PlacedItem("picture", Placement(spans), 8)])
    return make_request(message, [], 64, 264, has_second_weights=has_second_weights)


def test_tokens_of_a_request() -> None:
    """Of an item's spans, the first tokens, wherever a chunk begins and ends."""
    request = made(True, Span(2, 5, second=4), Span(8, 3, second=3))
    whole = [None, None, *[SECOND] * 4, None, None, *[SECOND] * 3, None, None, None]
    for start in range(12):
        for count in range(14 - start):
            assert request.weights_of(start, count) == whole[start : start + count]
    for has_any, span in ((False, Span(2, 5, second=1)), (True, Span(2, 5, second=6))):
        with pytest.raises(InvalidRequest, match="second weights"):
            made(has_any, span)
