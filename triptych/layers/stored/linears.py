"""Linear layers' weights as checkpoints store them: parts of them are taken, and become one layer, before they are
converted and packed. So no more is converted at a time than one layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from triptych.layers.block_weight import BlockWeight, concatenate_blocks
from triptych.layers.grouped_weight import GroupedWeight, by_rows, concatenate_grouped
from triptych.layers.int8 import Int8Weight, concatenate_int8
from triptych.layers.linear import ConcatenatedLinear, Linear, WeightFormat
from triptych.layers.products import AT_ONCE
from triptych.layers.stored.format import LayerTensors


class StoredLinear(Protocol):
    """A weight W [out, in]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    def rows(self, part: slice | Tensor) -> "StoredLinear":
        """Return a range of the outputs, or those with the given indices, int64."""

    def columns(self, part: slice) -> "StoredLinear":
        """Return a range of the inputs. Raises ConfigError if the weight can't be divided there."""

    def dequantized(self) -> Tensor:
        """Return W, in any floating dtype: memory-mapped if it is stored like that."""


@dataclass(frozen=True)
class DenseWeight:
    """A weight in floating point."""

    weight: Tensor
    """[out, in]."""

    @property
    def shape(self) -> tuple[int, int]:
        """See ``StoredLinear``."""
        outputs, inputs = self.weight.shape
        return outputs, inputs

    def rows(self, part: slice | Tensor) -> "DenseWeight":
        """See ``StoredLinear``."""
        return DenseWeight(self.weight[part])

    def columns(self, part: slice) -> "DenseWeight":
        """See ``StoredLinear``."""
        return DenseWeight(self.weight[:, part])

    def dequantized(self) -> Tensor:
        """See ``StoredLinear``."""
        return self.weight


@dataclass(frozen=True)
class ScaledWeight:
    """A weight of numbers that groups of them scale, W[o, i] = (values[o, i] - zeros[r, c]) * scales[r, c], where r is
    ``row_groups[o]`` and c is ``column_groups[i]``. It is dequantized when it becomes a layer."""

    values: Tensor
    """[out, in], of any dtype; integers, if there are ``levels``."""
    scales: Tensor
    """Floats [R, C]."""
    zeros: Tensor | None
    """Integers [R, C]; None: all are 0."""
    row_groups: Tensor
    """int64 [out]."""
    column_groups: Tensor
    """int64 [in]."""
    levels: Tensor | None = None
    """Floats [n]: the numbers that ``values`` are the indices of; None: they are the numbers."""

    @property
    def shape(self) -> tuple[int, int]:
        """See ``StoredLinear``."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    def rows(self, part: slice | Tensor) -> "ScaledWeight":
        """See ``StoredLinear``."""
        return replace(self, values=self.values[part], row_groups=self.row_groups[part])

    def columns(self, part: slice) -> "ScaledWeight":
        """See ``StoredLinear``."""
        return replace(self, values=self.values[:, part], column_groups=self.column_groups[part])

    def dequantized(self) -> Tensor:
        """See ``StoredLinear``; float32."""
        return by_rows(self.shape, self.values.device, self._floats)

    def _floats(self, rows: slice) -> Tensor:
        groups, values = self.row_groups[rows], self.values[rows]
        weight = values.float() if self.levels is None else self.levels[values.int()].float()
        if self.zeros is not None:
            weight -= self.zeros[groups].float()[:, self.column_groups]
        return weight.mul_(self.scales[groups].float()[:, self.column_groups])


def finite(scales: Tensor, tensors: LayerTensors, kind: str) -> Tensor:
    """Return a layer's scales, the tensor ``kind``, in float32. Raises CheckpointError, naming it, unless all are
    finite."""
    wide = scales.float()
    if not wide.is_meta and not wide.isfinite().all():
        raise tensors.wrong(f"{kind} has values that aren't finite")
    return wide


def linear_of(
    parts: Sequence[StoredLinear],
    bias: Tensor | None,
    weights: WeightFormat,
    device: torch.device,
    *,
    is_sensitive: bool = False,
) -> Linear:
    """Make the layer that concatenates the outputs of ``parts``, of the same inputs, with a bias [out];
    ``is_sensitive``: as ``WeightFormat.sensitive`` does.

    Parts of one kind are one product; others are multiplied apart. Raises ConfigError for an unsupported device.
    """
    runs = [list(run) for _, run in groupby(parts, _kind)]
    sizes = [sum(one.shape[0] for one in run) for run in runs]
    biases = [None] * len(runs) if bias is None else bias.split(sizes)
    linears = []
    for run, vector in zip(runs, biases, strict=True):
        if grouped := [one for one in run if isinstance(one, GroupedWeight)]:
            linears.append(weights.grouped(concatenate_grouped(grouped), vector, device))
        elif blocks := [one for one in run if isinstance(one, BlockWeight) and one.part is None]:
            together = [concatenate_blocks(list(some)) for _, some in groupby(blocks, lambda one: one.type)]
            linears.append(weights.blocks(together, vector, device))
        elif whole := [one for one in run if isinstance(one, Int8Weight)]:
            linears.append(weights.int8(concatenate_int8(whole), vector, device))
        else:
            make = weights.sensitive if is_sensitive else weights.linear
            linears.append(make(_dense(run), vector, device))
    return linears[0] if len(linears) == 1 else ConcatenatedLinear(linears)


def _kind(weight: StoredLinear) -> tuple[type, int, bool]:
    """Return what weights of one product have in common: their class, that of dense ones for those that are
    dequantized, and of 4-bit weights the inputs per group, 0 for others, and whether groups have offsets."""
    if isinstance(weight, GroupedWeight):
        return GroupedWeight, weight.group, weight.offsets is not None
    if isinstance(weight, BlockWeight) and weight.part is None:
        return BlockWeight, 0, False
    return Int8Weight if isinstance(weight, Int8Weight) else DenseWeight, 0, False


def _dense(parts: Sequence[StoredLinear]) -> Tensor:
    """Return the parts' weights as one, converted one after the other."""
    if len(parts) == 1:
        return parts[0].dequantized()
    if all(isinstance(one, DenseWeight) for one in parts):
        return concatenate([one.dequantized() for one in parts])
    first = parts[0].rows(slice(0, 1)).dequantized()
    whole, row = first.new_empty((sum(one.shape[0] for one in parts), first.shape[1]), dtype=torch.float32), 0
    together = max(1, AT_ONCE // max(1, first.shape[1]))
    for part in parts:
        for start in range(0, part.shape[0], together):
            some = part.rows(slice(start, start + together)).dequantized()
            whole[row : row + len(some)] = some
            row += len(some)
    return whole


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; a single one is returned itself, memory-mapped."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
