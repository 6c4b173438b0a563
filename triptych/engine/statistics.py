"""What an engine tells of its work in heartbeats."""

from triptych.engine.scheduler import Scheduler
from triptych.layers.cache_spec import layers_of
from triptych.messages.stats import LanguageStats, PageUsage


def language_stats(scheduler: Scheduler, num_steps: int, num_computed_tokens: int) -> LanguageStats:
    """Return a scheduler's requests, caches and counters, with those of the steps that have run."""
    running = [request for request in scheduler if request.running]
    decoding = sum(request.num_generated > 0 for request in running)
    cache, states = scheduler.cache, scheduler.cache.states
    return LanguageStats(
        waiting=len(scheduler) - len(running),
        prefilling=len(running) - decoding,
        decoding=decoding,
        kv_cache=[
            PageUsage(layers_of(window), pool.num_pages, pool.num_used, pool.num_cached)
            for window, pool in zip(cache.windows, cache.page_pools, strict=True)
        ],
        prefix_queries=scheduler.num_prefix_queries,
        prefix_hits=scheduler.num_prefix_hits,
        preemptions=scheduler.num_preemptions,
        state_slots=0 if states is None else states.slots.num_pages,
        state_slots_used=0 if states is None else states.slots.num_used,
        state_snapshots=0 if states is None else states.snapshots.num_pages,
        state_snapshots_cached=0 if states is None else states.snapshots.num_cached,
        steps=num_steps,
        computed_tokens=num_computed_tokens,
    )
