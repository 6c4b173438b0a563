"""Order in which a request's keys and values are transferred: a transfer's rows, and the KV cache as rows.

A row is one token's keys, or its values, in one layer. Tokens are transferred in groups, so that the first computed
ones go first. A group consists of the keys and then the values of layer 0, of layer 1, and so on, each token by token.
So a layer produces two runs of rows for a group, which are sent while the next layer is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.layers.attention.base import KVTensors

GROUP = 512
"""Tokens in a group. Larger groups make longer runs, but with a receive pool smaller than a group most parts are
complete only after the last layer. Groups smaller than a step's tokens leave more to send after its last layer, since a
group's rows are all read before the next one's."""

LAYER_ROWS = 2 * GROUP
"""Rows that a layer produces for a whole group."""

KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class KVRun:
    """Rows ``[first_row, first_row + num_tokens)`` of a transfer: the keys or values of consecutive tokens in one
    layer."""

    layer: int
    part: int
    token: int
    num_tokens: int
    first_row: int


@dataclass(frozen=True)
class KVRows:
    """Rows of ``num_tokens`` tokens in ``num_layers`` layers."""

    num_layers: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return 2 * self.num_layers * self.num_tokens

    def of_layer(self, layer: int, token: int, end_token: int) -> Iterator[KVRun]:
        """Yield the rows of tokens ``[token, end_token)`` in one layer."""
        while token < end_token:
            group = token - token % GROUP
            length = min(GROUP, self.num_tokens - group)
            until = min(end_token, group + length)
            for part in (KEYS, VALUES):
                row = 2 * self.num_layers * group + (2 * layer + part) * length + token - group
                yield KVRun(layer, part, token, until - token, row)
            token = until

    def between(self, row: int, end_row: int) -> Iterator[KVRun]:
        """Yield what the rows ``[row, end_row)`` contain, in order."""
        while row < end_row:
            group = row // (2 * self.num_layers * GROUP) * GROUP
            length = min(GROUP, self.num_tokens - group)
            run, offset = divmod(row - 2 * self.num_layers * group, length)
            layer, part = divmod(run, 2)
            count = min(length - offset, end_row - row)
            yield KVRun(layer, part, group + offset, count, row)
            row += count


class CacheRows:
    """A KV cache on the CPU as rows of bytes. Views: writing to them writes to the cache."""

    def __init__(self, cache: KVTensors) -> None:
        self._parts = [(_rows(keys), _rows(values)) for keys, values in zip(cache.keys, cache.values, strict=True)]
        self._page_size = cache.keys[0].shape[1]

    @property
    def num_layers(self) -> int:
        return len(self._parts)

    def of(self, layer: int, part: int, pages: list[int], token: int, num_tokens: int) -> Iterator[NDArray[np.uint8]]:
        """Yield tokens ``[token, token + num_tokens)`` of a request with these pages, as one view per run of
        consecutive pages: uint8 of shape (n, row_bytes)."""
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
    """[pages, page_size, kv_heads, stored_dim] of any dtype → uint8 [pages * page_size, row_bytes]."""
    rows: NDArray[np.uint8] = cache.flatten(0, 1).flatten(1).view(torch.uint8).numpy()
    return rows
