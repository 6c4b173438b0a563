"""A step's page tables and lengths as kernels read them: a few int64 tensors, on a GPU uploaded once for all layers."""

from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedTables:
    """S sequences of a step, all int64 and on one device. ``decodes`` and ``tiles`` say which programs run: their
    shapes, which the host knows, are the launch."""

    query_starts: Tensor
    """[S]: the first of each sequence's tokens among the step's."""
    query_lens: Tensor
    """[S]"""
    kv_lens: Tensor
    """[S]"""
    page_starts: Tensor
    """[S]: where each sequence's table begins in ``pages``."""
    decodes: Tensor
    """[D]: the sequences with one new token."""
    tiles: Tensor
    """[N, 2]: a sequence with several, and the first of its new tokens that a tile holds, counted from its own."""
    pages: Tensor
    """The page tables, one after the other."""

    @classmethod
    def on_cpu(cls, query_lens: list[int], kv_lens: list[int], page_tables: list[Tensor], tile: int) -> "PagedTables":
        """The tables of ``AttentionBatch``'s fields, in host memory; ``tile`` tokens make a tile."""
        several = [index for index, query_len in enumerate(query_lens) if query_len > 1]
        tiles = [(index, first) for index in several for first in range(0, query_lens[index], tile)]
        return cls(
            query_starts=_starts(query_lens),
            query_lens=torch.tensor(query_lens, dtype=torch.int64),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int64),
            page_starts=_starts([len(table) for table in page_tables]),
            decodes=torch.tensor([i for i, query_len in enumerate(query_lens) if query_len == 1], dtype=torch.int64),
            tiles=torch.tensor(tiles, dtype=torch.int64).reshape(-1, 2),
            pages=torch.cat(page_tables),
        )

    def tensors(self) -> list[Tensor]:
        """The fields, in order: ``PagedTables(*tables.tensors())`` is the same again."""
        return [getattr(self, item.name) for item in fields(self)]


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)][:-1], dtype=torch.int64)
