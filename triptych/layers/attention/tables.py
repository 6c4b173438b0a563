"""A step's page tables and lengths as kernels read them: int64 tensors, uploaded to a GPU once for all layers."""

from dataclasses import dataclass, field, fields
from itertools import accumulate

import torch
from torch import Tensor


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class PagedTables:
    """Lengths and page tables of a step's S sequences, all int64 and on one device.

    The kernels run one program, or several, for each entry of ``decodes`` and ``tiles``.
    """

    query_starts: Tensor
    """[S]: index of each sequence's first token in the step."""
    query_lens: Tensor
    """[S]: new tokens of each sequence."""
    kv_lens: Tensor
    """[S]: tokens of each sequence in the cache after the step."""
    page_starts: Tensor
    """[S]: where each sequence's table starts in ``pages``."""
    decodes: Tensor
    """[D]: indices of the sequences that decode, with one new token; programs of negative ones do nothing."""
    tiles: Tensor
    """[N, 2]: index of another sequence, and the first of its new tokens in the tile. A tile of a sequence without new
    tokens is empty."""
    pages: Tensor
    """[entries]: the concatenated page tables."""
    ends: Tensor = field(default_factory=_nothing)
    """[T]: ``AttentionBatch.ends``; of no elements if each token attends up to itself."""

    @classmethod
    def on_cpu(  # noqa: PLR0917 (a batch's fields)
        cls,
        query_lens: list[int],
        kv_lens: list[int],
        page_tables: list[Tensor],
        tile: int,
        ends: Tensor | None = None,
        generated: list[bool] | None = None,
    ) -> "PagedTables":
        """Build the tables from ``AttentionBatch``'s fields, in main memory, with ``tile`` tokens per tile."""
        decodes = generated or [query_len == 1 for query_len in query_lens]
        others = [index for index, decode in enumerate(decodes) if not decode]
        tiles = [(index, first) for index in others for first in range(0, query_lens[index], tile)]
        return cls(
            query_starts=_starts(query_lens),
            query_lens=torch.tensor(query_lens, dtype=torch.int64),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int64),
            page_starts=_starts([len(table) for table in page_tables]),
            decodes=torch.tensor([index for index, decode in enumerate(decodes) if decode], dtype=torch.int64),
            tiles=torch.tensor(tiles, dtype=torch.int64).reshape(-1, 2),
            pages=torch.cat([_nothing(), *page_tables]),
            ends=_nothing() if ends is None else ends,
        )

    def tensors(self) -> list[Tensor]:
        """Return the fields in order, such that ``PagedTables(*tables.tensors())`` equals ``tables``."""
        return [getattr(self, item.name) for item in fields(self)]


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)][:-1], dtype=torch.int64)
