"""What the ranks of a group do together before their first step: they say how much memory there is, hear from rank 0
how large the KV cache is, and make it. An instance of one process goes the same way, as a group of one."""

import math
from dataclasses import dataclass

import torch

from triptych.config import EngineConfig
from triptych.engine.decode_graphs import record_graphs
from triptych.engine.gpu_forward import GpuForward
from triptych.engine.runner import Forward
from triptych.layers.attention.base import KVTensors
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.devices import free_bytes, used_bytes
from triptych.layers.parallel import Dimension, Group


@dataclass(frozen=True)
class GroupMemory:
    """In bytes. ``used``: by all ranks together, or by the one that uses most, where each has a GPU's to itself;
    ``free``: what can still be had, where there is the least of it."""

    used: int
    free: int


@dataclass(frozen=True)
class CacheSize:
    """Of the KV cache, in pages (of which the last belongs to nobody), and of the longest request, in tokens."""

    num_pages: int
    context_length: int


@dataclass(frozen=True)
class GroupCache:
    """The KV cache as a rank has it. ``own``: the heads that it computes; ``whole``: all that it can address, which on
    CPUs are those of all ranks."""

    own: KVTensors
    whole: KVTensors


def gather_memory(group: Group, device: torch.device) -> GroupMemory:
    """Called by all ranks, each for its device, once they have loaded their weights; only rank 0 hears of the
    others."""
    group.all_reduce(torch.zeros(1, device=device))  # connects GPUs: what that takes counts, and no step waits for it
    told = group.gather(torch.tensor([[used_bytes(device), free_bytes(device)]])).view(-1, 2)
    used, free = told.unbind(1)
    return GroupMemory(int(used.sum() if device.type == "cpu" else used.max()), int(free.min()))


def agree_on_size(group: Group, size: CacheSize | None = None) -> CacheSize:
    """Rank 0's size, on all ranks; the others give none."""
    numbers = [size.num_pages, size.context_length] if size else [0, 0]
    return CacheSize(*group.broadcast(torch.tensor(numbers)).tolist())


def make_cache(
    config: DecoderConfig,
    group: Group,
    *,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    path: str,
) -> GroupCache:
    """A rank's cache on its device. ``config`` is the whole decoder's; ``path`` names a file in memory, the same for
    all ranks. Called by all of them.

    Ranks on CPUs share one cache. In it a token's keys in a layer, and its values, lie side by side whichever rank
    computes them, as they do in the cache of one process: so rank 0 sends and receives whole rows, and to the other end
    it makes no difference how many ranks there are here. A head that several ranks compute is there once, and they
    write the same to it. Memory is committed as pages fill.
    """
    if group.size == 1 or device.type != "cpu":
        cache = KVTensors.allocate(config.shard(group.size), num_pages, page_size, dtype, device)
        return GroupCache(cache, cache)
    shape = (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim)
    memory = torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    heads = Dimension(config.num_kv_heads).part(group)
    return GroupCache(own=KVTensors.within(memory, heads), whole=KVTensors.within(memory, slice(None)))


def make_forward(decoder: Decoder, cache: KVTensors, engine: EngineConfig, context_length: int) -> Forward:
    """How a rank computes steps that it has in host memory. Called by all ranks, since on GPUs they record graphs
    together."""
    device = cache.keys[0].device
    if device.type == "cpu":
        return decoder
    graphs = record_graphs(decoder, cache, engine.max_num_seqs, context_length) if engine.cuda_graphs else None
    return GpuForward(decoder, device, graphs)
