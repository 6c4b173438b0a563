"""Loads a model's halves and wires them into the hosts that a role asks for."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from triptych.config import EngineConfig, LeaseConfig, TransferConfig, processes_of
from triptych.encode.cache import RowCache, Rows
from triptych.encode.jobs import EncodeQueue
from triptych.errors import StartError
from triptych.families.base import ModelConfig, Planner, TowerInput
from triptych.families.registry import family_of, resolve
from triptych.language.decode_graphs import record_graphs
from triptych.language.gpu_runner import GpuRunner
from triptych.language.grammar import GrammarCompiler
from triptych.language.kv_cache import PagePool
from triptych.language.kv_rows import LAYER_ROWS, CacheRows
from triptych.language.kv_size import gib, kv_size
from triptych.language.runner import Forward, MediaRows, Runner
from triptych.language.scheduler import Scheduler
from triptych.messages.channel import Channel
from triptych.messages.rows import End, RowKind, RowLayout
from triptych.models.attention.base import KVTensors
from triptych.models.checkpoint import Checkpoint
from triptych.models.config_files import load_config, load_preprocessor_config
from triptych.models.decoder import Decoder
from triptych.models.devices import find_device, free_bytes, used_bytes, weight_format
from triptych.models.fingerprint import fingerprint
from triptych.models.parallel import Group, rank_device
from triptych.models.pinned import to_host
from triptych.models.towers import Tower, TowerFamily
from triptych.roles.encode import EncodeHost
from triptych.roles.incoming_kv import IncomingKV
from triptych.roles.incoming_media import IncomingMedia
from triptych.roles.instance import Instance
from triptych.roles.language import Engine, LanguageHost
from triptych.roles.loading import Loading
from triptych.roles.outgoing_kv import OutgoingKV
from triptych.roles.ranks import ChildRanks, NoRanks, Ranks
from triptych.roles.sending import SendingHost
from triptych.roles.split import DecodeHost, PrefillHost
from triptych.topology import Role
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.opening import open_fabrics
from triptych.transfer.memory import SharedMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.sender import Sender
from triptych.types import Address

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_USE = 32 * 2**20
"""Bytes that PyTorch's kernels and its allocator keep once they have been used."""


class Model:
    """A checkpoint folder as instances see it: what to load, and how rows look on their way."""

    def __init__(self, checkpoint: Checkpoint, engine: EngineConfig) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = load_config(checkpoint.folder)
        self.files = family_of(self.config)
        self.planner: Planner = resolve(self.files.planner)(self.config, load_preprocessor_config(checkpoint.folder))
        self.family: TowerFamily = resolve(self.files.tower)(self.config)
        self.device = find_device(engine.device)
        self.weights = weight_format(engine, self.device, checkpoint.tensors)
        self.fingerprint = fingerprint(checkpoint.folder)

    def num_bytes(self, role: Role) -> int:
        """What a role loads of the checkpoint, in bytes."""
        stages = self.family.stage_bytes(self.checkpoint.tensors)
        return stages["tower"] * role.encodes + stages["decoder"] * role.has_decoder

    def load_tower(self) -> Tower:
        return self.family.load_tower(self.checkpoint, self.weights.activations, self.device)

    def load_decoder(self, group: Group) -> Decoder:
        return self.family.load_decoder(self.checkpoint, self.weights, rank_device(self.device, group.rank), group)

    @property
    def row_layout(self) -> RowLayout:
        """Rows have the dtype that the decoder computes in, so that nothing is converted on the way."""
        dtype, width = self.weights.activations, self.family.row_width
        return RowLayout(self.fingerprint, str(dtype).removeprefix("torch."), width, width * dtype.itemsize)

    @property
    def kv_layout(self) -> RowLayout:
        """One token's keys, or its values, in one layer, as the KV cache has them."""
        dtype, config = self.weights.activations, self.family.decoder_config
        width = config.num_kv_heads * config.head_dim
        name = str(dtype).removeprefix("torch.")
        return RowLayout(self.fingerprint, name, width, width * dtype.itemsize, RowKind.KV)

    def layouts(self, role: Role) -> list[RowLayout]:
        """What rows an instance of that role makes or takes."""
        media = [self.row_layout] if role.encodes or role.prefills else []
        return media + ([self.kv_layout] if role.sends_kv or role.takes_kv else [])


def build_instance(
    *,
    model: Model,
    name: str,
    role: Role,
    channel: Channel,
    front_door: Address,
    engine: EngineConfig,
    transfer: TransferConfig,
    cluster_host: str,
    lease: LeaseConfig,
) -> Instance:
    """Loads what the role needs, and nothing else, and wires it up. Takes as long as reading the weights takes.
    Raises CheckpointError for a checkpoint that can't be served, and StartError for settings that don't fit it. Call it
    on the process's main thread when an instance has several ranks."""
    instance = Instance(
        name=name, role=role, layouts=model.layouts(role), channel=channel, front_door=front_door, lease=lease
    )
    ranks = _start_ranks(model, role, engine, instance)
    instance.at_end(ranks.close)
    try:
        _add_hosts(
            instance, model=model, role=role, engine=engine, transfer=transfer, cluster_host=cluster_host, ranks=ranks
        )
    except BaseException:
        ranks.close()
        raise
    return instance


def _add_hosts(
    instance: Instance,
    *,
    model: Model,
    role: Role,
    engine: EngineConfig,
    transfer: TransferConfig,
    cluster_host: str,
    ranks: Ranks,
) -> None:
    channel = instance.channel
    fabrics = open_fabrics(transfer, cluster_host)
    for fabric in fabrics:
        instance.at_end(fabric.close)
    with Loading(model.num_bytes(role)) as loading:
        model.checkpoint.on_read = loading.advance
        tower = _timed("vision tower", model.load_tower) if role.encodes else None
        group = ranks.connect(rank_device(model.device, 0))
        decoder = _timed("decoder", lambda: model.load_decoder(group)) if role.has_decoder else None
    sender = Sender({fabric.name: fabric for fabric in fabrics}, channel.address, instance.send)
    if tower is not None:
        instance.add(_encode_host(model, tower, instance, engine, sender))
    if role.encodes or role.sends_kv:
        # before the language host: when all is given up, transfers end without a word, and nobody is told twice
        instance.add(SendingHost(sender), far_end=End.CONSUMER)
    if decoder is not None:
        layout, num_blocks, grant_rows = model.row_layout, engine.receive_blocks, 0
        if role.takes_kv:
            layout, num_blocks, grant_rows = model.kv_layout, engine.kv_receive_blocks, LAYER_ROWS
        buffer = RowBuffer(layout, num_blocks, engine.receive_block_rows, fabrics, allocate=SharedMemory)
        instance.at_end(buffer.close)
        checked = transfer.checksum == "always"
        receiver = Receiver(buffer, channel.address, instance.send, grant_rows=grant_rows, check_always=checked)
        host = _language_host(
            model=model,
            decoder=decoder,
            instance=instance,
            engine=engine,
            receiver=receiver,
            sender=sender,
            ranks=ranks,
            group=group,
        )
        instance.add(host, far_end=End.PRODUCER)


def _start_ranks(model: Model, role: Role, engine: EngineConfig, instance: Instance) -> Ranks:
    """Starts the processes that this one shares its decoder with, once it is clear that it can be shared so."""
    if model.device.type != "cpu" and (role.sends_kv or role.takes_kv):
        raise StartError(f"{role.value} instances send KV caches from main memory so far, not from {model.device}")
    if processes_of(engine, has_decoder=role.has_decoder) == 1:
        return NoRanks()
    if role.sends_kv or role.takes_kv:
        raise StartError(
            f"--tensor-parallel-size {engine.tensor_parallel_size} is for instances that prefill and decode, not for "
            f"{role.value}: each rank's KV cache holds a part of each row that would be sent"
        )
    if model.device.type != "cpu":
        raise StartError(
            f"--tensor-parallel-size {engine.tensor_parallel_size} on {model.device}: ranks hand on steps in main "
            "memory so far, and their graphs have never been recorded together; use --device cpu"
        )
    model.family.decoder_config.shard(engine.tensor_parallel_size)
    level = logging.getLogger("triptych").getEffectiveLevel()
    return ChildRanks(str(model.checkpoint.folder), engine, level, instance.fail)


class TowerEncoder:
    """The tower as the encode host sees it: inputs in, bytes of rows out."""

    def __init__(self, tower: Tower, dtype: torch.dtype) -> None:
        self._tower = tower
        self._dtype = dtype

    def __call__(self, inputs: Sequence[TowerInput]) -> list[Rows]:
        """Rows of each input, uint8 of shape (rows, row_bytes)."""
        with torch.inference_mode():
            return [_as_bytes(rows) for rows in to_host([r.to(self._dtype) for r in self._tower.encode(inputs)])]


def _as_bytes(rows: torch.Tensor) -> Rows:
    """A copy: a view would keep the whole batch's rows in memory for as long as the cache keeps one item's."""
    as_bytes: Rows = rows.contiguous().view(torch.uint8).numpy()
    return np.array(as_bytes)


def _encode_host(model: Model, tower: Tower, instance: Instance, engine: EngineConfig, sender: Sender) -> EncodeHost:
    dtype, channel = model.weights.activations, instance.channel
    return EncodeHost(
        preprocessor=resolve(model.files.preprocessor)(model.config, load_preprocessor_config(model.checkpoint.folder)),
        encoder=TowerEncoder(tower, dtype),
        queue=EncodeQueue(engine.encode_batch_patches),
        cache=RowCache(engine.encode_cache_mb * 2**20),
        sender=sender,
        layout=model.row_layout,
        compute=instance.compute,
        wake=channel.wake,
        front_door=instance.front_door,
        send=instance.send,
    )


def _language_host(
    *,
    model: Model,
    decoder: Decoder,
    instance: Instance,
    engine: EngineConfig,
    receiver: Receiver,
    sender: Sender,
    ranks: Ranks,
    group: Group,
) -> LanguageHost:
    """The engine, and the host of the role's language stages. What all ranks do together here: count what they
    have loaded, and share the number of pages."""
    dtype, channel = model.weights.activations, instance.channel
    config = decoder.config
    with ranks.together():
        used = int(group.all_reduce(torch.tensor(used_bytes(model.device))))
    sharing = group.size if model.device.type == "cpu" else 1  # ranks whose caches come out of the same memory
    size = kv_size(
        engine,
        token_bytes=sharing * config.kv_bytes(dtype.itemsize),
        model_context=model.planner.context_length,
        available=free_bytes(model.device),
    )
    with ranks.together():
        group.broadcast(torch.tensor(size.num_pages))
    largest_step = config.step_bytes(engine.max_num_batched_tokens, engine.max_num_seqs, size.context_length)
    step, receiving = sharing * (FIRST_USE + largest_step), receiver.buffer.num_bytes
    log.info("%s", size)
    log.info(
        "memory: %s now, at most %s besides what encoding takes: with a full KV cache, a full receive buffer (%s) and "
        "a step of the largest size (%s)",
        *map(gib, (used, used + size.num_bytes + receiving + step, receiving, step)),
    )
    # a page more than the pool hands out: where a CUDA graph's padding goes
    cache = KVTensors.allocate(config, size.num_pages + 1, engine.page_size, dtype, rank_device(model.device, 0))
    pool = PagePool(size.num_pages, engine.page_size)
    parts = Engine(
        scheduler=Scheduler(
            pool,
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            reuse_prefixes=engine.enable_prefix_caching,
        ),
        runner=_runner(decoder, ranks.lead(decoder, group), cache, engine, size.context_length),
        compute=instance.compute,
        grammars=GrammarCompiler(model.checkpoint.folder, config.vocab_size, channel.wake),
        context_length=size.context_length,
        vocabulary=config.vocab_size,
    )
    return _host_of_role(parts, model, instance, cache, receiver=receiver, sender=sender)


def _host_of_role(
    parts: Engine, model: Model, instance: Instance, cache: KVTensors, *, receiver: Receiver, sender: Sender
) -> LanguageHost:
    """The engine behind prefill and decode, or behind one of them."""
    address, send = instance.channel.address, instance.send
    place = {"address": address, "front_door": instance.front_door}
    dtype, width = model.weights.activations, model.family.row_width
    if instance.role.takes_kv:
        arriving = IncomingKV(receiver, CacheRows(cache), instance.name, address, no_rows=MediaRows.none(width, dtype))
        return DecodeHost(parts, arriving, **place, send=send)
    incoming = IncomingMedia(receiver, instance.name, address, dtype, width)
    if instance.role.sends_kv:
        outgoing = OutgoingKV(sender, CacheRows(cache), parts.scheduler.pool, model.kv_layout)
        wake, name = instance.channel.wake, instance.name
        return PrefillHost(parts, incoming, outgoing, wake=wake, name=name, **place, send=send)
    return LanguageHost(parts, incoming, **place, send=send)


def _runner(decoder: Decoder, forward: Forward, cache: KVTensors, engine: EngineConfig, context_length: int) -> Runner:
    """``forward`` is the decoder as all ranks run it."""
    device = cache.keys[0].device
    if device.type == "cpu":
        return Runner(forward, cache, engine.page_size)
    graphs = record_graphs(decoder, cache, engine.max_num_seqs, context_length) if engine.cuda_graphs else None
    return GpuRunner(decoder, cache, engine.page_size, device, graphs)


def _timed(what: str, load: Callable[[], T]) -> T:
    began = time.monotonic()
    loaded = load()
    log.info("loaded the %s in %.1f s", what, time.monotonic() - began)
    return loaded
