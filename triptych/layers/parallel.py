"""Tensor parallelism: how the ranks of a group share out a decoder's weights, and add up what each has computed.

Column-parallel layers give each rank some of the outputs, row-parallel layers some of the inputs (Megatron-LM,
arXiv:1909.08053). A column-parallel layer, whatever works on its outputs one by one, and a row-parallel layer need one
all-reduce between them.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from triptych.layers.decoder_config import per_rank

CONNECT_TIMEOUT = timedelta(seconds=30)
"""How long ranks may take to find each other, once all of them are there."""
NO_TIMEOUT = timedelta(days=3650)
"""An idle group waits for its next step. That a rank died is told by its closed sockets and by who watches it."""


class Group(Protocol):
    """The processes (ranks) that share one decoder. All must call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on each of them; ``tensor`` itself, changed."""

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0 the ranks' tensors [T, n], contiguous, side by side: [T, size * n]. Elsewhere ``tensor``."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on all ranks; elsewhere ``tensor``, of the same shape and dtype, takes it in."""


class SingleRank:
    """A group of one process: nothing is shared out, so nothing is sent."""

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
    """Ranks on one machine: over gloo for tensors in main memory, over NCCL for those on GPUs.

    Made by all ranks, once ``store`` says that all are there. Raises RuntimeError when they don't find each other, and
    from every method when another rank is gone.
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
        """Ends what still waits for another rank. May be called from any thread."""
        if nccl := self._backends.get("cuda"):  # gloo notices by itself, by its sockets, that a peer is gone
            nccl.abort()

    def _backend(self, tensor: Tensor) -> Any:
        return self._backends[tensor.device.type]


def rendezvous(path: str, size: int) -> Store:
    """Where ranks tell each other that they are there, and how they can be reached: a file that all can open, and
    nobody else should."""
    store: Store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    return store


def ready_key(rank: int) -> str:
    """The key that a rank sets in the rendezvous when it is ready to connect. To connect takes every rank's attention,
    and can't be broken off when one of them dies."""
    return f"ready_key-{rank}"


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Where a rank computes: each has a GPU of its own, and all share the machine's cores."""
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device


class AllReduce(nn.Module):
    """Adds up what each rank's ``module`` returns."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module = module
        self._group = group

    def forward(self, activations: Tensor) -> Tensor:
        return self._group.all_reduce(self.module(activations))


class Gather(nn.Module):
    """Puts what each rank's ``module`` returns side by side, on rank 0."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module = module
        self._group = group

    def forward(self, activations: Tensor) -> Tensor:
        return self._group.gather(self.module(activations))


@dataclass(frozen=True)
class Dimension:
    """A weight's dimension that is dealt out to the ranks in whole ``units`` of ``width`` values each, as heads are.
    Fewer units than ranks are shared: then several ranks in a row have the same one."""

    units: int
    width: int = 1

    @property
    def size(self) -> int:
        return self.units * self.width

    def part(self, group: Group) -> slice:
        """The values that a rank has."""
        first = group.rank * self.units // group.size
        return slice(first * self.width, (first + per_rank(self.units, group.size)) * self.width)
