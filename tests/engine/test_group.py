"""The KV cache shared by ranks: each owns some heads, and together they form the cache of a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from triptych.engine.cache_rows import HostCacheRows
from triptych.engine.group import GroupCache, make_cache
from triptych.engine.kv_rows import KVRun, TokenRows
from triptych.engine.page_tables import PageTable
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.parallel import SINGLE_RANK, Group, ShardedDimension, SingleRank
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import AttentionSpec, GatedMLPSpec, LayerSpec

LAYERS, PAGES, PAGE_SIZE, DIM = 3, 5, 4, 8


@dataclass
class Rank(SingleRank):
    rank: int
    size: int


@contextmanager
def file_in_memory() -> Iterator[str]:
    file = os.memfd_create("cache")
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


def config_of(kv_heads: int) -> DecoderConfig:
    layer = LayerSpec(AttentionSpec(8, kv_heads, DIM, RopeConfig(1e4)), GatedMLPSpec(8))
    return DecoderConfig(vocab_size=8, hidden_size=8, layers=(layer,) * LAYERS, rms_norm_eps=1e-6)


def cache_of(config: DecoderConfig, group: Group, path: str, dtype: torch.dtype) -> GroupCache:
    return make_cache(
        config, group, num_pages=[PAGES], page_size=PAGE_SIZE, dtype=dtype, device=torch.device("cpu"), path=path
    )


def filled(config: DecoderConfig, dtype: torch.dtype) -> KVTensors:
    """A single process's cache with random values."""
    cache = cache_of(config, SINGLE_RANK, "", dtype).whole
    for index, tensor in enumerate(cache.tensors):
        tensor.copy_(9 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index)))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (4, 4), (2, 4), (1, 2)])
def test_rank_0_sees_rows_as_in_a_single_process(dtype: torch.dtype, kv_heads: int, size: int) -> None:
    """And the ranks read what it writes. With fewer heads than ranks, several ranks write the same values."""
    config, tables = config_of(kv_heads), [PageTable(pages=[3, 4, 0])]
    one = filled(config, dtype)
    with file_in_memory() as path:
        ranks = [cache_of(config, Rank(rank, size), path, dtype) for rank in range(size)]
        for rank, cache in enumerate(ranks):
            heads = ShardedDimension(kv_heads).part(Rank(rank, size))
            for ours, whole in zip(cache.own.tensors, one.tensors, strict=True):
                assert ours.shape[2] == max(1, kv_heads // size)
                ours.copy_(whole[:, :, heads])
    of_token = TokenRows(config.cache_specs(cache_format(dtype)))
    rows, expected = HostCacheRows(ranks[0].whole, of_token), HostCacheRows(one, of_token)
    for layer in range(LAYERS):
        for part in range(2):
            run = [KVRun(layer, part, 1, 10, 0)]
            found = list(rows.read(run, tables, rows.event()))
            assert len(found) == 2, "as many views as in one process"
            alone = expected.read(run, tables, rows.event())
            for (row, mine), (same_row, theirs) in zip(found, alone, strict=True):
                assert row == same_row
                assert mine.flags.c_contiguous
                assert (mine == theirs).all()
                mine[:] = 0
    written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    written[[13, 14, 15, 16, 17, 18, 19, 0, 1, 2]] = True
    for cache in ranks:
        for tensor in cache.own.tensors:
            assert ((tensor.flatten(0, 1) == 0).all(dim=2).all(dim=1) == written).all()


def test_memory_is_released_with_the_last_tensor() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:cache")

    with file_in_memory() as path:
        ranks = [cache_of(config_of(4), Rank(rank, 2), path, torch.float32) for rank in range(2)]
        assert mapped() == 2
    kept = ranks[0].own.layers[0][0]
    del ranks
    assert mapped() == 1
    kept.fill_(1.0)
    del kept
    assert mapped() == 0
