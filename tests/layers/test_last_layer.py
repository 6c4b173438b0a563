"""The last layer computes keys and values of all tokens, and the rest only for tokens that need logits."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.support.checkpoints import DENSE, load_adapter, load_reference
from tests.support.forward import (
    PAGE_SIZE,
    Pool,
    Prompt,
    Running,
    Wanted,
    assert_close,
    layers_of,
    make_prompt,
    random_input,
    reference_logits,
    step,
)
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.attention.base import AttentionBackend, AttentionBatch, KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.compiled_layer import FinishLayer
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS
from triptych.layers.parallel import ProcessGroup, ShardedDimension

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
IMAGES = [random_input((1, 4, 6), 1), random_input((1, 8, 4), 3)]
DEEPSTACK_TO_THE_END = replace(DENSE, layers=2)
"""A config whose last layer adds deepstack features."""

Folder = Callable[..., Path]
EncodeTask = Literal["all", "last", "none", "odd"]


def prompts_of(folder: Path) -> tuple[list[Prompt], list[Tensor]]:
    """Return a prompt with images and one without, and transformers' logits of all their tokens."""
    adapter, reference = load_adapter(folder), load_reference(folder)
    rows = adapter.load_encoder(Checkpoint(folder), FP32, CPU).encode(IMAGES)
    prompts = [
        make_prompt(reference, list(b"look here"), IMAGES, rows, adapter.embedding_width),
        make_prompt(reference, list(b"words, and nothing but words"), [], [], adapter.embedding_width),
    ]
    return prompts, [reference_logits(reference, prompts[0], IMAGES), reference_logits(reference, prompts[1], [])]


def pool_of(decoder: Decoder) -> Pool:
    """Make a pool whose cache is filled with NaN, which reveals unwritten slots."""
    pool = Pool(decoder)
    for tensor in pool.cache.tensors:
        tensor.fill_(torch.nan)
    return pool


class MediaBudget:
    """Records the number of rows on which each layer's modules after attention run."""

    def __init__(self, decoder: Decoder) -> None:
        self.rows: dict[tuple[int, str], list[int]] = {}
        decoder.run_layers = None  # so that each layer is called by itself
        for index, layer in enumerate(layers_of(decoder)):
            if layer.compiled_finish is not None:
                rows = self.rows.setdefault((index, "both"), [])
                layer.compiled_finish = self._counted(layer.compiled_finish, rows)
                continue
            for name, module in (("output", layer.mixer.output), ("mlp", layer.mlp)):
                module.register_forward_pre_hook(self._counting(self.rows.setdefault((index, name), [])))

    @staticmethod
    def _counting(rows: list[int]) -> Callable[[nn.Module, Any], None]:
        return lambda _, inputs: rows.append(len(inputs[0]))

    @staticmethod
    def _counted(finish: FinishLayer, rows: list[int]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        def counting(hidden: Tensor, attended: Tensor, values: Tensor | None) -> Tensor:
            rows.append(len(hidden))
            return finish(hidden, attended, values)

        return counting


@pytest.mark.parametrize("options", [{}, {"moe": True}, {"sizes": DEEPSTACK_TO_THE_END}], ids=repr)
@pytest.mark.parametrize("wanted", ["last", "none", "odd"])
def test_last_layer_continues_only_with_needed_tokens(
    checkpoint_folder: Folder, options: dict[str, Any], wanted: EncodeTask
) -> None:
    """Two prompts share steps: first chunks that contain a part of the images, then the remaining tokens."""
    folder = checkpoint_folder(**options)
    prompts, expected = prompts_of(folder)
    whole = load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU)
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU)
    counted, pool, reference = MediaBudget(decoder), pool_of(decoder), pool_of(whole)
    sequences, others = ([Running(prompt) for prompt in prompts] for _ in range(2))
    counts = [(7, 3), tuple(sequence.left - count for sequence, count in zip(sequences, (7, 3), strict=True))]
    for chunks in counts:
        done = [sequence.done for sequence in sequences]
        logits = step(pool, list(zip(sequences, chunks, strict=True)), wanted)
        step(reference, list(zip(others, chunks, strict=True)))
        parts = zip(expected, done, chunks, strict=True)
        every = torch.cat([one[start : start + count] for one, start, count in parts])
        of = {"last": [chunks[0] - 1, sum(chunks) - 1], "none": [], "odd": list(range(1, sum(chunks), 2))}[wanted]
        assert logits.shape == (len(of), DENSE.vocabulary)
        if of:
            assert_close(logits, every[of], 1e-4)
        last = len(decoder.layers) - 1
        few = sum(chunks) if "sizes" in options else len(of)
        for (index, _), rows in counted.rows.items():
            assert rows == ([sum(chunks)] if index < last else [few] * (few > 0))
            rows.clear()
    for one, other in zip(pool.cache.tensors, reference.cache.tensors, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
    slots = torch.cat([torch.tensor(one.pages) for one in sequences])
    num_written = (~pool.cache.layers[-1][0][slots].isnan().flatten(2).all(-1)).sum()
    assert num_written == sum(len(prompt.tokens) for prompt in prompts)


def test_prompt_continues_after_chunks_without_logits(checkpoint_folder: Folder) -> None:
    folder = checkpoint_folder()
    (prompt, _), (expected, _) = prompts_of(folder)
    pool, sequence = pool_of(load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU)), Running(prompt)
    while sequence.left > 6:
        assert len(step(pool, [(sequence, 5)], "none")) == 0
    assert_close(step(pool, [(sequence, sequence.left)], "last"), expected[-1:], 1e-4)


@pytest.mark.parametrize(
    "weights", [WEIGHT_FORMATS["float16"], WEIGHT_FORMATS["bfloat16"], *QUANTIZED_FORMATS.values()]
)
def test_every_weight_format_accepts_few_tokens_and_none(checkpoint_folder: Folder, weights: Any) -> None:
    folder = checkpoint_folder(moe=True)
    (prompt, _), _ = prompts_of(folder)
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), weights, CPU)
    every = step(Pool(decoder, dtype=decoder.dtype), [(Running(prompt), len(prompt.tokens))])
    cases: list[tuple[Wanted, Tensor]] = [("none", every[:0]), ("last", every[-1:]), ("odd", every[1::2])]
    for wanted, of in cases:
        logits = step(Pool(decoder, dtype=decoder.dtype), [(Running(prompt), len(prompt.tokens))], wanted)
        assert logits.shape == of.shape
        if len(of):
            assert (logits - of).abs().median() < 0.05


# ── several ranks ────────────────────────────────────────────────────────────────────────────────────────────────


class Slow:
    """Attention that sleeps before it writes."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def __call__(self, *operands: Any) -> Tensor:
        time.sleep(0.1)
        return self._backend(*operands)


@pytest.mark.parametrize("wanted", [[], [3], list(range(8))], ids=["none", "last", "all"])
def test_callback_follows_the_writes_of_all_ranks(checkpoint_folder: Folder, wanted: list[int]) -> None:
    """Also if no token needs logits. Two ranks on threads, over gloo, one of which is slow."""
    adapter, checkpoint = load_adapter(checkpoint_folder()), Checkpoint(checkpoint_folder())
    config = adapter.decoder_config
    specs = config.cache_specs(cache_format(torch.float32))
    whole = KVTensors.allocate(specs, [2], PAGE_SIZE, CPU)
    for tensor in whole.tensors:
        tensor.fill_(torch.nan)
    batch = ForwardBatch(
        tokens=torch.arange(8),
        positions=torch.arange(8, dtype=torch.float64).expand(3, -1),
        media_index=torch.arange(0),
        media_embeddings=torch.zeros(0, adapter.embedding_width),
        logits_index=torch.tensor(wanted, dtype=torch.int64),
        attention=[AttentionBatch([8], [8], [torch.tensor([0, 1])], torch.arange(8))],
    )

    def is_written(layer: int) -> bool:
        return not (whole.layers[layer][0].isnan().any() or whole.layers[layer][1].isnan().any())

    complete: list[bool] = []
    store = distributed.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> Tensor:
        torch.set_num_threads(1)
        group = ProcessGroup(store, rank, 2, CPU)
        decoder = adapter.load_decoder(checkpoint, FP32, CPU, group)
        cache = whole.heads([ShardedDimension(spec.heads).part(group) for spec in specs])
        if rank == 0:
            return decoder(batch, cache, lambda layer: complete.append(is_written(layer)))
        for layer in layers_of(decoder):
            layer.mixer.backend = Slow(layer.mixer.backend)
            layer.compiled_attend, layer.compiled_finish = layer.in_compiled_calls()
        return decoder(batch, cache)

    with ThreadPoolExecutor(2) as threads:
        logits, _ = threads.map(run, range(2))
    assert complete == [True] * config.num_layers
    alone = adapter.load_decoder(checkpoint, FP32, CPU)
    expected = alone(batch, KVTensors.allocate(specs, [2], PAGE_SIZE, CPU))
    assert logits.shape == (len(wanted), config.vocab_size)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
