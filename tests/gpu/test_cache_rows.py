"""A KV cache on a GPU as rows of bytes, against the same cache in host memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.cache_rows import CacheRows, cache_rows
from triptych.engine.kv_rows import KVRun, TokenRows
from triptych.engine.page_tables import PageTable
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import CacheSpec

PAGES, PAGE = 6, 4
SPECS = {
    "equal": [CacheSpec(2, (8, 8), cache_format(torch.bfloat16))] * 2,
    "unequal": [CacheSpec(2, (8, 4), cache_format(torch.float32)), CacheSpec(1, (24, 8), cache_format(torch.float32))],
    "odd bytes": [CacheSpec(1, (3, 5), cache_format(torch.bfloat16))],
}


def filled(specs: list[CacheSpec], device: torch.device) -> KVTensors:
    cache = KVTensors.allocate(specs, [PAGES], PAGE, device)
    for number, tensor in enumerate(cache.tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    return cache


def read(rows: CacheRows, run: KVRun, tables: list[PageTable]) -> np.ndarray:
    found = list(rows.read([run], tables, rows.event()))
    while not rows.read_event().query():
        pass
    assert [row for row, _ in found] == [run.first_row + sum(map(len, before)) for before in _begins(found)]
    return np.concatenate([part for _, part in found])


def _begins(found: list[tuple[int, np.ndarray]]) -> list[list[np.ndarray]]:
    parts = [part for _, part in found]
    return [parts[:number] for number in range(len(parts))]


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@given(pages=st.permutations(range(PAGES)), data=st.data())
@settings(deadline=None, max_examples=50)
def test_reads_and_writes(gpu: torch.device, specs: list[CacheSpec], pages: list[int], data: st.DataObject) -> None:
    of_token = TokenRows(specs)
    on_host, on_gpu = filled(specs, torch.device("cpu")), filled(specs, gpu)
    layer, part = data.draw(st.tuples(st.integers(0, len(specs) - 1), st.integers(0, 1)))
    num_rows = PAGES * PAGE * of_token.parts[layer][part]
    start = data.draw(st.integers(0, num_rows - 1))
    run = KVRun(layer, part, start, data.draw(st.integers(1, num_rows - start)), 0)
    tables = [PageTable(pages=pages)]
    rows, host_rows = cache_rows(on_gpu, of_token), cache_rows(on_host, of_token)
    np.testing.assert_array_equal(read(rows, run, tables), read(host_rows, run, tables))
    new = np.random.default_rng(0).integers(0, 100, (run.num_rows, of_token.row_bytes), dtype=np.uint8)
    for one in (rows, host_rows):
        half = run.num_rows // 2
        for first, end in ((0, half), (half, run.num_rows)):
            if first < end:
                one.write(replace(run, start=run.start + first, num_rows=end - first), tables, new[first:end])
        one.finish_writes()
    for ours, theirs in zip(on_gpu.tensors, on_host.tensors, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_a_read_waits_for_what_is_computed_before_it(gpu: torch.device) -> None:
    """An event is recorded behind work that still runs."""
    cache = filled(SPECS["equal"], gpu)
    rows, tables = cache_rows(cache, TokenRows(SPECS["equal"])), [PageTable(pages=[4, 1])]
    busy = torch.randn(4096, 4096, device=gpu)
    for _ in range(50):
        busy = busy @ busy
        busy /= busy.norm()
    cache.layers[0][0].fill_(3.0)
    computed = rows.event()
    [(_, found)] = rows.read([KVRun(0, 0, 0, 2 * PAGE, 0)], tables, computed)
    done = rows.read_event()
    while not done.query():
        pass
    assert (torch.from_numpy(found).view(torch.bfloat16) == 3.0).all()
