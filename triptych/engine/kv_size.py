"""Sizing of the KV cache: a policy, without tensors."""

from dataclasses import dataclass

from triptych.config import EngineConfig
from triptych.errors import StartError

GIB = 2**30


@dataclass(frozen=True)
class KVSize:
    """Size of a KV cache, and what it limits."""

    num_pages: int
    page_size: int
    context_length: int
    """Longest request that the model, the settings and the pages allow, in tokens."""
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"KV cache: {self.num_pages * self.page_size:,} tokens in {self.num_pages:,} pages, {gib(self.num_bytes)} "
            f"when full; requests of up to {self.context_length:,} tokens"
        )


def kv_size(engine: EngineConfig, *, token_bytes: int, model_context: int, available: int) -> KVSize:
    """Return the size of an instance's KV cache. ``token_bytes``: keys and values of one token in all layers;
    ``model_context``: the longest request that the model supports, in tokens; ``available``: bytes of free memory.

    Raises StartError if the settings exceed the memory, or ask for requests that wouldn't fit.
    """
    if engine.max_model_len > model_context:
        raise StartError(f"--max-model-len {engine.max_model_len} exceeds the {model_context} tokens of the model")
    longest = engine.max_model_len or model_context
    num_pages = _num_pages(engine, engine.page_size * token_bytes, longest, available)
    capacity, num_bytes = num_pages * engine.page_size, num_pages * engine.page_size * token_bytes
    room = f"{_amount(engine)} ({gib(num_bytes)}) holds {capacity:,} tokens"
    if capacity < engine.max_model_len:
        raise StartError(
            f"--max-model-len {engine.max_model_len} takes {gib(longest * token_bytes)} of KV cache, but {room}: give "
            "it more, or shorten the requests"
        )
    if not num_pages:
        raise StartError(f"{room}; a page of {engine.page_size} takes {gib(engine.page_size * token_bytes)}")
    if num_bytes > available:
        raise StartError(f"{_amount(engine)} takes {gib(num_bytes)}, but only {gib(available)} of memory are free")
    return KVSize(num_pages, engine.page_size, min(longest, capacity), num_bytes)


def _num_pages(engine: EngineConfig, page_bytes: int, longest: int, available: int) -> int:
    if engine.kv_cache_tokens:
        return -(-engine.kv_cache_tokens // engine.page_size)
    num_bytes = engine.kv_cache_memory.of(available)
    most = engine.max_num_seqs * -(-longest // engine.page_size)
    return min(num_bytes // page_bytes, most)  # no more than max_num_seqs requests of the longest kind can use


def _amount(engine: EngineConfig) -> str:
    return (
        f"--kv-cache-tokens {engine.kv_cache_tokens}"
        if engine.kv_cache_tokens
        else f"--kv-cache-memory {engine.kv_cache_memory}"
    )


def gib(num_bytes: int) -> str:
    """Format a number of bytes for people."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"
