"""Our tower and decoder against the whole models of transformers, on tiny random checkpoints."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.checkpoints import load_adapter, load_reference, make_checkpoint
from tests.support.forward import (
    Pool,
    Prompt,
    Running,
    assert_close,
    assert_rows,
    make_prompt,
    random_input,
    reference_logits,
    step,
)
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.decoder import Decoder
from triptych.layers.linear import WEIGHT_FORMATS, PackedLinear
from triptych.models.base import EncoderInput

CPU = torch.device("cpu")
TOLERANCE = 1e-4
IMAGES = [random_input((1, 4, 6), 1), random_input((1, 2, 2), 2), random_input((1, 8, 4), 3)]
TEXT = b"hello triptych"


class Model:
    """A checkpoint's tower, its decoder in any weight format, and the reference."""

    def __init__(self, folder: Path) -> None:
        self.adapter = load_adapter(folder)
        self.checkpoint = Checkpoint(folder)
        self.reference: PreTrainedModel = load_reference(folder)
        self.tower = self.adapter.load_encoder(self.checkpoint, WEIGHT_FORMATS["float32"], CPU)

    @cache  # noqa: B019 (lives as long as the module's fixture)
    def decoder(self, weights: str = "float32") -> Decoder:
        return self.adapter.load_decoder(self.checkpoint, WEIGHT_FORMATS[weights], CPU)

    def prompt(self, images: list[EncoderInput], text: bytes = TEXT) -> Prompt:
        return make_prompt(self.reference, list(text), images, self.tower.encode(images), self.adapter.embedding_width)

    def expected(self, images: list[EncoderInput], text: bytes = TEXT) -> Tensor:
        return reference_logits(self.reference, self.prompt(images, text), images)


@pytest.fixture(scope="module")
def models(checkpoint_folder: Callable[..., Path]) -> Callable[..., Model]:
    """A ``Model`` per set of options of ``make_checkpoint``."""
    made: dict[Path, Model] = {}

    def model(**options: Any) -> Model:
        folder = checkpoint_folder(**options)
        return made.setdefault(folder, made.get(folder) or Model(folder))

    return model


def run_whole(pool: Pool, prompt: Prompt) -> Tensor:
    return step(pool, [(Running(prompt), len(prompt.tokens))])


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["saved", "published"])
@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_logits(models: Callable[..., Model], moe: bool, tied: bool, layout: str, num_images: int) -> None:
    model, images = models(moe=moe, tied=tied, layout=layout), IMAGES[:num_images]
    logits = run_whole(Pool(model.decoder()), model.prompt(images))
    assert logits.dtype == torch.float32
    assert_close(logits, model.expected(images), TOLERANCE)


@pytest.mark.parametrize("moe", [False, True])
def test_shards_and_layouts_are_one_model(models: Callable[..., Model], moe: bool) -> None:
    expected = models(moe=moe, layout="saved").expected(IMAGES)
    for layout in ("saved", "published"):
        model = models(moe=moe, layout=layout, sharded=True)
        assert len({info.file for info in model.checkpoint.tensors.values()}) > 1
        assert_close(model.expected(IMAGES), expected, 0)
        assert_close(run_whole(Pool(model.decoder()), model.prompt(IMAGES)), expected, TOLERANCE)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_in_scattered_pages(models: Callable[..., Model], moe: bool, chunk: int) -> None:
    model = models(moe=moe)
    prompt, expected = model.prompt(IMAGES), model.expected(IMAGES)
    scattered = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    pool, sequence = Pool(model.decoder(), free=scattered), Running(prompt)
    logits = []
    while (left := len(prompt.tokens) - sequence.done) > 0:
        logits.append(step(pool, [(sequence, min(chunk, left))]))
    assert_close(torch.cat(logits), expected, TOLERANCE)


@pytest.mark.parametrize("moe", [False, True])
def test_packed_sequences_at_different_points(models: Callable[..., Model], moe: bool) -> None:
    """Three sequences whose chunks, media and single tokens share batches, and whose pages interleave."""
    model = models(moe=moe)
    requests = [(IMAGES[:1], b"one"), ([], b"only text here"), (IMAGES[1:], b"two images")]
    sequences = [Running(model.prompt(images, text)) for images, text in requests]
    pool = Pool(model.decoder())
    collected: list[list[Tensor]] = [[] for _ in sequences]
    chunks = [5, 1, 8]
    while any(not sequence.finished for sequence in sequences):
        chunks = chunks[1:] + chunks[:1]
        work = [
            (index, min(chunk, sequence.left))
            for index, (sequence, chunk) in enumerate(zip(sequences, chunks, strict=True))
            if not sequence.finished
        ]
        logits = step(pool, [(sequences[index], count) for index, count in work])
        for (index, _), part in zip(work, logits.split([count for _, count in work]), strict=True):
            collected[index].append(part)
    for parts, (images, text) in zip(collected, requests, strict=True):
        assert_close(torch.cat(parts), model.expected(images, text), TOLERANCE)


def test_only_requested_logits(models: Callable[..., Model]) -> None:
    model = models()
    prompt, expected = model.prompt(IMAGES), model.expected(IMAGES)
    last = step(Pool(model.decoder()), [(Running(prompt), len(prompt.tokens))], logits="last")
    assert_close(last, expected[-1:], TOLERANCE)
    none = step(Pool(model.decoder()), [(Running(prompt), len(prompt.tokens))], logits="none")
    assert none.shape == (0, expected.shape[1])
    assert none.dtype == torch.float32


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(("weights", "tolerance"), [("float16", 0.01), ("bfloat16", 0.2)])
def test_other_weight_formats(models: Callable[..., Model], moe: bool, weights: str, tolerance: float) -> None:
    """With a KV cache in fp16. The tolerances are loose, because random weights are larger than trained ones and
    amplify rounding."""
    model = models(moe=moe)
    decoder = model.decoder(weights)
    logits = run_whole(Pool(decoder, dtype=torch.float16), model.prompt(IMAGES))
    error = (logits - model.expected(IMAGES)).abs()
    assert error.median() <= tolerance, f"median error {error.median():.3g}, max {error.max():.3g}"


def test_greedy_outputs_vary(models: Callable[..., Model]) -> None:
    """A checkpoint whose outputs never vary could hide mistakes."""
    for options in ({}, {"moe": True}, {"tied": False}):
        assert len(set(models(**options).expected(IMAGES).argmax(-1).tolist())) > 10


def test_media_embeddings_of_the_wrong_width(models: Callable[..., Model]) -> None:
    model = models()
    prompt = model.prompt(IMAGES)
    prompt.media_embeddings = prompt.media_embeddings[:, :-1]
    with pytest.raises(ValueError, match="media embeddings have shape"):
        run_whole(Pool(model.decoder()), prompt)


@pytest.mark.parametrize("moe", [False, True])
def test_tower_equals_transformers(models: Callable[..., Model], moe: bool) -> None:
    model = models(moe=moe)
    patches = torch.cat([torch.from_numpy(item.patches) for item in IMAGES])
    grids = torch.tensor([item.grid for item in IMAGES])
    with torch.inference_mode():
        output = model.reference.model.visual(patches, grid_thw=grids)
    rows = model.tower.encode(IMAGES)
    assert [tuple(part.shape) for part in rows] == [(6, 192), (1, 192), (8, 192)]
    assert_rows(torch.cat(rows), torch.cat((output.pooler_output, *output.deepstack_features), dim=1))


def test_tower_rows_do_not_depend_on_the_batch(models: Callable[..., Model]) -> None:
    tower = models().tower
    for item, rows in zip(IMAGES, tower.encode(IMAGES), strict=True):
        assert_close(rows, tower.encode([item])[0], 1e-5)
    assert tower.encode([]) == []


def test_tower_in_bf16(models: Callable[..., Model]) -> None:
    model = models()
    tower = model.adapter.load_encoder(model.checkpoint, WEIGHT_FORMATS["bfloat16"], CPU)
    rows = torch.cat(tower.encode(IMAGES))
    assert rows.dtype == torch.float32
    assert_close(rows, torch.cat(model.tower.encode(IMAGES)), 0.1)


def test_tower_with_packed_weights(models: Callable[..., Model]) -> None:
    """Linear layers are in fp16, and their fp32 weights aren't kept."""
    model = models()
    tower: Any = model.adapter.load_encoder(model.checkpoint, WEIGHT_FORMATS["float16"], CPU)
    assert any(isinstance(module, PackedLinear) for module in tower.modules())
    assert not any(isinstance(module, nn.Linear) for module in tower.modules())
    rows = torch.cat(tower.encode(IMAGES))
    assert rows.dtype == torch.float32
    assert_close(rows, torch.cat(model.tower.encode(IMAGES)), 0.02)


def test_bf16_checkpoint(tmp_path: Path) -> None:
    """Weights stored in bf16 and used in fp32, the usual case on CPUs."""
    model = Model(make_checkpoint(tmp_path, dtype=torch.bfloat16))
    assert model.decoder().embedding.dtype == torch.bfloat16
    assert_close(run_whole(Pool(model.decoder()), model.prompt(IMAGES)), model.expected(IMAGES), TOLERANCE)
