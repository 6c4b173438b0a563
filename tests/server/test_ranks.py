"""Decoders shared by real groups of processes, over gloo, against the whole decoder and against transformers."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import DENSE, MOE, edit_config, load_adapter, load_reference, make_checkpoint
from tests.support.forward import (
    PAGE_SIZE,
    Pool,
    Prompt,
    Running,
    assert_close,
    layers_of,
    make_prompt,
    random_input,
    reference_logits,
    step,
)
from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.config import EngineConfig, InstanceSpec, RankSizes
from triptych.engine.group import CacheSize, agree_on_size, gather_memory
from triptych.errors import CheckpointError, ConfigError, StartError
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import bytes_per_token
from triptych.layers.decoder import Decoder
from triptych.layers.linear import WEIGHT_FORMATS, PackedLinear, PlainFormat, PlainLinear
from triptych.layers.parallel import SINGLE_RANK, Group, ShardedDimension, SingleRank
from triptych.messages.channel import Channel
from triptych.server.build import build_instance
from triptych.server.model_bundle import ModelBundle
from triptych.server.ranks import ChildRanks
from triptych.topology import Role

CPU = torch.device("cpu")
FP32 = EngineConfig(dtype="float32", page_size=PAGE_SIZE, threads=1)
NUM_PAGES = 64
IMAGES = [random_input((1, 4, 6), 1), random_input((1, 8, 4), 3)]


@dataclass
class Rank(SingleRank):
    """One of several, alone: enough to load a shard."""

    rank: int = 0
    size: int = 2


def load(folder: Path, group: Group = SINGLE_RANK, engine: EngineConfig = FP32) -> Decoder:
    return ModelBundle(Checkpoint(folder), engine).load_decoder(group)


def load_plain(folder: Path, group: Group = SINGLE_RANK) -> Decoder:
    """A decoder whose linear layers have parameters to look at."""
    return load_adapter(folder).load_decoder(Checkpoint(folder), PlainFormat(torch.float32), CPU, group)


@contextmanager
def shared(
    folder: Path, size: int = 2, engine: EngineConfig = FP32, failures: list[StartError] | None = None
) -> Iterator[Pool]:
    """A pool whose decoder is rank 0's of a group that runs."""
    torch.set_num_threads(1)
    failed: list[StartError] = [] if failures is None else failures
    ranks = ChildRanks(str(folder), engine, size, failed.append)
    try:
        group = ranks.connect(CPU)
        decoder = load(folder, group, engine)
        with ranks.collective():
            gather_memory(group, CPU)
            agree_on_size(group, 1, CacheSize([NUM_PAGES], 0))
        pool = Pool(decoder, NUM_PAGES, decoder.dtype)
        pool.cache = ModelBundle(Checkpoint(folder), engine).make_cache(group, [NUM_PAGES], ranks.cache).own
        pool.decoder = ranks.broadcasting(decoder, group, decoder.dtype)  # type: ignore[assignment]
        yield pool
    finally:
        ranks.close()
    with suppress(FileNotFoundError):
        assert "triptych-kv" not in os.readlink(ranks.cache), "the shared cache lives as long as its tensors"
    if failures is None:
        assert failed == []


@dataclass(frozen=True)
class Case:
    """Two prompts of a checkpoint, one of them with images."""

    folder: Path
    prompts: list[Prompt]
    expected: list[Tensor]

    @classmethod
    def of(cls, folder: Path) -> "Case":
        adapter, reference = load_adapter(folder), load_reference(folder)
        rows = adapter.load_encoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], CPU).encode(IMAGES)
        prompts = [
            make_prompt(reference, list(b"look here"), IMAGES, rows, adapter.embedding_width),
            make_prompt(reference, list(b"words, and nothing but words"), [], [], adapter.embedding_width),
        ]
        expected = [reference_logits(reference, prompts[0], IMAGES), reference_logits(reference, prompts[1], [])]
        return cls(folder, prompts, expected)


def run(pool: Pool, prompts: list[Prompt]) -> list[Tensor]:
    """All logits of the prompts: chunks, and then single tokens, of both share steps; one step wants no logits."""
    sequences = [Running(prompt) for prompt in prompts]
    collected: list[list[Tensor]] = [[] for _ in prompts]
    for chunks in ((7, 3), (9, 20), *[(1, 1)] * 3):
        parts = step(pool, list(zip(sequences, chunks, strict=True))).split(chunks)
        for logits, part in zip(collected, parts, strict=True):
            logits.append(part)
    again = Running(prompts[1])
    assert step(pool, [(again, 5)], logits="none").shape[0] == 0
    for sequence, logits in zip(sequences, collected, strict=True):
        if sequence.left:
            logits.append(step(pool, [(sequence, sequence.left)]))
    return [torch.cat(logits) for logits in collected]


def with_biases(folder: Path) -> Path:
    """Attention layers with biases, in checkpoint and config."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for key in [key for key in tensors if "language_model" in key and "self_attn" in key and "_proj.weight" in key]:
        tensors[key.replace("weight", "bias")] = torch.randn(len(tensors[key]), generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(folder, text_config={"attention_bias": True})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda folder: with_biases(make_checkpoint(folder)), 2, id="dense, biases, tied"),
        pytest.param(lambda folder: make_checkpoint(folder, moe=True, tied=False), 2, id="experts"),
        # 2 kv heads: two ranks have the same one
        pytest.param(lambda folder: make_checkpoint(folder, moe=True, layout="saved"), 4, id="experts, 4 ranks, saved"),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, make: Callable[[Path], Path], size: int) -> None:
    case = Case.of(make(tmp_path))
    with shared(case.folder, size) as pool:
        for logits, expected in zip(run(pool, case.prompts), case.expected, strict=True):
            assert_close(logits, expected, 1e-4)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"dtype": "auto"}, 1e-4),
        pytest.param({"dtype": "bfloat16"}, 0.2, marks=pytest.mark.slow),
        pytest.param({"dtype": "auto", "quantization": "int8"}, 0.5, marks=pytest.mark.slow),
    ],
)
def test_other_weight_formats(tmp_path: Path, changes: dict[str, Any], tolerance: float) -> None:
    """As close to the whole decoder as rounding allows: weights are the same in shards, but a shard of activations is
    not rounded to bf16 as the whole, and a scale of int8 is a shard's own."""
    case, engine = Case.of(make_checkpoint(tmp_path, moe=True)), replace(FP32, **changes)
    whole = load(case.folder, engine=engine)
    expected = run(Pool(whole, NUM_PAGES, ModelBundle(Checkpoint(case.folder), engine).kv_dtype), case.prompts)
    with shared(case.folder, engine=engine) as pool:
        for ours, theirs in zip(run(pool, case.prompts), expected, strict=True):
            error = (ours - theirs).abs().median()
            assert error <= tolerance, f"median error {error:.3g}"


def test_a_rank_that_fails_is_named_and_ends_the_group(tmp_path: Path) -> None:
    failures: list[StartError] = []
    case = Case.of(make_checkpoint(tmp_path))
    with shared(case.folder, failures=failures) as pool:
        run(pool, case.prompts)
        beyond = Running(case.prompts[1], pages=[NUM_PAGES, NUM_PAGES + 1])  # no rank has such pages
        with pytest.raises(StartError, match=r"tensor-parallel rank [01] of 2 "):
            step(pool, [(beyond, 5)])
    assert len(failures) == 1


@contextmanager
def started(folder: Path, failures: list[StartError]) -> Iterator[ChildRanks]:
    """A rank beside this one, that is about to begin."""
    ranks = ChildRanks(str(folder), FP32, 2, failures.append)
    try:
        yield ranks
    finally:
        ranks.close()


def test_a_rank_that_is_killed_before_it_arrives_or_while_nothing_happens(tmp_path: Path) -> None:
    failures: list[StartError] = []
    folder = make_checkpoint(tmp_path)
    with started(folder, failures) as ranks:
        ranks.processes[0].kill()
        began = time.monotonic()
        with pytest.raises(StartError, match=r"rank 1 of 2 \(process \d+\) was killed by SIGKILL"):
            ranks.connect(CPU)
        assert time.monotonic() - began < 10
        assert len(failures) == 1
    with started(folder, failures) as ranks:
        ranks.connect(CPU)
        ranks.processes[0].kill()
        began = time.monotonic()
        while len(failures) < 2:
            assert time.monotonic() - began < 10
            time.sleep(0.001)
        assert f"(process {ranks.processes[0].pid}) was killed by SIGKILL" in str(failures[1])
    assert len(failures) == 2, "to be ended is no failure"


def test_a_checkpoint_that_a_rank_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 may see another one if the file is replaced."""
    folder = make_checkpoint(tmp_path / "whole")
    path = make_checkpoint(tmp_path / "broken") / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, path)
    failures: list[StartError] = []
    with started(path.parent, failures) as ranks:
        group = ranks.connect(CPU)
        load(folder, group)
        with (
            pytest.raises(StartError, match=r"rank 1 of 2 \(process \d+\) ended with exit code 78"),
            ranks.collective(),
        ):
            gather_memory(group, CPU)
    said = capfd.readouterr().err
    assert "triptych: rank 1: " in said
    assert "language_model.norm.weight' is missing" in said
    assert "Traceback" not in said
    assert len(failures) == 1


# ── shards, without processes ────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_keeps_its_shard_alone(tmp_path: Path) -> None:
    """What both ranks keep of each layer, together, is the layer; norms, routers and the embedding are replicated."""
    folder = make_checkpoint(tmp_path, moe=True, tied=False)
    whole = dict(load_plain(folder).named_parameters())
    shards = [dict(load_plain(folder, Rank(rank)).named_parameters()) for rank in range(2)]
    num_cut = 0
    for name, parameter in whole.items():
        # a reduced or gathered module is a module's child
        path = (
            name.replace("output.", "output.module.")
            .replace("head.linear.", "head.linear.module.")
            .replace("mlp.", "mlp.module.")
        )
        sizes = [shard[path].numel() for shard in shards]
        everybodys = "norm" in name or "router" in name or name == "embedding"
        if everybodys and "qk_norm" not in name:
            assert sizes == [parameter.numel()] * 2, name
        else:
            assert sizes == [parameter.numel() / 2] * 2, name
            num_cut += 1
    assert num_cut == DENSE.layers * 3 + (DENSE.layers - 1) * MOE.experts * 2 + 2 + 1


def test_only_rank_0_adds_the_output_bias(tmp_path: Path) -> None:
    folder = with_biases(make_checkpoint(tmp_path))
    outputs = [layers_of(load_plain(folder, Rank(rank)))[0].mixer.output.module for rank in range(2)]
    assert all(isinstance(output, PlainLinear) for output in outputs)
    assert [output.bias is not None for output in outputs] == [True, False]


def test_packed_weights_are_a_shards(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path), Rank(1), replace(FP32, dtype="auto"))
    products: list[Any] = [module.product for module in decoder.layers[0].modules() if isinstance(module, PackedLinear)]
    hidden = DENSE.hidden
    expected = [(64, hidden), (hidden, 32), (96, hidden), (hidden, 48)]  # half of q, k, v; o; gate, up; down
    assert [(product.outputs, product.inputs) for product in products] == expected


def test_one_rank_has_nothing_around_its_modules(tmp_path: Path) -> None:
    names = {type(module).__name__ for module in load(make_checkpoint(tmp_path, moe=True)).modules()}
    assert "Linear" in " ".join(names)
    assert not names & {"AllReduce", "GatherLogits"}


def test_misshapen_weights_are_found_whatever_the_shard(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, text_config={"intermediate_size": 2 * DENSE.intermediate})
    with pytest.raises(CheckpointError, match=r"gate_proj.* has shape \[96, 64\]; the config makes it \[192, 64\]"):
        load(folder, Rank(0))


@pytest.mark.parametrize(
    ("units", "size", "parts"),
    [
        (4, 2, [(0, 20), (20, 40)]),
        (2, 4, [(0, 10), (0, 10), (10, 20), (10, 20)]),
        (1, 2, [(0, 10), (0, 10)]),
        (3, 1, [(0, 30)]),
    ],
)
def test_parts_of_a_dimension(units: int, size: int, parts: list[tuple[int, int]]) -> None:
    found = [ShardedDimension(units, 10).part(Rank(rank, size)) for rank in range(size)]
    assert [(part.start, part.stop) for part in found] == parts


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "3 doesn't divide the model's query heads, of which there are 4"),
        ({"heads": 6, "kv_heads": 2}, 3, "3 doesn't divide the model's kv heads, of which there are 2"),
        ({"intermediate": 95}, 2, "2 doesn't divide the model's intermediate values, of which there are 95"),
        ({"expert_intermediate": 47}, 2, "intermediate values of an expert, of which there are 47"),
        ({"vocabulary": 265}, 2, "2 doesn't divide the model's tokens in the vocabulary, of which there are 265"),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, changes: dict[str, Any], size: int, message: str) -> None:
    folder = make_checkpoint(tmp_path, sizes=replace(MOE, **changes))
    with pytest.raises(ConfigError, match=message):
        load(folder, Rank(0, size))


def test_an_instance_refuses_a_size_before_it_starts_anything(tmp_path: Path) -> None:
    engine, channel = replace(FP32, tensor_parallel_size=RankSizes(3)), Channel(SystemClock())
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 doesn't divide the model's query heads"):
        build_instance(
            InstanceSpec(model=str(tmp_path), role=Role.PD, name="pd0", join="127.0.0.1:1", engine=engine),
            model=ModelBundle(Checkpoint(make_checkpoint(tmp_path)), engine),
            channel=channel,
            clock=SystemClock(),
        )
    channel.close()
    assert not [child for child in psutil.Process().children() if "triptych.server.rank_main" in child.cmdline()]


def test_the_kv_cache_of_a_rank(tmp_path: Path) -> None:
    config = ModelBundle(Checkpoint(make_checkpoint(tmp_path)), FP32).adapter.decoder_config
    assert config.shard(1) == config
    one, two, four = (
        bytes_per_token(config.shard(size).cache_specs(cache_format(torch.float32))) for size in (1, 2, 4)
    )
    assert two == one // 2
    assert four == one // 2, "half of the ranks have the same kv head"
