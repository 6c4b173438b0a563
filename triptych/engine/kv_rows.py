"""In which order a request's keys and values travel: a transfer's rows, and the KV cache as rows.

A row is one token's keys, or its values, in one layer. Tokens go in groups, so that what prefill computes first goes
first; within a group the keys and then the values of layer 0, of layer 1, …, each token by token: what a layer leaves
behind for a group are two runs of rows, which go out while the next layer is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.layers.attention.base import KVTensors

GROUP = 512
"""Tokens in a group. Larger ones make longer runs; but what a receive pool holds less of than a group comes in parts,
and most of these are whole only once the last layer is computed. Smaller ones than a step's tokens, too, leave more to
do after its last layer: a group's rows are all read before the next one's."""

LAYER_ROWS = 2 * GROUP
"""What a layer leaves behind for a whole group."""

KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class KVRun:
    """Rows ``[first_row, first_row + num_tokens)``: the keys or values (``part``) in ``layer`` of tokens from ``token``
    on. Tokens count from the transfer's first."""

    layer: int
    part: int
    token: int
    num_tokens: int
    first_row: int


@dataclass(frozen=True)
class KVRows:
    """The rows of ``num_tokens`` tokens in ``num_layers`` layers."""

    num_layers: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return 2 * self.num_layers * self.num_tokens

    def of_layer(self, layer: int, token: int, end_token: int) -> Iterator[KVRun]:
        """The rows of tokens ``[token, end_token)`` in one layer."""
        while token < end_token:
            group = token - token % GROUP
            length = min(GROUP, self.num_tokens - group)
            until = min(end_token, group + length)
            for part in (KEYS, VALUES):
                row = 2 * self.num_layers * group + (2 * layer + part) * length + token - group
                yield KVRun(layer, part, token, until - token, row)
            token = until

    def between(self, row: int, end_row: int) -> Iterator[KVRun]:
        """What the rows ``[row, end_row)`` are, in order."""
        while row < end_row:
            group = row // (2 * self.num_layers * GROUP) * GROUP
            length = min(GROUP, self.num_tokens - group)
            run, offset = divmod(row - 2 * self.num_layers * group, length)
            layer, part = divmod(run, 2)
            count = min(length - offset, end_row - row)
            yield KVRun(layer, part, group + offset, count, row)
            row += count


class CacheRows:
    """A KV cache on the CPU as rows of bytes: views, so what is written here is in the cache."""

    def __init__(self, cache: KVTensors) -> None:
        self._parts = [(_rows(keys), _rows(values)) for keys, values in zip(cache.keys, cache.values, strict=True)]
        self._page_size = cache.keys[0].shape[1]

    @property
    def num_layers(self) -> int:
        return len(self._parts)

    def of(self, layer: int, part: int, pages: list[int], token: int, num_tokens: int) -> Iterator[NDArray[np.uint8]]:
        """Tokens ``[token, token + num_tokens)`` of a request that lies in these pages: as few views as there are
        consecutive runs, uint8 of shape (n, row_bytes)."""
        end = token + num_tokens
        while token < end:
            index, offset = divmod(token, self._page_size)
            until = index + 1
            while until * self._page_size < end and pages[until] == pages[until - 1] + 1:
                until += 1
            count = min(end, until * self._page_size) - token
            slot = pages[index] * self._page_size + offset
            yield self._parts[layer][part][slot : slot + count]
            token += count


def _rows(cache: torch.Tensor) -> NDArray[np.uint8]:
    """[pages, page_size, kv_heads, head_dim] of any dtype → uint8 [pages * page_size, row_bytes]."""
    rows: NDArray[np.uint8] = cache.flatten(0, 1).flatten(1).view(torch.uint8).numpy()
    return rows
