"""Builds what an instance encodes with."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blake3 import blake3

from triptych.config import ClusterConfig, EncodeConfig
from triptych.config.pool import PoolAddress
from triptych.encode.file_store import FileStore
from triptych.encode.loop import EncodeLoop
from triptych.encode.pool_process import PoolProcess
from triptych.encode.pool_store import PoolStore
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import EmbeddingStore, MemoryStore, TieredStore
from triptych.encode.workers import PreprocessWorkers
from triptych.errors import StartError
from triptych.layers.encoder import Encoder
from triptych.sandbox.protocol import Limits
from triptych.server.instance import InstanceProcess
from triptych.server.model_bundle import ModelBundle
from triptych.transfer.fabrics.opening import is_installed
from triptych.transfer.sender import Sender

SHARED_FOLDER = f"/dev/shm/triptych-rows-{os.getuid()}"
"""Rows in shared memory of all encode instances that this user runs on the machine."""


def encode_loop_factory(
    model: ModelBundle,
    encoder: Encoder,
    instance: InstanceProcess,
    encode: EncodeConfig,
    sender: Sender,
    *,
    cluster: ClusterConfig,
    start_workers: Callable[[], PreprocessWorkers],
) -> Callable[[], EncodeLoop]:
    """Return a function that builds encode loops, one after another, which share one store."""
    store = _make_store(encode, instance, cluster)
    return lambda: EncodeLoop(
        preprocessors=_ready(start_workers()),
        runner=EncoderRunner(encoder, model.weights.activations, instance.compute),
        max_patches=encode.encode_batch_patches,
        latency=encode.encode_latency_ms / 1000,
        store=store,
        sender=sender,
        layout=model.row_layout,
        wake=instance.channel.wake,
        address=instance.channel.address,
        send=instance.send,
        clock=instance.clock,
        start_executor=instance.start_executor,
    )


def _make_store(encode: EncodeConfig, instance: InstanceProcess, cluster: ClusterConfig) -> EmbeddingStore:
    """Return the encoder cache in its tiers. Raises StartError for a folder or a pool that can't be used."""
    tiers: list[EmbeddingStore] = [MemoryStore(encode.encode_cache_mb * 2**20)]
    disk = encode.encode_cache_disk
    of_files = ("shm", SHARED_FOLDER, encode.encode_cache_shm_mb * 2**20), ("disk", disk.path, disk.num_bytes)
    for name, folder, num_bytes in of_files:
        if num_bytes:
            try:
                tiers.append(FileStore(Path(folder), num_bytes, instance.clock, instance.start_executor, name=name))
            except OSError as error:
                raise StartError(f"the encoder cache can't use {folder}: {error}") from error
    if encode.embedding_store.master:
        tiers.append(pool := _make_pool(encode.embedding_store, instance, cluster))
        instance.at_end(pool.close)
    return TieredStore(tiers) if len(tiers) > 1 else tiers[0]


def _make_pool(address: PoolAddress, instance: InstanceProcess, cluster: ClusterConfig) -> PoolStore:
    if not is_installed("mooncake"):
        raise StartError("--embedding-store needs Mooncake: pip install '.[mooncake]' in a checkout")
    secret = cluster.secret()
    return PoolStore(
        partial(PoolProcess.start, address, cluster.cluster_host, instance.clock),
        instance.clock,
        instance.start_executor,
        key=blake3(secret, derive_key_context="triptych rows in a pool").digest() if secret else None,
    )


class WorkerStarter:
    """Starts the workers of each encode loop: those of the first one at once, so that they import while the encoder is
    loaded."""

    def __init__(self, model: ModelBundle, encode: EncodeConfig, num_threads: int) -> None:
        self._limits = Limits(memory_bytes=encode.decode_memory_mb * 2**20, seconds=encode.decode_timeout)
        # one worker keeps several threads of the encoder busy, which compute while it decodes
        self._num_workers = encode.decode_workers or max(1, num_threads // 4)
        self._folder = model.checkpoint.folder
        self._first: PreprocessWorkers | None = self._start()

    def __call__(self) -> PreprocessWorkers:
        """Return new workers, which may not be ready yet."""
        first, self._first = self._first, None
        return first or self._start()

    def close(self) -> None:
        """End the first workers, unless a loop has them."""
        if self._first:
            self._first.close()
            self._first = None

    def _start(self) -> PreprocessWorkers:
        return PreprocessWorkers(self._folder, self._num_workers, self._limits)


def _ready(workers: PreprocessWorkers) -> PreprocessWorkers:
    try:
        workers.wait_until_ready()
    except StartError:
        workers.close()
        raise
    return workers
