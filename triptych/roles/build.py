"""Loads a model's halves and wires them into the hosts that a role asks for."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from triptych.config import EngineConfig, LeaseConfig, TransferConfig
from triptych.encode.cache import RowCache, Rows
from triptych.encode.jobs import EncodeQueue
from triptych.families.base import ModelConfig, Planner, TowerInput
from triptych.families.registry import family_of, resolve
from triptych.language.decode_graphs import record_graphs
from triptych.language.gpu_runner import GpuRunner
from triptych.language.grammar import GrammarCompiler
from triptych.language.kv_cache import PagePool
from triptych.language.kv_size import gib, kv_size
from triptych.language.runner import Runner
from triptych.language.scheduler import Scheduler
from triptych.messages.channel import Channel
from triptych.messages.rows import End, RowLayout
from triptych.models.attention.base import KVTensors
from triptych.models.checkpoint import Checkpoint
from triptych.models.config_files import load_config, load_preprocessor_config
from triptych.models.decoder import Decoder
from triptych.models.devices import find_device, free_bytes, used_bytes, weight_format
from triptych.models.fingerprint import fingerprint
from triptych.models.pinned import to_host
from triptych.models.towers import Tower, TowerFamily
from triptych.roles.encode import EncodeHost
from triptych.roles.incoming_media import IncomingMedia
from triptych.roles.instance import Instance
from triptych.roles.language import LanguageHost
from triptych.roles.loading import Loading
from triptych.topology import Role
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Fabric
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
        return stages["tower"] * role.encodes + stages["decoder"] * role.generates

    def load_tower(self) -> Tower:
        return self.family.load_tower(self.checkpoint, self.weights.activations, self.device)

    def load_decoder(self) -> Decoder:
        return self.family.load_decoder(self.checkpoint, self.weights, self.device)

    @property
    def row_layout(self) -> RowLayout:
        """Rows have the dtype that the decoder computes in, so that nothing is converted on the way."""
        dtype, width = self.weights.activations, self.family.row_width
        return RowLayout(self.fingerprint, str(dtype).removeprefix("torch."), width, width * dtype.itemsize)


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
    Raises CheckpointError for a checkpoint that can't be served, and StartError for settings that don't fit it."""
    instance = Instance(
        name=name, role=role, layout=model.row_layout, channel=channel, front_door=front_door, lease=lease
    )
    fabrics = open_fabrics(transfer, cluster_host)
    for fabric in fabrics:
        instance.at_end(fabric.close)
    with Loading(model.num_bytes(role)) as loading:
        model.checkpoint.on_read = loading.advance
        tower = _timed("vision tower", model.load_tower) if role.encodes else None
        decoder = _timed("decoder", model.load_decoder) if role.generates else None
    if tower is not None:
        instance.add(_encode_host(model, tower, instance, engine, fabrics), far_end=End.CONSUMER)
    if decoder is not None:
        buffer = RowBuffer(
            model.row_layout, engine.receive_blocks, engine.receive_block_rows, fabrics, allocate=SharedMemory
        )
        instance.at_end(buffer.close)
        receiver = Receiver(buffer, channel.address, instance.send, check_always=transfer.checksum == "always")
        instance.add(_language_host(model, decoder, instance, engine, receiver), far_end=End.PRODUCER)
    return instance


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


def _encode_host(
    model: Model, tower: Tower, instance: Instance, engine: EngineConfig, fabrics: Sequence[Fabric]
) -> EncodeHost:
    dtype, channel = model.weights.activations, instance.channel
    return EncodeHost(
        preprocessor=resolve(model.files.preprocessor)(model.config, load_preprocessor_config(model.checkpoint.folder)),
        encoder=TowerEncoder(tower, dtype),
        queue=EncodeQueue(engine.encode_batch_patches),
        cache=RowCache(engine.encode_cache_mb * 2**20),
        sender=Sender({fabric.name: fabric for fabric in fabrics}, model.row_layout, channel.address, instance.send),
        compute=instance.compute,
        wake=channel.wake,
        front_door=instance.front_door,
        send=instance.send,
    )


def _language_host(
    model: Model, decoder: Decoder, instance: Instance, engine: EngineConfig, receiver: Receiver
) -> LanguageHost:
    dtype, channel = model.weights.activations, instance.channel
    config = model.family.decoder_config
    size = kv_size(
        engine,
        token_bytes=config.kv_bytes(dtype.itemsize),
        model_context=model.planner.context_length,
        available=free_bytes(model.device),
    )
    step = FIRST_USE + config.step_bytes(engine.max_num_batched_tokens, engine.max_num_seqs, size.context_length)
    used, receiving = used_bytes(model.device), receiver.buffer.num_bytes
    log.info("%s", size)
    log.info(
        "memory: %s now, at most %s besides what encoding takes: with a full KV cache, a full receive buffer (%s) and "
        "a step of the largest size (%s)",
        *map(gib, (used, used + size.num_bytes + receiving + step, receiving, step)),
    )
    # a page more than the pool hands out: where a CUDA graph's padding goes
    cache = KVTensors.allocate(config, size.num_pages + 1, engine.page_size, dtype, model.device)
    pool = PagePool(size.num_pages, engine.page_size)
    return LanguageHost(
        scheduler=Scheduler(
            pool,
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            reuse_prefixes=engine.enable_prefix_caching,
        ),
        runner=_runner(decoder, cache, engine, model.device, size.context_length),
        media=IncomingMedia(receiver, instance.name, dtype, model.family.row_width),
        receiver=receiver,
        compute=instance.compute,
        grammars=GrammarCompiler(model.checkpoint.folder, config.vocab_size, channel.wake),
        context_length=size.context_length,
        vocabulary=config.vocab_size,
        address=channel.address,
        front_door=instance.front_door,
        send=instance.send,
    )


def _runner(
    decoder: Decoder, cache: KVTensors, engine: EngineConfig, device: torch.device, context_length: int
) -> Runner:
    if device.type == "cpu":
        return Runner(decoder, cache, engine.page_size)
    graphs = record_graphs(decoder, cache, engine.max_num_seqs, context_length) if engine.cuda_graphs else None
    return GpuRunner(decoder, cache, engine.page_size, device, graphs)


def _timed(what: str, load: Callable[[], T]) -> T:
    began = time.monotonic()
    loaded = load()
    log.info("loaded the %s in %.1f s", what, time.monotonic() - began)
    return loaded
