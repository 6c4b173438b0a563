"""Settings of encode instances."""

from dataclasses import dataclass

from triptych.config.cache_folder import CacheFolder
from triptych.config.pool import PoolAddress
from triptych.config.settings import Settings, setting


@dataclass(frozen=True)
class EncodeConfig(Settings):
    """Encode instances."""

    encode_batch_patches: int = setting(
        1024, "maximum patches in one batch; a larger item is encoded by itself", ge=1, gpu=8192, internal=True
    )
    encode_latency_ms: int = setting(
        250,
        "about how long a batch of several parts may take, in ms, by what earlier ones took; short items wait for at "
        "most one batch of others' long ones",
        ge=1,
    )
    decode_workers: int = setting(
        0,
        "processes of one encode instance that decode media; 0: one for every four threads, at least one",
        ge=0,
    )
    decode_memory_mb: int = setting(2048, "memory that decoding one media item may take, in MiB", ge=1, internal=True)
    decode_timeout: float = setting(30.0, "seconds that decoding one media item may take", gt=0, internal=True)
    encode_cache_mb: int = setting(256, "cache of one encode instance for embeddings, in MiB", ge=0, common=True)
    encode_cache_shm_mb: int = setting(
        0,
        "cache in shared memory, which outlives instances and is common to those of a user on a machine, in MiB",
        ge=0,
    )
    encode_cache_disk: CacheFolder = setting(
        CacheFolder(),
        "cache on a disk, for embeddings that the others lack: a folder that several encode instances may have in "
        "common, and how much it may take, such as /var/cache/triptych,20GiB; default: none",
        parse=CacheFolder.parse,
    )
    embedding_store: PoolAddress = setting(
        PoolAddress(),
        "pool of embeddings that encode instances of several machines have in common: Mooncake's master and, after a "
        "comma, memory that each instance lends it, such as mooncake://10.0.0.5:50051,4GiB; it protects nothing from "
        "those who reach its ports; default: none",
        parse=PoolAddress.parse,
    )
