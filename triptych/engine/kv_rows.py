"""Order in which a request's keys and values are transferred: a transfer's rows, and the KV cache as rows.

A row is one token's keys, or its values, in one layer. Where these differ in size between layers or from each other, a
row is the largest number of bytes of which all of them are multiples, and a token has several rows in some layers.

Tokens are transferred in groups, so that the first computed ones go first. A group consists of the keys and then the
values of layer 0, of layer 1, and so on, each token by token. So a layer produces two runs of rows for a group, which
are sent while the next layer is computed.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.layers.attention.base import KVTensors
from triptych.layers.cache_spec import CacheSpec

GROUP = 512
"""Tokens in a group. Larger groups make longer runs, but with a receive pool smaller than a group most parts are
complete only after the last layer. Groups smaller than a step's tokens leave more to send after its last layer, since a
group's rows are all read before the next one's."""


@dataclass(frozen=True)
class KVRun:
    """Consecutive rows of a transfer that are consecutive in one part of a layer: its keys or its values."""

    layer: int
    part: int
    start: int
    """The first one's place among the rows of all of the request's tokens in this part of the layer."""
    num_rows: int
    first_row: int
    """The first one's place in the transfer."""


class TokenRows:
    """The rows of a token in each layer."""

    def __init__(self, specs: Sequence[CacheSpec]) -> None:
        self.row_bytes = gcd(*chain.from_iterable(spec.part_bytes for spec in specs))
        self.parts = [tuple(size // self.row_bytes for size in spec.part_bytes) for spec in specs]
        """Rows in each part of each layer."""
        self.before = list(accumulate(map(sum, self.parts), initial=0))
        """Rows in the layers before each layer, and in all layers."""

    @property
    def num_layers(self) -> int:
        return len(self.parts)

    @property
    def in_all_layers(self) -> int:
        return self.before[-1]

    @property
    def largest_part(self) -> int:
        """Most rows in a part of a layer."""
        return max(chain.from_iterable(self.parts))

    @property
    def largest_run(self) -> int:
        """Most rows that a layer produces for a whole group of tokens."""
        return GROUP * max(map(sum, self.parts))


@dataclass(frozen=True)
class KVRows:
    """Rows of tokens ``[first_token, end_token)`` in all layers."""

    of_token: TokenRows
    first_token: int
    end_token: int

    @property
    def num_rows(self) -> int:
        return self.of_token.in_all_layers * (self.end_token - self.first_token)

    def of_layer(self, layer: int, token: int, end_token: int) -> Iterator[KVRun]:
        """Yield the rows of tokens ``[token, end_token)`` in one layer."""
        while token < end_token:
            group, group_end = self._group(token)
            until = min(end_token, group_end)
            row = self._first_row(group) + self.of_token.before[layer] * (group_end - group)
            for part, size in enumerate(self.of_token.parts[layer]):
                yield KVRun(layer, part, token * size, (until - token) * size, row + (token - group) * size)
                row += (group_end - group) * size
            token = until

    def between(self, row: int, end_row: int) -> Iterator[KVRun]:
        """Yield what the rows ``[row, end_row)`` contain, in order."""
        while row < end_row:
            group, group_end = self._group(self.first_token + row // self.of_token.in_all_layers)
            tokens, offset = group_end - group, row - self._first_row(group)
            layer = bisect_right(self.of_token.before, offset // tokens) - 1
            offset -= self.of_token.before[layer] * tokens
            part, size = 0, self.of_token.parts[layer][0]
            while offset >= size * tokens:
                offset -= size * tokens
                part, size = part + 1, self.of_token.parts[layer][part + 1]
            count = min(size * tokens - offset, end_row - row)
            yield KVRun(layer, part, group * size + offset, count, row)
            row += count

    def _group(self, token: int) -> tuple[int, int]:
        """Return the first token of a token's group, and the one after its last."""
        group = token - (token - self.first_token) % GROUP
        return group, min(group + GROUP, self.end_token)

    def _first_row(self, group: int) -> int:
        return self.of_token.in_all_layers * (group - self.first_token)


class CacheRows:
    """A KV cache on the CPU as rows of bytes. Views: writing to them writes to the cache."""

    def __init__(self, cache: KVTensors, of_token: TokenRows) -> None:
        self.of_token = of_token
        self._parts = [
            (_rows(keys, of_token.row_bytes), _rows(values, of_token.row_bytes))
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        self._page_size = cache.keys[0].shape[1]

    @property
    def num_layers(self) -> int:
        return len(self._parts)

    def of(self, layer: int, part: int, pages: list[int], start: int, num_rows: int) -> Iterator[NDArray[np.uint8]]:
        """Yield rows ``[start, start + num_rows)`` of one part of a layer, of a request with these pages, as one view
        per run of consecutive pages: uint8 of shape (n, row_bytes)."""
        rows, end = self._parts[layer][part], start + num_rows
        page_rows = self._page_size * self.of_token.parts[layer][part]
        while start < end:
            index, offset = divmod(start, page_rows)
            until = index + 1
            while until * page_rows < end and pages[until] == pages[until - 1] + 1:
                until += 1
            count = min(end, until * page_rows) - start
            place = pages[index] * page_rows + offset
            yield rows[place : place + count]
            start += count


def _rows(cache: torch.Tensor, row_bytes: int) -> NDArray[np.uint8]:
    """[pages, page_size, kv_heads, stored_dim] of any dtype → uint8 [rows, row_bytes]."""
    rows: NDArray[np.uint8] = cache.view(-1).view(torch.uint8).view(-1, row_bytes).numpy()
    return rows
