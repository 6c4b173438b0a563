"""LoRAs of a batch's requests: each token gets what a decoder with its LoRA merged into the weights computes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.forward import Pool, Prompt, Running, Wanted, assert_close, layers_of, step
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import LoraSpec
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.parallel import SINGLE_RANK, Group, SingleRank
from triptych.layers.rope_config import LENGTH_AXIS
from triptych.layers.token_choice import TokenChoice

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORAS = {name: (LoraSpec("seen", 5, 2.0, layers), LoraSpec("heard", 3, 0.75, layers)) for name, layers in
         {"phi3": FUSED, "llama": SEPARATE}.items()}  # fmt: skip
LENGTHS = (9, 14, 6)


@pytest.fixture(scope="module", params=LORAS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with two LoRAs, in the folder of the backbone's name."""
    path = make_tiny(tmp_path_factory.mktemp("lora") / request.param, BACKBONES[request.param])
    weights, random = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in list(weights.items()):
        for lora in LORAS[request.param]:
            if name.endswith(tuple(f"{layer}.weight" for layer in lora.layers)):
                for kind, shape in {"A": (lora.rank, weight.shape[1]), "B": (weight.shape[0], lora.rank)}.items():
                    values = torch.randn(shape, generator=random) * 0.2
                    weights[name.replace(".weight", f".lora_{kind}.{lora.name}.weight")] = values
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(folder: Path, group: Group = SINGLE_RANK, **changes: Any) -> Decoder:
    adapter: Any = load_adapter(folder)
    adapter.decoder_config = replace(adapter.decoder_config, loras=LORAS[folder.name], **changes)
    return adapter.load_decoder(Checkpoint(folder), FP32, CPU, group)


def merged(folder: Path, to: Path, lora: LoraSpec | None) -> Decoder:
    """A decoder without LoRAs, or with one in its weights."""
    make_tiny(to, BACKBONES[folder.name])
    weights = load_file(folder / "model.safetensors")
    plain = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name, weight in list(plain.items()):
        if lora is None or not name.endswith(tuple(f"{layer}.weight" for layer in lora.layers)):
            continue
        down, up = (weights[name.replace(".weight", f".lora_{kind}.{lora.name}.weight")] for kind in "AB")
        plain[name] = weight + lora.scale * up @ down
    save_file(plain, to / "model.safetensors", metadata={"format": "pt"})
    return load_adapter(to).load_decoder(Checkpoint(to), FP32, CPU)


def running(length: int, number: int | None) -> Running:
    tokens, positions = torch.arange(length) + 3 * length, torch.arange(length, dtype=torch.float64).repeat(3, 1)
    positions[LENGTH_AXIS] = 0
    return Running(Prompt(tokens, positions, torch.arange(0), torch.zeros(0, 96)), lora=number)


def whole(decoder: Decoder, numbers: Sequence[int | None], logits: Wanted = "all") -> Tensor:
    """Logits of prompts of all ``LENGTHS`` in one step, with these LoRAs."""
    requests = [running(length, number) for length, number in zip(LENGTHS, numbers, strict=True)]
    return step(Pool(decoder), [(one, one.left) for one in requests], logits)


@pytest.mark.parametrize("numbers", [(0, None, 1), (1, 0, 0), (None, None, 1), (1, 1, 1)])
def test_each_request_has_its_own(folder: Path, tmp_path: Path, numbers: tuple[int | None, ...]) -> None:
    """In steps of whole prompts, of chunks, and where only some tokens go through the last layer."""
    decoder, logits = load(folder), []
    for length, number in zip(LENGTHS, numbers, strict=True):
        lora = None if number is None else LORAS[folder.name][number]
        reference = merged(folder, tmp_path / f"{number} {length}" / folder.name, lora)
        logits.append(step(Pool(reference), [(running(length, None), length)]))
    expected = torch.cat(logits)
    assert_close(whole(decoder, numbers), expected, 1e-4)
    assert_close(whole(decoder, numbers, "odd"), expected[1::2], 1e-4)
    pool, requests = Pool(decoder), [running(*pair) for pair in zip(LENGTHS, numbers, strict=True)]
    chunks: list[list[Tensor]] = [[] for _ in LENGTHS]
    while any(not one.finished for one in requests):
        work = [(number, min(4, one.left)) for number, one in enumerate(requests) if one.left]
        found = step(pool, [(requests[number], count) for number, count in work]).split([count for _, count in work])
        for (number, _), part in zip(work, found, strict=True):
            chunks[number].append(part)
    assert_close(torch.cat([part for parts in chunks for part in parts]), expected, 1e-4)


def test_requests_without_one_are_as_without_the_others(folder: Path, tmp_path: Path) -> None:
    """To the last bit, whether the step's layers run in compiled calls or, since another request has a LoRA, not."""
    plain, decoder = merged(folder, tmp_path / folder.name, None), load(folder)
    expected = whole(plain, [None] * 3)
    assert torch.equal(whole(decoder, [None] * 3), expected)
    assert torch.equal(whole(decoder, [None, None, 1])[: sum(LENGTHS[:2])], expected[: sum(LENGTHS[:2])])


def test_without_one_layers_run_in_compiled_calls(folder: Path, tmp_path: Path) -> None:
    plain, decoder = merged(folder, tmp_path / folder.name, None), load(folder)
    assert (decoder.run_layers is None) == (plain.run_layers is None)


def test_ranks_have_their_parts(folder: Path) -> None:
    tokens = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    loras = TokenChoice([None, 1, 0, 1])

    def products(rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Gates and factors, and the MLP's output, which ranks add up."""
        group = SingleRank()
        group.rank, group.size = rank, size
        mlp = layers_of(load(folder, group))[0].mlp
        mlp = mlp.module if size > 1 else mlp
        return mlp.gate_up(tokens, loras), mlp(tokens, loras)

    (gate_up, output), first, second = products(0, 1), products(0, 2), products(1, 2)
    parts = [torch.cat(pair, 1) for pair in zip(first[0].chunk(2, 1), second[0].chunk(2, 1), strict=True)]
    torch.testing.assert_close(torch.cat(parts, 1), gate_up)
    torch.testing.assert_close(first[1] + second[1], output)


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    specs = LORAS[folder.name]
    with pytest.raises(CheckpointError, match=r"lora_A\.other\.weight' is missing"):
        adapter: Any = load_adapter(folder)
        adapter.decoder_config = replace(adapter.decoder_config, loras=(*specs, replace(specs[0], name="other")))
        adapter.load_decoder(Checkpoint(folder), FP32, CPU)
    with pytest.raises(CheckpointError, match=r"'seen' lacks .*down_proj'; a LoRA is served if it has all layers"):
        adapter.decoder_config = replace(
            adapter.decoder_config, loras=(replace(specs[0], layers=specs[0].layers[:-1]),)
        )
        adapter.load_decoder(Checkpoint(folder), FP32, CPU)
    with pytest.raises(CheckpointError, match="attention and dense MLPs alone"):
        replace(load_adapter(make_tiny(tmp_path, "qwen3_moe")).decoder_config, loras=specs)


def test_rows() -> None:
    batch = TokenChoice([None, 2, 0, 2])
    assert [(number, None if rows is None else rows.tolist()) for number, rows in batch.rows] == [(0, [2]), (2, [1, 3])]
    assert batch.of_tokens(torch.tensor([1, 3])) == TokenChoice([2, 2])
    assert TokenChoice([2, 2]).rows == [(2, None)]
    assert batch.of_tokens(torch.tensor([0])) is None
    assert TokenChoice.of([None, None]) is None
