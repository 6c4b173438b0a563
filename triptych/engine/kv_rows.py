"""Order in which a request's keys and values are transferred: a transfer's rows.

A row is one token's keys, or its values, in one layer. Where these differ in size between layers or from each other, a
row is the largest number of bytes of which all of them are multiples, and a token has several rows in some layers.

Tokens are transferred in groups, so that the first computed ones go first. A group consists of the keys and then the
values of layer 0, of layer 1, and so on, each token by token. So a layer produces two runs of rows for a group, which
are sent while the next layer is computed. In a layer with a sliding window only the tokens that a decode step can
still read have rows.

The state of a request, in models that have any, follows as the last rows, since it is complete only after the last
step.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import gcd

from triptych.layers.cache_spec import CacheGroups, CacheSpec, first_sent
from triptych.layers.state_spec import StateSpec, record_rows

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

    def __init__(self, specs: Sequence[CacheSpec], states: Sequence[StateSpec] = ()) -> None:
        """``states`` are those of a request, whose rows follow its tokens'."""
        self.row_bytes = gcd(*chain.from_iterable(spec.part_bytes for spec in specs))
        self.parts = [tuple(size // self.row_bytes for size in spec.part_bytes) for spec in specs]
        """Rows in each part of each layer."""
        self.of_state = record_rows(states, self.row_bytes)
        """Rows of a request's state in all layers."""
        self.layer_groups = CacheGroups.of(spec.window for spec in specs)
        self.before = [
            list(accumulate((sum(parts) * (group == own) for parts, own in self._by_layer), initial=0))
            for group in range(len(self.layer_groups.windows))
        ]
        """By group of layers, its rows in the layers before each layer, and in all layers."""

    @property
    def num_layers(self) -> int:
        return len(self.parts)

    @property
    def in_all_layers(self) -> int:
        return sum(before[-1] for before in self.before)

    @property
    def largest_part(self) -> int:
        """Most rows in a part of a layer."""
        return max(chain.from_iterable(self.parts))

    @property
    def largest_run(self) -> int:
        """Most rows that a layer produces for a whole group of tokens."""
        return GROUP * max(map(sum, self.parts))

    @property
    def _by_layer(self) -> Iterator[tuple[tuple[int, ...], int]]:
        return zip(self.parts, self.layer_groups.of_layer, strict=True)


class KVRows:
    """Rows of the tokens ``[first_token, end_token)``; in layers with a window, of those that the token at
    ``end_token`` reads."""

    def __init__(self, of_token: TokenRows, first_token: int, end_token: int) -> None:
        """``end_token`` must be larger than ``first_token``."""
        self.of_token = of_token
        self.first_token = first_token
        self.end_token = end_token
        self.first_tokens = [first_sent(window, first_token, end_token) for window in of_token.layer_groups.windows]
        """By group of layers, the first token that has rows."""
        self.num_token_rows = self._rows_before(end_token)
        self.num_rows = self.num_token_rows + of_token.of_state

    def of_layer(self, layer: int, token: int, end_token: int) -> Iterator[KVRun]:
        """Yield the rows of tokens ``[token, end_token)`` in one layer."""
        first_token = self.first_tokens[self.of_token.layer_groups.of_layer[layer]]
        token = max(token, first_token)
        while token < end_token:
            group, group_end = self._group(token)
            until, first = min(end_token, group_end), max(group, first_token)
            row = self._rows_before(group) + self._before_layer(layer, self._tokens_in(group, group_end))
            for part, size in enumerate(self.of_token.parts[layer]):
                yield KVRun(layer, part, token * size, (until - token) * size, row + (token - first) * size)
                row += (group_end - first) * size
            token = until

    def between(self, row: int, end_row: int) -> Iterator[KVRun]:
        """Yield what the rows ``[row, end_row)`` contain, in order, without those of the state."""
        end_row = min(end_row, self.num_token_rows)
        group = self._group_of_row(row) if row < end_row else self.end_token
        while group < self.end_token:
            _, group_end = self._group(group)
            counts, first_row = self._tokens_in(group, group_end), self._rows_before(group)
            offset, layers = row - first_row, range(self.of_token.num_layers)
            begin = bisect_right(layers, offset, key=lambda layer: self._before_layer(layer, counts)) - 1
            first_row += self._before_layer(begin, counts)
            for layer in layers[begin:]:
                count = counts[self.of_token.layer_groups.of_layer[layer]]
                for part, size in enumerate(self.of_token.parts[layer]):
                    last_row = min(end_row, first_row + count * size)
                    if row < last_row:
                        start = (group_end - count) * size + row - first_row
                        yield KVRun(layer, part, start, last_row - row, row)
                        row = last_row
                    first_row += count * size
                if first_row >= end_row:
                    return
            group = group_end

    def _group(self, token: int) -> tuple[int, int]:
        """Return the first token of a token's group, and the one after its last."""
        group = token - (token - self.first_token) % GROUP
        return group, min(group + GROUP, self.end_token)

    def _group_of_row(self, row: int) -> int:
        groups = range(self.first_token, self.end_token, GROUP)
        return groups[bisect_right(groups, row, key=self._rows_before) - 1]

    def _rows_before(self, token: int) -> int:
        """Return the number of rows of earlier tokens."""
        firsts = zip(self.of_token.before, self.first_tokens, strict=True)
        return sum(before[-1] * max(0, token - first) for before, first in firsts)

    def _tokens_in(self, group: int, group_end: int) -> list[int]:
        """Return, by group of layers, how many tokens of a group of tokens have rows."""
        return [max(0, group_end - max(group, first)) for first in self.first_tokens]

    def _before_layer(self, layer: int, counts: list[int]) -> int:
        """Return how many rows a group of tokens, of which ``counts`` have rows, has before a layer's."""
        return sum(before[layer] * count for before, count in zip(self.of_token.before, counts, strict=True))
