"""Loads a model's halves and wires them into the hosts that a role asks for."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.fingerprint import fingerprint
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig, LeaseConfig, TransferConfig, processes_of
from triptych.encode.cache import EmbeddingRows, EncoderCache
from triptych.encode.jobs import EncodeQueue
from triptych.encode.loop import EncodeLoop
from triptych.encode.workers import PreprocessWorkers
from triptych.engine.gpu_runner import GpuRunner
from triptych.engine.grammar.service import GrammarService
from triptych.engine.group import CacheSize, GroupCache, agree_on_size, gather_memory, make_cache, make_forward
from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_size import gib, kv_size
from triptych.engine.loop import EngineCore
from triptych.engine.runner import Forward, Runner
from triptych.engine.scheduler import MAX_SCORED, Scheduler
from triptych.errors import StartError
from triptych.layers.attention.base import KVTensors
from triptych.layers.decoder import Decoder
from triptych.layers.devices import check_ranks, dtype_name, find_device, kv_dtype, weight_format, widens_kv
from triptych.layers.encoder import Encoder, ModelAdapter
from triptych.layers.parallel import Group, rank_device
from triptych.layers.pinned import to_cpu
from triptych.messages.channel import Channel
from triptych.messages.rows import RowKind, RowLayout
from triptych.models.base import EncoderInput, ModelConfig, Planner
from triptych.models.registry import family_of, resolve
from triptych.sandbox.protocol import Limits
from triptych.server.components import Components, EngineComponents, layouts
from triptych.server.instance import Instance
from triptych.server.loading import Loading
from triptych.server.ranks import ChildRanks, NoRanks, Ranks
from triptych.topology import Role
from triptych.transfer.fabrics.opening import open_fabrics
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
        self.family = family_of(self.config)
        self._processors = load_preprocessor_config(checkpoint.folder), load_video_config(checkpoint.folder)
        self.planner: Planner = resolve(self.family.planner)(self.config, *self._processors)
        self.adapter: ModelAdapter = resolve(self.family.adapter)(self.config)
        self.device = find_device(engine.device)
        self.weights = weight_format(engine, self.device, checkpoint.tensors)
        self.kv_dtype = kv_dtype(engine, self.device, self.weights)
        self.page_size = engine.page_size
        self.fingerprint = fingerprint(checkpoint.folder)

    def num_bytes(self, role: Role) -> int:
        """What a role loads of the checkpoint, in bytes."""
        stages = self.adapter.weight_bytes_by_stage(self.checkpoint.tensors)
        return stages["encoder"] * role.encodes + stages["decoder"] * role.has_decoder

    def load_encoder(self) -> Encoder:
        return self.adapter.load_encoder(self.checkpoint, self.weights, self.device)

    def load_decoder(self, group: Group) -> Decoder:
        return self.adapter.load_decoder(self.checkpoint, self.weights, rank_device(self.device, group.rank), group)

    def make_cache(self, group: Group, num_pages: int, path: str) -> GroupCache:
        """See ``language.group.make_cache``."""
        return make_cache(
            self.adapter.decoder_config,
            group,
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=self.kv_dtype,
            device=rank_device(self.device, group.rank),
            path=path,
        )

    @property
    def row_layout(self) -> RowLayout:
        """Rows have the dtype that the decoder computes in, so that nothing is converted on the way."""
        dtype, width = self.weights.activations, self.adapter.embedding_width
        return RowLayout(self.fingerprint, dtype_name(dtype), width, width * dtype.itemsize)

    @property
    def kv_layout(self) -> RowLayout:
        """One token's keys, or its values, in one layer, as the KV cache has them."""
        dtype, config = self.kv_dtype, self.adapter.decoder_config
        width = config.num_kv_heads * config.head_dim
        return RowLayout(self.fingerprint, dtype_name(dtype), width, width * dtype.itemsize, RowKind.KV)


def build_instance(
    *,
    model: Model,
    name: str,
    role: Role,
    channel: Channel,
    frontend: Address,
    engine: EngineConfig,
    transfer: TransferConfig,
    cluster_host: str,
    lease: LeaseConfig,
) -> Instance:
    """Loads what the role needs, and nothing else, and wires it up. Takes as long as reading the weights takes.
    Raises CheckpointError for a checkpoint that can't be served, and StartError for settings that don't fit it. Call it
    on the process's main thread when an instance has several ranks."""
    if role.encodes and not model.family.takes_media:
        raise StartError(f"{role.value} instances encode, and {model.checkpoint.folder} is a model of text alone")
    instance = Instance(
        name=name,
        role=role,
        layouts=layouts(model.row_layout, model.kv_layout, has_decoder=role.has_decoder),
        channel=channel,
        frontend=frontend,
        lease=lease,
    )
    ranks = _start_ranks(model, role, engine, instance)
    instance.at_end(ranks.close)
    try:
        instance.composer = _load(
            instance, model=model, role=role, engine=engine, transfer=transfer, cluster_host=cluster_host, ranks=ranks
        )
        instance.become(role)
    except BaseException:
        instance.compute.close()  # it wakes the channel, which isn't there for much longer
        ranks.close()
        raise
    return instance


def _load(
    instance: Instance,
    *,
    model: Model,
    role: Role,
    engine: EngineConfig,
    transfer: TransferConfig,
    cluster_host: str,
    ranks: Ranks,
) -> Components:
    fabrics = open_fabrics(transfer, cluster_host)
    for fabric in fabrics:
        instance.at_end(fabric.close)
    num_threads = torch.get_num_threads()
    instance.compute.submit(use_threads, num_threads)
    with Loading(model.num_bytes(role)) as loading:
        model.checkpoint.on_read = loading.advance
        tower = _loaded("towers", instance.compute.submit(model.load_encoder)) if role.encodes else None
        group = ranks.connect(rank_device(model.device, 0))
        decoder = _loaded("decoder", instance.compute.submit(model.load_decoder, group)) if role.has_decoder else None
    sender = Sender({fabric.name: fabric for fabric in fabrics}, instance.channel.address, instance.send)
    language = None
    if decoder is not None:
        blocks = {RowKind.MEDIA: engine.receive_blocks, RowKind.KV: engine.kv_receive_blocks}
        layout = model.kv_layout if role.takes_kv else model.row_layout
        receiving = blocks[layout.kind] * engine.receive_block_rows * layout.row_bytes
        parts, cache = _engine(
            model=model,
            decoder=decoder,
            instance=instance,
            engine=engine,
            ranks=ranks,
            group=group,
            receiving=receiving,
        )
        dtype, width = model.weights.activations, model.adapter.embedding_width
        always = transfer.checksum == "always"
        language = EngineComponents(parts, cache, dtype, width, blocks, engine.receive_block_rows, always)
    encoding = None
    if tower is not None:
        encoding = _encoding(model, tower, instance, engine, sender, num_threads=num_threads)
    return Components(
        instance=instance,
        check_role=lambda role: check_role(model, role),
        media_layout=model.row_layout,
        kv_layout=model.kv_layout,
        fabrics=fabrics,
        sender=sender,
        make_encode_loop=encoding,
        language=language,
    )


def use_threads(number: int) -> None:
    """For what the calling thread computes, whatever others set later."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # a thread takes on the process's number once, at its first parallel operation or here


def check_role(model: Model, role: Role) -> None:
    """Raises StartError for a role that an instance can't have on its device, whatever it has loaded."""
    if model.device.type != "cpu" and (role.sends_kv or role.takes_kv):
        raise StartError(f"{role.value} instances send KV caches from main memory so far, not from {model.device}")


def _start_ranks(model: Model, role: Role, engine: EngineConfig, instance: Instance) -> Ranks:
    """Starts the processes that this one shares its decoder with, once it is clear that it can be shared so."""
    check_role(model, role)
    if (size := processes_of(engine, role)) == 1:
        return NoRanks()
    check_ranks(model.device, size)
    model.adapter.decoder_config.shard(size)
    return ChildRanks(str(model.checkpoint.folder), engine, size, instance.fail)


class EncoderRunner:
    """The tower as the encode host sees it: inputs in, bytes of rows out."""

    def __init__(self, tower: Encoder, dtype: torch.dtype) -> None:
        self._tower = tower
        self._dtype = dtype

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[EmbeddingRows]:
        """Rows of each input, uint8 of shape (rows, row_bytes)."""
        with torch.inference_mode():
            return [_as_bytes(rows) for rows in to_cpu([r.to(self._dtype) for r in self._tower.encode(inputs)])]


def _as_bytes(rows: torch.Tensor) -> EmbeddingRows:
    """A copy: a view would keep the whole batch's rows in memory for as long as the cache keeps one item's."""
    as_bytes: EmbeddingRows = rows.contiguous().view(torch.uint8).numpy()
    return np.array(as_bytes)


def _preprocess_workers(model: Model, engine: EngineConfig, num_threads: int) -> PreprocessWorkers:
    limits = Limits(memory_bytes=engine.decode_memory_mb * 2**20, seconds=engine.decode_timeout)
    # one keeps several threads of the tower busy, which compute while it decodes
    num_workers = engine.decode_workers or max(1, num_threads // 4)
    workers = PreprocessWorkers(model.checkpoint.folder, num_workers, limits)
    try:
        workers.wait_until_ready()
    except StartError:
        workers.close()
        raise
    return workers


def _encoding(
    model: Model, tower: Encoder, instance: Instance, engine: EngineConfig, sender: Sender, *, num_threads: int
) -> Callable[[], EncodeLoop]:
    """Makes encode hosts, one after the other; what one has encoded, the next knows too."""
    cache = EncoderCache(engine.encode_cache_mb * 2**20)
    return lambda: EncodeLoop(
        preprocessors=_preprocess_workers(model, engine, num_threads),
        encoder=EncoderRunner(tower, model.weights.activations),
        queue=EncodeQueue(engine.encode_batch_patches),
        cache=cache,
        sender=sender,
        layout=model.row_layout,
        compute=instance.compute,
        wake=instance.channel.wake,
        frontend=instance.frontend,
        send=instance.send,
    )


def _warn_of_slow_kv(activations: torch.dtype, kv: torch.dtype, device: torch.device) -> None:
    if widens_kv(activations, kv, device):
        log.warning(
            "each step widens all keys and values from %s, in every layer: long contexts are faster with "
            "--kv-cache-dtype %s",
            dtype_name(kv),
            dtype_name(activations),
        )


def _engine(
    *,
    model: Model,
    decoder: Decoder,
    instance: Instance,
    engine: EngineConfig,
    ranks: Ranks,
    group: Group,
    receiving: int,
) -> tuple[EngineCore, KVTensors]:
    """What generates, and its KV cache, that of all ranks if they share one. What all ranks do together here: say what
    memory they have, learn how large the KV cache is, and make it. ``receiving`` is what the receive buffer will take,
    in bytes."""
    dtype, channel, device = model.weights.activations, instance.channel, rank_device(model.device, 0)
    config, whole = decoder.config, model.adapter.decoder_config
    sharing = group.size if device.type == "cpu" else 1  # ranks that use the same memory
    with ranks.together():
        memory = gather_memory(group, device)
    size = kv_size(
        engine,
        token_bytes=(whole if device.type == "cpu" else config).kv_bytes(model.kv_dtype.itemsize),
        model_context=model.planner.context_length,
        available=memory.free,
    )
    _warn_of_slow_kv(dtype, model.kv_dtype, device)
    logits = engine.max_num_seqs + min(MAX_SCORED, engine.max_num_batched_tokens)
    largest_step = config.step_bytes(engine.max_num_batched_tokens, logits, size.context_length)
    step = sharing * (FIRST_USE + largest_step)
    log.info("%s", size)
    log.info(
        "memory: %s now, at most %s besides what encoding takes: with a full KV cache, a full receive buffer (%s) and "
        "a step of the largest size (%s)",
        *map(gib, (memory.used, memory.used + size.num_bytes + receiving + step, receiving, step)),
    )
    with ranks.together():
        # a page more than the pool hands out: where a CUDA graph's padding goes
        agreed = agree_on_size(group, CacheSize(size.num_pages + 1, size.context_length))
        cache = model.make_cache(group, agreed.num_pages, ranks.cache)
        forward = make_forward(decoder, cache.own, engine, size.context_length)
    pool = PagePool(size.num_pages, engine.page_size)
    grammars = GrammarService(model.checkpoint.folder, config.vocab_size, channel.wake)
    instance.at_end(grammars.close)
    parts = EngineCore(
        scheduler=Scheduler(
            pool,
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            reuse_prefixes=engine.enable_prefix_caching,
        ),
        runner=_runner(ranks.lead(forward, group, dtype), cache.own, engine.page_size, device),
        compute=instance.compute,
        grammars=grammars,
        context_length=size.context_length,
        vocab_size=config.vocab_size,
    )
    return parts, cache.whole


def _runner(forward: Forward, cache: KVTensors, page_size: int, device: torch.device) -> Runner:
    """``forward`` is the decoder as all ranks run it."""
    if device.type == "cpu":
        return Runner(forward, cache, page_size)
    return GpuRunner(forward, cache, page_size, device)


def _loaded(what: str, loading: "Future[T]") -> T:
    began = time.monotonic()
    loaded = loading.result()
    log.info("loaded the %s in %.1f s", what, time.monotonic() - began)
    return loaded
