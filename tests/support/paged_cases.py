"""Cases for a paged attention backend, each against attention written out in full. Not a test: ``test_triton.py`` runs
them in Triton's interpreter, ``tests/gpu`` on a GPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.layers.attention.base import PLAIN, AttentionBatch, AttentionOptions
from triptych.layers.attention.kv_format import from_stored, stored_dim, to_stored
from triptych.layers.cache_spec import ChunkWindow


@dataclass(frozen=True)
class Shape:
    """Heads, their size and the page size; ``str`` names a test."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int

    def __str__(self) -> str:
        return f"{self.heads}q{self.kv_heads}kv-d{self.dim}-p{self.page_size}"


SHAPES = [
    Shape(6, 2, 80, 4),  # a group of three: rows are padded; a head of 80: columns are
    Shape(4, 4, 64, 16),
    Shape(8, 1, 128, 16),
    Shape(4, 2, 96, 5),  # pages that aren't a power of two
    Shape(2, 1, 8, 1),
]
BATCHES = {
    "whole prompts": ([5, 37, 2], [5, 37, 2]),
    "chunks of prompts": ([5, 40, 2], [25, 141, 70]),
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 150]),
    "one decode": ([1], [67]),
    "mixed": ([1, 33, 1, 2, 1], [90, 50, 1, 75, 64]),
}
"""New tokens and tokens in the cache of each sequence."""


def make_options(shape: Shape) -> dict[str, AttentionOptions]:
    """Options one by one, and together. Sinks are below, among and above the scores."""
    sinks = torch.linspace(-4, 6, shape.heads)
    together = AttentionOptions(window=70, scale=0.3, softcap=2.0, sinks=sinks, spans=True)
    return {
        "window": AttentionOptions(window=16),
        "chunks": AttentionOptions(window=ChunkWindow(24)),
        "scale": AttentionOptions(scale=0.3),
        "softcap": AttentionOptions(softcap=0.5),
        "sinks": AttentionOptions(sinks=sinks),
        "spans": AttentionOptions(spans=True),
        "spans in windows": AttentionOptions(window=16, spans=True),
        "together": together,
        "values in keys": AttentionOptions(value_dim=shape.dim * 5 // 6),
        "values in keys, together": replace(together, value_dim=shape.dim * 5 // 6),
    }


OPTIONS = tuple(make_options(SHAPES[0]))


@dataclass
class Case:
    """A batch, what goes in, and the caches as they must be and the output as it must come close to."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    caches: Tensor
    """Of keys, and of values unless keys contain them."""
    batch: AttentionBatch
    """With spans, unless the options disregard them."""
    filled: Tensor
    expected: Tensor
    options: AttentionOptions

    @property
    def value_cache(self) -> Tensor | None:
        return self.caches[1] if len(self.caches) > 1 else None


def make_case(  # noqa: PLR0917 (a case is what it is made of)
    shape: Shape, query_lens: list[int], kv_lens: list[int], dtype: torch.dtype, cache_dtype: torch.dtype,
    device: torch.device, seed: int = 0, options: AttentionOptions = PLAIN,
) -> Case:  # fmt: skip
    """Random values and page tables. What no sequence has written in the caches is NaN. As in a decoder, query, key and
    value are views of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    needed = [math.ceil(kv_len / shape.page_size) for kv_len in kv_lens]
    num_pages = sum(needed) + 3
    tables = torch.randperm(num_pages, generator=generator)[: sum(needed)].split(needed)
    widths, parts = (shape.heads, shape.kv_heads, shape.kv_heads), 2 if options.value_dim is None else 1
    packed = torch.randn(sum(query_lens), sum(widths), shape.dim, generator=generator)
    if cache_dtype == torch.bfloat16:
        packed = packed.to(cache_dtype)  # nothing is left to round: Triton's interpreter rounds to bf16 downwards
    packed = packed.to(dtype)
    query, key, value = packed.split(widths, dim=1)
    filled = unwritten((parts, num_pages, shape.page_size, shape.kv_heads), shape.dim, cache_dtype)
    slots, expected, new_slots, ends, first = [], [], [], [], 0
    for query_len, kv_len, table in zip(query_lens, kv_lens, tables, strict=True):
        token = torch.arange(kv_len)
        slots = table[token // shape.page_size] * shape.page_size + token % shape.page_size
        rows = to_stored(torch.randn(2, kv_len, shape.kv_heads, shape.dim, generator=generator), cache_dtype)
        new = slice(first, first + query_len)
        rows[:, kv_len - query_len :] = to_stored(torch.stack((key[new], value[new])), cache_dtype)
        filled.flatten(1, 2)[:, slots] = rows[:parts]
        new_slots.append(slots[kv_len - query_len :])
        read = from_stored(rows[:parts], dtype)
        ends.append(make_ends(query_len, kv_len, seed if options.spans else None))
        expected.append(written_out(query[new], read[0], read[-1][..., : options.value_dim], options, ends[-1]))
        first += query_len
    caches = filled.clone()
    new_slot = torch.cat(new_slots)
    caches.flatten(1, 2)[:, new_slot] = unwritten((parts, len(new_slot), shape.kv_heads), shape.dim, cache_dtype)
    batch = AttentionBatch(
        query_lens, kv_lens, list(tables), new_slot.to(device), torch.cat(ends) if options.spans else None
    )
    query, key, value = packed.to(device).split(widths, dim=1)
    new_value = value if parts == 2 else None
    return Case(query, key, new_value, caches.to(device), batch, filled, torch.cat(expected), options)


def make_ends(query_len: int, kv_len: int, seed: int | None) -> Tensor:
    """Where the keys of a sequence's new tokens end: spans of up to 50 tokens, each followed by a third as many outside
    spans. Without a seed, there are no spans."""
    ends, token = torch.arange(kv_len - query_len, kv_len) + 1, 0
    lengths = torch.randint(1, 50, (query_len,), generator=torch.Generator().manual_seed(seed or 0))
    for length in [] if seed is None else lengths.tolist():
        ends[token : token + length] = min(kv_len - query_len + token + length, kv_len)
        token += length + length // 3
    return ends


def unwritten(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensor:
    """Caches [*shape, stored_dim] whose keys and values are all NaN."""
    if dtype == torch.int8:  # all bits are set: a scale that is NaN
        return torch.full((*shape, stored_dim(dim, dtype)), -1, dtype=dtype)
    return torch.full((*shape, dim), torch.nan, dtype=dtype)


def written_out(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions = PLAIN, ends: Tensor | None = None
) -> Tensor:
    """Attention of the last tokens, in fp64: query [q, heads, d], keys [kv, kv_heads, d], values [kv, kv_heads, v].
    It is causal, unless ``ends`` [q] say where each token's keys end."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (options.scale or query.shape[-1] ** -0.5)
    if options.softcap:
        scores = (scores / options.softcap).tanh() * options.softcap
    query_len, kv_len = scores.shape[1:]
    position, key = torch.arange(kv_len - query_len, kv_len)[:, None], torch.arange(kv_len)
    if isinstance(options.window, ChunkWindow):
        is_read = position // options.window.length == key // options.window.length
    else:
        is_read = position - key < (options.window or kv_len)
    is_later = key > position if ends is None else key >= ends[:, None]
    scores = scores.masked_fill(~is_read | is_later, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.cpu().double()[:, None, None]
        scores = torch.cat((scores, sinks.expand(-1, query_len, 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :kv_len], values).float()


TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By the query's dtype: weights are rounded to it before they multiply the values."""


def check(case: Case, backend: Callable[..., Tensor], tolerance: float | None = None) -> None:
    """Fails when the backend writes anything but the new tokens' slots, or attends to anything else than it should."""
    output = backend(case.query, case.key, case.value, case.caches[0], case.value_cache, case.batch, case.options)
    torch.testing.assert_close(case.caches.cpu(), case.filled, atol=0, rtol=0, equal_nan=True)
    assert output.dtype == case.query.dtype
    tolerance = tolerance or TOLERANCES[case.query.dtype]
    torch.testing.assert_close(output.float().cpu(), case.expected, atol=tolerance, rtol=tolerance)
