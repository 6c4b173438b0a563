"""Settings of encode instances."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting


@dataclass(frozen=True)
class EncodeConfig(Settings):
    """How encode instances decode, encode and cache media."""

    encode_batch_patches: int = setting(1024, "patches encoded together; an item that has more goes alone", ge=1)
    decode_workers: int = setting(
        0,
        "processes in which one encode instance decodes media; 0 takes one for every four threads, at least one",
        ge=0,
    )
    decode_memory_mb: int = setting(2048, "memory that decoding one media item may take, in MiB", ge=1)
    decode_timeout: float = setting(30.0, "seconds that decoding one media item may take", gt=0)
    encode_cache_mb: int = setting(256, "cache of one encode instance for embeddings, in MiB", ge=0)
