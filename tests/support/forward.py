"""Drives our decoder and tower by hand, as the engine will, and transformers' model as the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.delta_rule.base import DeltaBatch
from triptych.layers.state_spec import record_bytes
from triptych.layers.state_tensors import StateBatch, StateTensors
from triptych.layers.token_choice import TokenChoice
from triptych.models.base import EncoderInput

PAGE_SIZE = 4

Wanted = Literal["all", "last", "none", "odd"]
"""Which tokens' logits a step computes: of each chunk all, the last, none or every second one."""


def random_input(grid: tuple[int, int, int], seed: int = 0, patch_values: int = 1536) -> EncoderInput:
    """An item of random patches of the given grid."""
    patches = np.random.default_rng(seed).standard_normal((int(np.prod(grid)), patch_values), dtype=np.float32)
    return EncoderInput(patches, grid, name=f"{seed} {grid}")


@dataclass
class Prompt:
    """A prompt ready for the decoder: tokens [T], positions [3, T], media_index [M] and media_embeddings [M, width]."""

    tokens: Tensor
    positions: Tensor
    media_index: Tensor
    media_embeddings: Tensor


def make_prompt(
    reference: PreTrainedModel, text: Sequence[int], inputs: Sequence[EncoderInput], rows: Sequence[Tensor], width: int
) -> Prompt:
    """``text`` with the items' placeholders spread through it. Positions are transformers'."""
    config = reference.config
    kind = "vision" if hasattr(config, "vision_start_token_id") else "image"
    start, end = (getattr(config, f"{kind}_{part}_token_id") for part in ("start", "end"))
    tokens: list[int] = []
    for index, token in enumerate(text):
        tokens.append(token)
        if index < len(inputs):
            tokens += [start, *[config.image_token_id] * len(rows[index]), end]
    ids = torch.tensor(tokens)
    is_media = ids == config.image_token_id
    grids = torch.tensor([item.grid for item in inputs]) if inputs else None
    positions, _ = reference.model.get_rope_index(
        input_ids=ids[None],
        image_grid_thw=grids,
        attention_mask=torch.ones_like(ids[None]),
        **media_types(reference, is_media[None]),
    )
    media_embeddings = torch.cat(list(rows)) if rows else torch.zeros(0, width)
    return Prompt(ids, positions[:, 0].double(), is_media.nonzero()[:, 0], media_embeddings)


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, prompt: Prompt, inputs: Sequence[EncoderInput]) -> Tensor:
    """Logits [T, vocab] of transformers' whole model, tower and all."""
    media = {}
    if inputs:
        media = {
            "pixel_values": torch.cat([torch.from_numpy(item.patches) for item in inputs]),
            "image_grid_thw": torch.tensor([item.grid for item in inputs]),
        }
    is_media = (prompt.tokens == reference.config.image_token_id)[None]
    mask = torch.ones_like(prompt.tokens[None])
    text = {"input_ids": prompt.tokens[None], "attention_mask": mask} | media_types(reference, is_media)
    return reference(**text, **media).logits[0].float()


def media_types(reference: PreTrainedModel, is_image: Tensor) -> dict[str, Tensor]:
    """What tells models with M-RoPE, or with spans, which tokens are an image's; Omni finds out by itself."""
    if reference.config.model_type == "gemma4":
        return {"mm_token_type_ids": is_image.int()}
    if reference.config.model_type == "gemma3":
        return {"token_type_ids": is_image.int()}
    finds_out = "Omni" in type(reference).__name__ or not hasattr(getattr(reference, "model", None), "get_rope_index")
    return {} if finds_out else {"mm_token_type_ids": is_image.int()}


@dataclass
class Pool:
    """A cache whose pages are handed out in the order of ``free``."""

    decoder: Decoder
    num_pages: int = 64
    dtype: torch.dtype = torch.float32
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = torch.device("cpu")
        self.num_groups = len(self.decoder.config.cache_groups.windows)  # which all have the same pages here
        specs = self.decoder.config.cache_specs(cache_format(self.dtype))
        self.cache = KVTensors.allocate(specs, [self.num_pages] * self.num_groups, PAGE_SIZE, device)
        self.slots = list(range(self.num_pages))
        if self.decoder.config.has_state:
            states = self.decoder.config.state_specs(cache_format(self.decoder.dtype))
            num_bytes = record_bytes(states, 4)
            self.cache = replace(self.cache, states=StateTensors.allocate(states, self.num_pages, num_bytes, device))
        self.free = self.free or list(range(self.num_pages))


@dataclass
class Running:
    """A sequence in the cache: what is done of its prompt, and its pages."""

    prompt: Prompt
    done: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    """Of its state, in a decoder that has any."""
    lora: int | None = None

    @property
    def left(self) -> int:
        return len(self.prompt.tokens) - self.done

    @property
    def finished(self) -> bool:
        return self.left == 0

    def grow(self, pool: Pool, count: int) -> list[int]:
        """Takes pages for ``count`` more tokens and returns those tokens' slots."""
        if self.slot < 0:
            self.slot = pool.slots.pop()
        while len(self.pages) * PAGE_SIZE < self.done + count:
            self.pages.append(pool.free.pop(0))
        places = range(self.done, self.done + count)
        return [self.pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in places]


def step(pool: Pool, work: Sequence[tuple[Running, int]], logits: Wanted = "all") -> Tensor:
    """Runs the next ``count`` tokens of each sequence in one packed batch. Returns the logits of all the tokens, of
    each sequence's last, of none, or of every second one in the batch."""
    counts = [count for _, count in work]
    ends = list(accumulate(counts))
    slots: list[int] = []
    media_index, media_embeddings, parts = [], [], []
    starts = [sequence.done for sequence, _ in work]
    for (sequence, count), end in zip(work, ends, strict=True):
        slots += sequence.grow(pool, count)
        prompt, chunk = sequence.prompt, slice(sequence.done, sequence.done + count)
        mine = (prompt.media_index >= chunk.start) & (prompt.media_index < chunk.stop)
        media_index.append(prompt.media_index[mine] - chunk.start + end - count)
        media_embeddings.append(prompt.media_embeddings[mine])
        parts.append((prompt.tokens[chunk], prompt.positions[:, chunk]))
        sequence.done += count
    attention = AttentionBatch(
        query_lens=counts,
        kv_lens=[sequence.done for sequence, _ in work],
        page_tables=[torch.tensor(sequence.pages) for sequence, _ in work],
        slots=torch.tensor(slots),
    )
    batch = ForwardBatch(
        tokens=torch.cat([tokens for tokens, _ in parts]),
        positions=torch.cat([positions for _, positions in parts], dim=1),
        media_index=torch.cat(media_index),
        media_embeddings=torch.cat(media_embeddings),
        logits_index={
            "all": torch.arange(ends[-1]),
            "last": torch.tensor(ends) - 1,
            "none": torch.arange(0),
            "odd": torch.arange(1, ends[-1], 2),
        }[logits],
        attention=[attention] * pool.num_groups,
        state=states_of(work, counts, starts) if pool.cache.states else None,
        choice=TokenChoice.of([sequence.lora for sequence, count in work for _ in range(count)]),
    )
    return pool.decoder(batch, pool.cache)


def states_of(work: Sequence[tuple[Running, int]], counts: list[int], starts: list[int]) -> StateBatch:
    """The sequences' states in a step."""
    delta = DeltaBatch(counts, [one.slot for one, _ in work], [start == 0 for start in starts])
    return StateBatch(delta, starts, [], [])


ROWS_TOLERANCE = 1e-5
"""Of a tower's rows, as a share of their largest value. Ours and transformers' add up in another order, and are about
as far from rows that were computed in float64 (``test_tower_rows_are_as_exact_as_transformers``)."""


def assert_close(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """Fails with the largest error when it exceeds ``tolerance``."""
    error = (ours - reference).abs().max().item()
    assert error <= tolerance, f"max error {error:.3g} over {tolerance:.3g}; values up to {reference.abs().max():.3g}"


def assert_rows(ours: Tensor, reference: Tensor) -> None:
    """Fails with the largest error of a tower's rows when it exceeds ``ROWS_TOLERANCE``."""
    assert_close(ours, reference, ROWS_TOLERANCE * reference.abs().max().item())


def layers_of(decoder: Decoder) -> Any:
    """The decoder's layers. torch types a module's attributes as tensors or modules, whatever they are."""
    return decoder.layers
