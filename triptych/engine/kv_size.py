"""Sizing of the KV cache: a policy, without tensors."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.config import EngineConfig
from triptych.engine.cache_manager import most_pages
from triptych.errors import StartError
from triptych.layers.cache_spec import CacheGroups, CacheSpec, cache_bytes

GIB = 2**30


@dataclass(frozen=True)
class KVSize:
    """Size of a KV cache, and what it limits."""

    num_pages: tuple[int, ...]
    """Pages of each group of layers."""
    page_size: int
    capacity: int
    """Tokens that have room in layers without a window."""
    context_length: int
    """Longest request that the model, the settings and the pages allow, in tokens."""
    num_bytes: int
    """With the states of requests and snapshots."""
    state_bytes: int = 0
    """The part of ``num_bytes`` that states take."""

    def __str__(self) -> str:
        pages = " and ".join(f"{pages:,}" for pages in self.num_pages)
        return (
            f"KV cache: {self.capacity:,} tokens in {pages} pages, {gib(self.num_bytes)} "
            f"when full; requests of up to {self.context_length:,} tokens"
        ) + (f"; {gib(self.state_bytes)} of it are states" if self.state_bytes else "")


class _Sizes:
    """Pages and bytes of caches of different capacities.

    A group of layers with a window has no more pages than ``max_num_seqs`` requests can hold at a time.
    """

    def __init__(self, engine: EngineConfig, specs: Sequence[CacheSpec], state_bytes: int) -> None:
        self._specs = specs
        self._state_bytes = state_bytes
        self._page_size = engine.page_size
        self._most = [
            None
            if window is None
            else engine.max_num_seqs * most_pages(window, engine.page_size, engine.max_num_batched_tokens)
            for window in CacheGroups.of(spec.window for spec in specs).windows
        ]

    def num_pages(self, pages: int) -> tuple[int, ...]:
        """Return the pages of each group for a capacity of ``pages`` pages."""
        return tuple(pages if most is None else min(pages, most) for most in self._most)

    def num_bytes(self, pages: int) -> int:
        return cache_bytes(self._specs, self.num_pages(pages), self._page_size) + self._state_bytes

    def capacity(self, num_bytes: int, most: int) -> int:
        """Return the largest number of pages, at most ``most``, that take no more than ``num_bytes``."""
        return max(0, bisect_right(range(most + 1), num_bytes, key=self.num_bytes) - 1)


def num_slots(engine: EngineConfig) -> int:
    """Return the number of slots for states, in a model with state: those of requests, then those of snapshots."""
    return engine.max_num_seqs + engine.num_state_snapshots


def kv_size(
    engine: EngineConfig,
    *,
    specs: Sequence[CacheSpec],
    model_context: int,
    available: int,
    record_bytes: int = 0,
) -> KVSize:
    """Return the size of an instance's KV cache. ``specs``: what the layers keep; ``model_context``: the longest
    request that the model supports, in tokens; ``available``: bytes of free memory; ``record_bytes``: those of a
    request's state.

    Raises StartError if the settings exceed the memory, or ask for requests that wouldn't fit.
    """
    if engine.max_model_len > model_context:
        raise StartError(f"--max-model-len {engine.max_model_len} exceeds the {model_context} tokens of the model")
    longest = engine.max_model_len or model_context
    state_bytes = num_slots(engine) * record_bytes
    sizes = _Sizes(engine, specs, state_bytes)
    pages = _capacity(engine, sizes, longest, available)
    capacity, num_bytes = pages * engine.page_size, sizes.num_bytes(pages)
    room = f"{_amount(engine)} ({gib(num_bytes)}) holds {capacity:,} tokens"
    if capacity < engine.max_model_len:
        wanted = sizes.num_bytes(-(-longest // engine.page_size))
        raise StartError(
            f"--max-model-len {engine.max_model_len} takes {gib(wanted)} of KV cache, but {room}: give it more, or "
            "shorten the requests"
        )
    if not pages and state_bytes:
        raise StartError(
            f"{_amount(engine)}: the states of --max-num-seqs {engine.max_num_seqs} requests and of "
            f"{engine.num_state_snapshots} prefixes take {gib(state_bytes)} of it, which leaves too little for pages: "
            "give it more, or lower --max-num-seqs"
        )
    if not pages:
        raise StartError(f"{room}; a page of {engine.page_size} takes {gib(sizes.num_bytes(1))}")
    if num_bytes > available:
        raise StartError(f"{_amount(engine)} takes {gib(num_bytes)}, but only {gib(available)} of memory are free")
    return KVSize(sizes.num_pages(pages), engine.page_size, capacity, min(longest, capacity), num_bytes, state_bytes)


def _capacity(engine: EngineConfig, sizes: _Sizes, longest: int, available: int) -> int:
    """Return the capacity in pages."""
    if engine.kv_cache_tokens:
        return -(-engine.kv_cache_tokens // engine.page_size)
    most = engine.max_num_seqs * -(-longest // engine.page_size)
    # no more than max_num_seqs requests of the longest kind can use
    return sizes.capacity(engine.kv_cache_memory.of(available), most)


def _amount(engine: EngineConfig) -> str:
    return (
        f"--kv-cache-tokens {engine.kv_cache_tokens}"
        if engine.kv_cache_tokens
        else f"--kv-cache-memory {engine.kv_cache_memory}"
    )


def gib(num_bytes: int) -> str:
    """Format a number of bytes for people."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"
