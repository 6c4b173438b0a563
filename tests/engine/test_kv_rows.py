"""Both ends of a KV transfer agree on what each row is."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.kv_rows import GROUP, CacheRows, KVRows
from triptych.layers.attention.base import KVTensors

LAYERS, PAGE, HEADS, DIM = 3, 4, 2, 3


@given(num_tokens=st.integers(1, 3 * GROUP + 5), cuts=st.lists(st.integers(0, 10**6), max_size=8), data=st.data())
def test_both_iterations_yield_the_same_rows(num_tokens: int, cuts: list[int], data: st.DataObject) -> None:
    rows = KVRows(LAYERS, num_tokens)
    token, end = sorted(data.draw(st.tuples(st.integers(0, num_tokens), st.integers(0, num_tokens))))
    produced = {
        run.first_row + index: (run.layer, run.part, run.token + index)
        for layer in range(LAYERS)
        for chunk in ((0, token), (token, end), (end, num_tokens))
        for run in rows.of_layer(layer, *chunk)
        for index in range(run.num_tokens)
    }
    assert sorted(produced) == list(range(rows.num_rows)), "each row once"
    borders = sorted({0, rows.num_rows, *(cut % rows.num_rows for cut in cuts)})
    consumed = {
        run.first_row + index: (run.layer, run.part, run.token + index)
        for low, high in itertools.pairwise(borders)
        for run in rows.between(low, high)
        for index in range(run.num_tokens)
    }
    assert consumed == produced


@given(num_tokens=st.integers(1, 2 * GROUP), first=st.integers(0, 2 * GROUP))
def test_groups_are_transferred_in_order(num_tokens: int, first: int) -> None:
    rows, group = KVRows(LAYERS, num_tokens), min(first, num_tokens - 1) // GROUP
    for layer in range(LAYERS):
        for run in rows.of_layer(layer, group * GROUP, min((group + 1) * GROUP, num_tokens)):
            assert 2 * LAYERS * GROUP * group <= run.first_row < 2 * LAYERS * min(GROUP * (group + 1), num_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(pages=st.permutations(range(8)), data=st.data())
def test_a_requests_rows_are_those_of_its_pages(dtype: torch.dtype, pages: list[int], data: st.DataObject) -> None:
    shape = (8, PAGE, HEADS, DIM)
    keys, values = ([torch.randn(shape).to(dtype) for _ in range(LAYERS)] for _ in range(2))
    rows = CacheRows(KVTensors(keys, values))
    token = data.draw(st.integers(0, 8 * PAGE - 1))
    count = data.draw(st.integers(1, 8 * PAGE - token))
    layer, part = data.draw(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 1)))
    views = list(rows.of(layer, part, pages, token, count))
    tensor = (keys, values)[part][layer][pages].flatten(0, 1)[token : token + count]
    np.testing.assert_array_equal(np.concatenate(views), tensor.flatten(1).contiguous().view(torch.uint8).numpy())
    joined = sum(later != earlier + 1 for earlier, later in itertools.pairwise(pages))
    assert len(views) <= joined + 1, "consecutive pages make one view"
    views[0][:] = 0
    assert (torch.stack([*keys, *values]) == 0).any(), "a view, not a copy"
