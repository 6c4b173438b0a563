"""Tensor parallelism: divides a decoder's weights among the ranks of a group, and combines their results.

Column-parallel layers give each rank some of the outputs, row-parallel layers some of the inputs (Megatron-LM,
arXiv:1909.08053). A column-parallel layer, any elementwise operations, and a row-parallel layer together need one
all-reduce.
"""

from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from triptych.layers.specs import per_rank

CONNECT_TIMEOUT = timedelta(seconds=30)
"""How long ranks may take to connect to each other, once all of them are ready."""
NO_TIMEOUT = timedelta(days=3650)
"""Practically infinite, because an idle group waits for its next step. A dead rank is detected by its closed sockets
and by the supervisor."""


class Group(Protocol):
    """The processes (ranks) that share one decoder. All must call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the ranks' tensors in place, and return ``tensor``."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' contiguous tensors [T, n] concatenated, [T, size * n], on rank 0; elsewhere ``tensor``."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor on all ranks; elsewhere it overwrites ``tensor``, of the same shape and dtype."""


class SingleRank:
    """A group of one process, which communicates nothing."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor


SINGLE_RANK = SingleRank()


class ProcessGroup:
    """Ranks on one machine, connected by gloo for tensors in main memory and by NCCL for those on GPUs.

    All ranks construct it at the same time, once ``store`` shows that all are ready. Raises RuntimeError if they can't
    connect, and from every method if another rank is gone.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECT_TIMEOUT
        self._backends: dict[str, Any] = {"cpu": gloo(PrefixStore("gloo", store), rank, size, options)}
        self._backends["cpu"].set_timeout(NO_TIMEOUT)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NO_TIMEOUT
            self._backends["cuda"] = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._backend(tensor).allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        self._backend(tensor).gather([parts] if parts else [], [tensor], options).wait()
        return torch.cat(parts, dim=1) if parts else tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._backend(tensor).broadcast([tensor], options).wait()
        return tensor

    def abort(self) -> None:
        """Abort operations that wait for another rank. Thread-safe."""
        if nccl := self._backends.get("cuda"):  # gloo notices by its sockets that a peer is gone
            nccl.abort()

    def _backend(self, tensor: Tensor) -> Any:
        return self._backends[tensor.device.type]


def rendezvous(path: str, size: int) -> Store:
    """Return the store with which ranks find each other: a file that all ranks, and no other user, can open."""
    store: Store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    return store


def ready_key(rank: int) -> str:
    """Return the key that a rank sets in the rendezvous when it is ready to connect.

    Ranks wait for all of these keys first, because connecting blocks every rank and can't be aborted if one dies.
    """
    return f"ready-{rank}"


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return a rank's device: on GPUs, each rank has one of its own; on CPUs, all share the machine's cores."""
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device


class AllReduce(nn.Module):
    """Sums the outputs of the ranks' ``module``."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module = module
        self._group = group

    def forward(self, *inputs: Any) -> Tensor:
        return self._group.all_reduce(self.module(*inputs))


class GatherLogits(nn.Module):
    """Concatenates the outputs of the ranks' ``module`` on rank 0."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module = module
        self._group = group

    def forward(self, activations: Tensor) -> Tensor:
        return self._group.gather(self.module(activations))


@dataclass(frozen=True)
class ShardedDimension:
    """A weight's dimension that is divided among the ranks in whole units, such as heads.

    If there are fewer units than ranks, consecutive ranks share a unit.
    """

    units: int
    width: int = 1
    """Values per unit."""
    order: tuple[int, ...] | None = None
    """Which of a unit's values, as stored, stands where; None: all stand as stored."""
    parts: tuple[int, ...] = ()
    """Sizes of a unit's parts: the first parts of all units stand before all second ones. Empty: units are whole."""

    @property
    def size(self) -> int:
        return self.units * self.width

    def part(self, group: Group) -> slice:
        """Return the range of values that belongs to a rank."""
        first = group.rank * self.units // group.size
        return slice(first * self.width, (first + per_rank(self.units, group.size)) * self.width)

    def index(self, group: Group) -> Tensor:
        """Return the indices of the stored values that belong to a rank, int64, in the order in which they stand."""
        part = self.part(group)
        units = torch.arange(part.start, part.stop).view(-1, self.width)
        units = units if self.order is None else units[:, list(self.order)]
        return torch.cat([one.flatten() for one in units.split(self.parts or (self.width,), dim=1)])

    def stored(self, group: Group) -> slice | Tensor:
        """Return which of the stored values belong to a rank, as a range if they are one and stand as stored."""
        return self.part(group) if self.order is None and not self.parts else self.index(group)


@dataclass(frozen=True)
class Segments:
    """Dimensions that are stored as one, one after the other. Each is divided among the ranks by itself."""

    dimensions: tuple[ShardedDimension, ...]

    @property
    def size(self) -> int:
        return sum(one.size for one in self.dimensions)

    def index(self, group: Group) -> Tensor:
        """Return the indices of the stored values that belong to a rank, int64, in the order in which they stand."""
        starts = accumulate((one.size for one in self.dimensions), initial=0)
        return torch.cat([start + one.index(group) for start, one in zip(starts, self.dimensions, strict=False)])

    def stored(self, group: Group) -> Tensor:
        """Return which of the stored values belong to a rank: ``index``, since they aren't one range."""
        return self.index(group)
