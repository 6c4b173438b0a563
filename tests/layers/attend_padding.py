"""Attends from a tile of a recorded step that no prompt uses. Not a test: ``test_triton.py`` runs it in a process
of its own, which a read beyond the cache would end."""

import torch

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.attention.tables import PagedTables
from triptych.layers.attention.triton_backend import TritonAttention, tile_tokens

HEADS, DIM, PAGE_SIZE, LENGTH = 2, 16, 16, 3
EMPTY = 300
"""Number of the sequence without tokens, to which unused tiles belong."""
STALE = 2**50
"""What another step has left where this one has no pages."""


def main() -> None:
    lengths = torch.zeros(EMPTY + 1, dtype=torch.int64)
    lengths[0] = LENGTH
    tables = PagedTables(
        query_starts=torch.zeros_like(lengths),
        query_lens=lengths,
        kv_lens=lengths,
        page_starts=torch.zeros_like(lengths),
        decodes=torch.empty(0, dtype=torch.int64),
        tiles=torch.tensor([[0, 0], [EMPTY, EMPTY]]),
        pages=torch.tensor([0] + [STALE] * EMPTY),
    )
    cache = torch.zeros(1, PAGE_SIZE, HEADS, DIM)
    heads = torch.ones(LENGTH, HEADS, DIM)
    slots = torch.arange(LENGTH)
    batch = AttentionBatch([LENGTH], [LENGTH], [torch.zeros(1, dtype=torch.int64)], slots=slots, tables=tables)
    assert tile_tokens(HEADS, HEADS, DIM, heads.itemsize) >= LENGTH
    found = TritonAttention(num_processors=4)(heads, heads, heads, cache, torch.zeros_like(cache), batch)
    torch.testing.assert_close(found, heads)


if __name__ == "__main__":
    main()
