from dataclasses import replace
from typing import Any

import pytest

from triptych.config import EngineConfig, MemorySize
from triptych.engine.kv_size import KVSize, kv_size
from triptych.errors import StartError
from triptych.layers.cache_spec import CacheFormat, CacheSpec

TOKEN = 1000
"""Bytes."""
SPEC = CacheSpec(1, (250, 250), CacheFormat("float16", 2))
FREE = 10**6
MODEL = 4096


def size(**settings: Any) -> KVSize:
    engine = EngineConfig(**({"page_size": 16, "max_num_seqs": 8} | settings))
    return kv_size(engine, specs=[SPEC], model_context=MODEL, available=FREE)


def test_a_share_is_of_the_free_memory() -> None:
    found = size(kv_cache_memory=MemorySize.parse("50%"))
    assert (found.num_pages, found.context_length, found.num_bytes) == ((31,), 31 * 16, 31 * 16 * TOKEN)


def test_an_amount_is_rounded_to_whole_pages() -> None:
    assert size(kv_cache_memory=MemorySize.parse("100KB")).num_pages == (6,)


def test_tokens_override_memory_and_fill_whole_pages() -> None:
    assert size(kv_cache_tokens=100, kv_cache_memory=MemorySize.parse("1KB")).num_pages == (7,)


def test_the_size_is_at_most_what_all_requests_can_use() -> None:
    found = size(kv_cache_memory=MemorySize.parse("100%"), max_model_len=40, max_num_seqs=2)
    assert (found.num_pages, found.context_length) == ((2 * 3,), 40)


def test_the_context_is_the_least_of_model_setting_and_capacity() -> None:
    assert size(kv_cache_tokens=800).context_length == 800
    assert size(kv_cache_tokens=800, max_model_len=500).context_length == 500
    longer = kv_size(EngineConfig(kv_cache_tokens=800), specs=[SPEC], model_context=300, available=FREE)
    assert longer.context_length == 300


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kv_cache_memory": MemorySize.parse("500KB"), "max_model_len": 1000},
            "--max-model-len 1000 takes .* holds 496 tokens",
        ),
        ({"max_model_len": MODEL + 1}, "--max-model-len 4097 exceeds the 4096 tokens"),
        ({"kv_cache_memory": MemorySize.parse("2MB")}, "--kv-cache-memory 2MB takes .* free"),
        ({"kv_cache_tokens": 1001}, "--kv-cache-tokens 1001 takes .* free"),
        ({"kv_cache_memory": MemorySize.parse("1%")}, "--kv-cache-memory 1% .* holds 0 tokens; a page of 16 takes"),
    ],
)
def test_settings_that_do_not_fit_are_rejected_with_both_figures(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError, match=words):
        size(**settings)


@pytest.mark.parametrize("memory", ["10%", "40%", "100%"])
def test_layers_with_a_window_have_no_more_pages_than_all_requests_hold(memory: str) -> None:
    """Of 32 tokens: a request holds at most 10 pages of those layers, and the memory goes to the others."""
    specs = [SPEC, replace(SPEC, window=32), SPEC, replace(SPEC, window=32)]
    engine = EngineConfig(
        page_size=16, max_num_seqs=2, max_num_batched_tokens=48, kv_cache_memory=MemorySize.parse(memory)
    )
    found = kv_size(engine, specs=specs, model_context=MODEL, available=FREE)
    every, windowed = found.num_pages
    assert windowed == min(every, 2 * 10)
    assert found.num_bytes == 2 * 16 * TOKEN * (every + windowed) <= engine.kv_cache_memory.of(FREE)
    assert found.num_bytes + 4 * 16 * TOKEN > engine.kv_cache_memory.of(FREE), "another page wouldn't fit"
    assert found.context_length == every * 16


def test_windows_in_all_layers_leave_the_context_to_the_model() -> None:
    found = kv_size(
        EngineConfig(page_size=16, max_num_seqs=2, max_num_batched_tokens=48),
        specs=[replace(SPEC, window=32)],
        model_context=MODEL,
        available=2 * FREE,
    )
    assert (found.num_pages, found.context_length) == ((20,), MODEL)


def with_states(record_bytes: int) -> KVSize:
    """Of 8 requests and 4 snapshots."""
    engine = EngineConfig(page_size=16, max_num_seqs=8, state_snapshots=4, kv_cache_memory=MemorySize.parse("50%"))
    return kv_size(engine, specs=[SPEC], model_context=MODEL, available=FREE, record_bytes=record_bytes)


def test_states_have_their_part_of_the_memory() -> None:
    found = with_states(10_000)
    assert found.state_bytes == (8 + 4) * 10_000
    assert found.num_pages == ((FREE // 2 - found.state_bytes) // (16 * TOKEN),)
    assert found.num_bytes == found.num_pages[0] * 16 * TOKEN + found.state_bytes
    assert str(found).endswith("; 0.11 MiB of it are states")


def test_states_that_leave_no_room_for_a_page_are_rejected() -> None:
    words = "--kv-cache-memory 50%: the states of --max-num-seqs 8 requests and of 4 prefixes take 0.46 MiB of it"
    with pytest.raises(StartError, match=words):
        with_states(40_400)
