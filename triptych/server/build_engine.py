"""Builds what an instance prefills and decodes with."""

import logging

import torch

from triptych.config import EngineConfig
from triptych.engine.cache_manager import CacheManager
from triptych.engine.cache_rows import cache_rows
from triptych.engine.gpu_runner import GpuRunner
from triptych.engine.grammar.service import GrammarService
from triptych.engine.group import CacheSize, GroupCache, agree_on_size, gather_memory, make_forward
from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_size import KVSize, gib, kv_size
from triptych.engine.loop import EngineCore
from triptych.engine.pinned_memory import PinnedSharedMemory
from triptych.engine.runner import Forward, MediaEmbeddings, Runner
from triptych.engine.scheduler import MAX_SCORED, Scheduler
from triptych.engine.state_records import StateRecords
from triptych.engine.state_slots import StateSlots
from triptych.errors import StartError
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.devices import dtype_name, widens_kv
from triptych.layers.parallel import Group, rank_device
from triptych.messages.rows import RowKind
from triptych.server.components import EngineComponents, PoolSize
from triptych.server.instance import InstanceProcess
from triptych.server.model_bundle import ModelBundle
from triptych.server.ranks import Ranks
from triptych.topology import Role
from triptych.transfer.memory import SharedMemory

log = logging.getLogger(__name__)

FIRST_USE = 32 * 2**20
"""Bytes that PyTorch's kernels and its allocator keep once they have been used."""


def build_engine(
    *,
    model: ModelBundle,
    decoder: Decoder,
    instance: InstanceProcess,
    role: Role,
    engine: EngineConfig,
    ranks: Ranks,
    group: Group,
    check_always: bool,
) -> EngineComponents:
    """Return the engine and its KV cache; a cache that ranks share has the heads of all. The ranks report their free
    memory, agree on the size of the KV cache, and allocate it. Raises StartError for settings that don't fit."""
    if role.prefills:
        check_step(model.planner.atomic_rows, engine)
    device = rank_device(model.device, 0)
    pools = _receive_pools(model, engine, device)
    layout = model.kv_layout if role.takes_kv else model.row_layout
    receive_bytes = pools[layout.kind].num_rows * layout.row_bytes
    size = _agreed_size(model, decoder.config, engine, ranks, group, receive_bytes=receive_bytes)
    _warn_of_slow_kv(model.weights.activations, model.kv_dtype, device)
    with ranks.collective():
        # a page more than the pool hands out: the padding of CUDA graphs is written there
        with_scratch = CacheSize([pages + 1 for pages in size.num_pages], size.context_length)
        agreed = agree_on_size(group, len(with_scratch.num_pages), with_scratch)
        cache = model.make_cache(group, agreed.num_pages, ranks.cache)
        forward = make_forward(decoder, cache.own, engine, size.context_length)
    pages = [PagePool(count, engine.page_size) for count in size.num_pages]
    states = _state_slots(engine) if decoder.config.has_state else None
    scheduler = Scheduler(
        CacheManager(pages, model.kv_rows.layer_groups.windows, states),
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        reuse_prefixes=engine.enable_prefix_caching,
        layout=model.kv_layout.digest,
    )
    broadcasting = ranks.broadcasting(forward, group, model.weights.activations)
    return EngineComponents(
        engine=EngineCore(
            scheduler=scheduler,
            runner=_runner(broadcasting, cache, engine, device),
            compute=instance.compute,
            clock=instance.clock,
            grammars=_grammars(model, decoder, instance),
            no_media=MediaEmbeddings.none(model.adapter.embedding_width, model.weights.activations),
            context_length=size.context_length,
            vocab_size=decoder.config.vocab_size,
            length_rule=decoder.config.length_rule,
            loras=[lora.name for lora in decoder.config.loras],
            has_second_weights=decoder.config.second is not None,
        ),
        kv_rows=cache_rows(cache.whole, model.kv_rows),
        embedding_dtype=model.weights.activations,
        embedding_width=model.adapter.embedding_width,
        receive_pools=pools,
        check_always=check_always,
    )


def _grammars(model: ModelBundle, decoder: Decoder, instance: InstanceProcess) -> GrammarService:
    """Return the grammars of answers, which end with the instance."""
    vocabulary, wake = decoder.config.vocab_size, instance.channel.wake
    grammars = GrammarService(model.checkpoint.folder, vocabulary, wake, instance.start_executor)
    instance.at_end(grammars.close)
    return grammars


def _receive_pools(model: ModelBundle, engine: EngineConfig, device: torch.device) -> dict[RowKind, PoolSize]:
    rows = model.kv_rows
    allocate = SharedMemory if device.type == "cpu" else PinnedSharedMemory
    block_rows = engine.receive_block_rows * rows.largest_part
    return {
        RowKind.MEDIA: PoolSize(engine.receive_blocks, engine.receive_block_rows),
        RowKind.KV: PoolSize(engine.kv_receive_blocks, block_rows, rows.largest_run, allocate),
    }


def check_step(atomic_rows: int, engine: EngineConfig) -> None:
    """Raise StartError if a step can't hold an atomic span of ``atomic_rows`` tokens."""
    if atomic_rows > engine.max_num_batched_tokens:
        raise StartError(
            f"--max-num-batched-tokens {engine.max_num_batched_tokens}: one step must compute the {atomic_rows} tokens "
            "of an image, which attend to each other"
        )


def _agreed_size(
    model: ModelBundle, config: DecoderConfig, engine: EngineConfig, ranks: Ranks, group: Group, *, receive_bytes: int
) -> KVSize:
    """Return the size of the KV cache, from the free memory of all ranks. ``config`` is that of this rank's shard."""
    device = rank_device(model.device, 0)
    cached = model.adapter.decoder_config if device.type == "cpu" else config  # ranks on CPUs share one cache
    with ranks.collective():
        memory = gather_memory(group, device)
    size = kv_size(
        engine,
        specs=cached.cache_specs(cache_format(model.kv_dtype)),
        model_context=model.planner.context_length,
        available=memory.free,
        record_bytes=model.state_size.record_bytes,
    )
    logits = engine.max_num_seqs + min(MAX_SCORED, engine.max_num_batched_tokens)
    ranks_sharing_memory = group.size if device.type == "cpu" else 1
    largest_step = config.step_bytes(engine.max_num_batched_tokens, logits, size.context_length)
    step = ranks_sharing_memory * (FIRST_USE + largest_step)
    log.info("%s", size)
    log.info(
        "memory: %s now, at most %s besides what encoding takes: with a full KV cache, a full receive buffer (%s) and "
        "a step of the largest size (%s)",
        *map(gib, (memory.used, memory.used + size.num_bytes + receive_bytes + step, receive_bytes, step)),
    )
    return size


def _warn_of_slow_kv(activations: torch.dtype, kv: torch.dtype, device: torch.device) -> None:
    if widens_kv(activations, kv, device):
        log.warning(
            "each step widens all keys and values from %s, in every layer: long contexts are faster with "
            "--kv-cache-dtype %s",
            dtype_name(kv),
            dtype_name(activations),
        )


def _state_slots(engine: EngineConfig) -> StateSlots:
    """Return the slots of a model with state."""
    interval = engine.state_snapshot_interval
    return StateSlots(engine.max_num_seqs, engine.num_state_snapshots, interval, engine.page_size)


def _runner(forward: Forward, cache: GroupCache, engine: EngineConfig, device: torch.device) -> Runner:
    """Return the runner for a device. ``forward`` computes a step on all ranks."""
    tensors = cache.whole.states
    states = None if tensors is None else StateRecords(tensors, engine.max_num_seqs)
    if device.type == "cpu":
        return Runner(forward, cache.own, engine.page_size, states)
    return GpuRunner(forward, cache.own, engine.page_size, device, states)
