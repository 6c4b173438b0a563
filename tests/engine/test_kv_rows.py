"""Both ends of a KV transfer agree on what each row is."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.cache_rows import CachePlaces, HostCacheRows
from triptych.engine.kv_rows import GROUP, KVRows, KVRun, TokenRows
from triptych.engine.page_tables import PageTable
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import CacheSpec, ChunkWindow, first_read

PAGE, PAGES = 4, 8
FLOAT16, INT8 = cache_format(torch.float16), cache_format(torch.int8)
EQUAL = [CacheSpec(2, (3, 3), FLOAT16)] * 3
UNEQUAL = [CacheSpec(2, (3, 3), FLOAT16), CacheSpec(1, (6, 4), FLOAT16), CacheSpec(2, (4, 8), INT8)]
WINDOWED = [replace(spec, window=window) for spec, window in zip(UNEQUAL, (None, 40, 700), strict=True)]
CHUNKED = [replace(spec, window=window) for spec, window in zip(UNEQUAL, (ChunkWindow(300), 40, None), strict=True)]
MODELS = st.sampled_from([EQUAL, UNEQUAL, WINDOWED, CHUNKED, [replace(EQUAL[0], window=1)]])

Places = dict[int, tuple[int, int, int]]
"""By row of the transfer: layer, part, and place in that part of the layer."""


def places(run: KVRun) -> Places:
    return {run.first_row + index: (run.layer, run.part, run.start + index) for index in range(run.num_rows)}


def test_equal_layers_have_a_row_for_each_key_and_value() -> None:
    rows = TokenRows(EQUAL)
    assert (rows.row_bytes, rows.in_all_layers, rows.largest_part, rows.largest_run) == (12, 6, 1, 2 * GROUP)


def test_other_layers_have_several() -> None:
    rows = TokenRows(UNEQUAL)
    assert rows.row_bytes == 4, "divides 12, 12, 8, 16 and 24"
    assert rows.parts == [(3, 3), (3, 2), (4, 6)]
    assert (rows.in_all_layers, rows.largest_part, rows.largest_run) == (21, 6, 10 * GROUP)


@given(
    specs=MODELS,
    first=st.integers(0, 600),
    num_tokens=st.integers(1, 3 * GROUP + 5),
    cuts=st.lists(st.integers(0, 10**6), max_size=8),
    data=st.data(),
)
def test_both_iterations_yield_the_same_rows(
    specs: list[CacheSpec], first: int, num_tokens: int, cuts: list[int], data: st.DataObject
) -> None:
    rows, end = KVRows(TokenRows(specs), first, first + num_tokens), first + num_tokens
    borders = sorted(data.draw(st.tuples(st.integers(first, end), st.integers(first, end))))
    produced: Places = {}
    for layer, chunk in itertools.product(range(len(specs)), itertools.pairwise([first, *borders, end])):
        for run in rows.of_layer(layer, *chunk):
            produced |= places(run)
    assert sorted(produced) == list(range(rows.num_rows)), "each row once"
    assert set(produced.values()) == {
        (layer, part, place)
        for layer, sizes in enumerate(rows.of_token.parts)
        for part, size in enumerate(sizes)
        for place in range(max(first, min(first_read(specs[layer].window, end), end - 1)) * size, end * size)
    }
    consumed: Places = {}
    for low, high in itertools.pairwise(sorted({0, rows.num_rows, *(cut % rows.num_rows for cut in cuts)})):
        for run in rows.between(low, high):
            consumed |= places(run)
    assert consumed == produced


@given(specs=MODELS, num_tokens=st.integers(1, 2 * GROUP), token=st.integers(0, 2 * GROUP))
def test_groups_are_transferred_in_order(specs: list[CacheSpec], num_tokens: int, token: int) -> None:
    of_token = TokenRows(specs)
    rows, group = KVRows(of_token, 0, num_tokens), min(token, num_tokens - 1) // GROUP
    borders = [0, group * GROUP, min((group + 1) * GROUP, num_tokens), num_tokens]
    before, within, after = (
        {row for layer in range(len(specs)) for run in rows.of_layer(layer, *tokens) for row in places(run)}
        for tokens in itertools.pairwise(borders)
    )
    assert max(before, default=-1) < min(within, default=0) or not within
    assert max(before | within, default=-1) < min(after, default=rows.num_rows)


@pytest.mark.parametrize("specs", [EQUAL, UNEQUAL, [CacheSpec(2, (3, 5), cache_format(torch.bfloat16))]])
@given(pages=st.permutations(range(PAGES)), data=st.data())
def test_a_requests_rows_are_those_of_its_pages(specs: list[CacheSpec], pages: list[int], data: st.DataObject) -> None:
    cache, of_token = KVTensors.allocate(specs, [PAGES], PAGE, torch.device("cpu")), TokenRows(specs)
    for tensor in cache.tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    layer, part = data.draw(st.tuples(st.integers(0, len(specs) - 1), st.integers(0, 1)))
    num_rows = PAGES * PAGE * of_token.parts[layer][part]
    released = data.draw(st.integers(0, PAGES - 1))
    start = data.draw(st.integers(released * num_rows // PAGES, num_rows - 1))
    count = data.draw(st.integers(1, num_rows - start))
    run = KVRun(layer, part, start, count, 0)
    rows = HostCacheRows(cache, of_token)
    tables = [PageTable(released, pages[released:])]
    views = [view for _, view in rows.read([run], tables, rows.event())]
    tensor = cache.layers[layer][part][pages]
    expected = tensor.view(-1).view(torch.uint8).view(-1, of_token.row_bytes)[start : start + count]
    np.testing.assert_array_equal(np.concatenate(views), expected.numpy())
    joined = sum(later != earlier + 1 for earlier, later in itertools.pairwise(pages))
    assert len(views) <= joined + 1, "consecutive pages make one view"
    places = CachePlaces(PAGE, of_token).whole(run, tables)
    all_rows = cache.layers[layer][part].view(-1).view(torch.uint8).view(-1, of_token.row_bytes).numpy()
    np.testing.assert_array_equal(all_rows[places], expected.numpy())
    assert isinstance(places, slice) == (len(views) == 1)
    views[0][:] = 0
    assert any((tensor == 0).any() for tensor in cache.tensors), "a view, not a copy"
