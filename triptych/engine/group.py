"""KV cache allocation of an instance's ranks. All ranks report their memory, rank 0 broadcasts the size, and each rank
allocates its cache. A single process is a group of one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from triptych.config import EngineConfig
from triptych.engine.gpu_forward import GpuForward
from triptych.engine.runner import Forward
from triptych.engine.step_graphs import record_graphs
from triptych.errors import ConfigError
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import cache_bytes
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.devices import free_bytes, used_bytes
from triptych.layers.parallel import Group, ShardedDimension
from triptych.layers.state_spec import ALIGNMENT, StateSpec
from triptych.layers.state_tensors import StateTensors


@dataclass(frozen=True)
class GroupMemory:
    """Memory of a group's ranks, in bytes."""

    used: int
    """On CPUs, the sum over all ranks; on GPUs, which aren't shared, the maximum."""
    free: int
    """The minimum over all ranks."""


@dataclass(frozen=True)
class CacheSize:
    """Size of the KV cache, and what it limits."""

    num_pages: Sequence[int]
    """Pages of each group of layers, including a last one that no request uses."""
    context_length: int
    """Longest request, in tokens."""


@dataclass(frozen=True)
class StateSize:
    """Size of the slots for states."""

    specs: Sequence[StateSpec]
    """What each layer keeps of a request."""
    slots: int
    """States of requests and snapshots together."""
    record_bytes: int


@dataclass(frozen=True)
class GroupCache:
    """The KV cache as one rank sees it."""

    own: KVTensors
    """The heads that the rank computes."""
    whole: KVTensors
    """All heads that the rank can address: on CPUs, those of all ranks."""


def gather_memory(group: Group, device: torch.device) -> GroupMemory:
    """Gather the memory of all ranks on rank 0. Called by all ranks, once they have loaded their weights."""
    group.all_reduce(torch.zeros(1, device=device))  # connects GPUs now, so that the memory counts and no step waits
    gathered = group.gather(torch.tensor([[used_bytes(device), free_bytes(device)]])).view(-1, 2)
    used, free = gathered.unbind(1)
    return GroupMemory(int(used.sum() if device.type == "cpu" else used.max()), int(free.min()))


def agree_on_size(group: Group, num_groups: int, size: CacheSize | None = None) -> CacheSize:
    """Broadcast rank 0's size, for ``num_groups`` groups of layers, to all ranks; the others pass none."""
    numbers = [*size.num_pages, size.context_length] if size else [0] * (num_groups + 1)
    *num_pages, context_length = group.broadcast(torch.tensor(numbers)).tolist()
    return CacheSize(num_pages, context_length)


def make_cache(
    config: DecoderConfig,
    group: Group,
    *,
    num_pages: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    path: str,
    states: StateSize | None = None,
) -> GroupCache:
    """Allocate a rank's KV cache on its device. Called by all ranks. ``config`` is the whole decoder's; ``path`` names
    a file in memory, the same for all ranks; ``states`` is None for a decoder without state. Raises ConfigError for
    states on several GPUs.

    Ranks on CPUs share one cache. In it a token's keys in a layer are contiguous whichever ranks compute them, as in a
    single process, and so are its values. So rank 0 sends and receives whole rows, and the number of ranks doesn't
    matter to the peer. A head computed by several ranks is stored once; they write the same values. Memory is committed
    as pages fill.
    """
    stored = cache_format(dtype)
    if group.size == 1 or device.type != "cpu":
        cache = KVTensors.allocate(config.shard(group.size).cache_specs(stored), num_pages, page_size, device)
        if states is not None:
            if group.size > 1:
                raise ConfigError("--tensor-parallel-size: on GPUs, models with recurrent state are served by one")
            slots = StateTensors.allocate(states.specs, states.slots, states.record_bytes, device)
            cache = replace(cache, states=slots)
        return GroupCache(cache, cache)
    specs = config.cache_specs(stored)
    paged = -(-cache_bytes(specs, num_pages, page_size) // ALIGNMENT) * ALIGNMENT
    of_states = 0 if states is None else states.slots * states.record_bytes
    memory = torch.from_file(path, shared=True, size=paged + of_states, dtype=torch.uint8)
    whole = KVTensors.within(memory, specs, num_pages, page_size)
    own = whole.heads([ShardedDimension(spec.heads).part(group) for spec in specs])
    if states is not None:
        in_slots = StateTensors.within(memory[paged:], states.specs, states.slots)
        whole, own = replace(whole, states=in_slots), replace(own, states=in_slots.heads(group))
    return GroupCache(own, whole)


def make_forward(decoder: Decoder, cache: KVTensors, engine: EngineConfig, context_length: int) -> Forward:
    """Return the function that computes steps in host memory on a rank. Called by all ranks, since on GPUs they record
    graphs together."""
    device = cache.device
    if device.type == "cpu":
        return decoder
    graphs = None
    if engine.cuda_graphs:
        tokens = engine.max_num_batched_tokens
        graphs = record_graphs(decoder, cache, engine.max_num_seqs, tokens, context_length)
    return GpuForward(decoder, device, graphs)
