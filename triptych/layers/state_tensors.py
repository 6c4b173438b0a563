"""The states of a rank's layers, in slots: one for each request that has state, and one for each snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.layers.attention.kv_format import dtype_of
from triptych.layers.delta_rule.base import DeltaBatch
from triptych.layers.parallel import Group, ShardedDimension
from triptych.layers.state_spec import StateSpec


@dataclass(frozen=True)
class StateBatch:
    """What one step does with the states of its S sequences."""

    delta: DeltaBatch
    starts: list[int]
    """[S]: tokens that each sequence's state includes before the step."""
    loads: list[tuple[int, int, int]]
    """Before the step: a snapshot, the slot that it is copied to, and the tokens that it includes."""
    saves: list[tuple[int, int]]
    """After the step: a snapshot, and the slot that it is copied from."""


@dataclass(frozen=True)
class StateTensors:
    """The states of the layers that have any. A slot's record is contiguous, so copies and transfers know nothing of
    layers."""

    records: Tensor
    """uint8 [slots, record bytes]."""
    layers: list[tuple[Tensor, ...]]
    """Views of the parts of each layer, [slots, ...]; a slot's part is contiguous, and between slots there are gaps."""

    @classmethod
    def allocate(cls, specs: Sequence[StateSpec], slots: int, num_bytes: int, device: torch.device) -> "StateTensors":
        """Allocate uninitialised slots with records of ``num_bytes``; on CPUs memory is committed as it fills."""
        return cls.within(torch.empty(slots * num_bytes, dtype=torch.uint8, device=device), specs, slots)

    @classmethod
    def within(cls, memory: Tensor, specs: Sequence[StateSpec], slots: int) -> "StateTensors":
        """Return views of ``memory``, uint8, which is divided into ``slots`` records."""
        records, taken, layers = memory.view(slots, -1), 0, []
        for spec in specs:
            parts = []
            for part in spec:
                values = records[:, taken : taken + part.num_bytes].view(dtype_of(part.format))
                parts.append(values.unflatten(1, part.shape))
                taken += part.num_bytes
            layers.append(tuple(parts))
        return cls(records, layers)

    def heads(self, group: Group) -> "StateTensors":
        """Return the same records, and views of this rank's heads of each layer. The convolution's inputs stay those of
        all heads: a rank's channels are three ranges of them."""
        own: list[tuple[Tensor, ...]] = []
        for recurrent, *rest in self.layers:
            part = ShardedDimension(recurrent.shape[1]).part(group)
            own.append((recurrent[:, part], *rest))
        return StateTensors(self.records, own)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot's record."""
        self.records[target].copy_(self.records[source])
