"""Metrics of the stages, by which autoscalers decide."""

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.router_harness import D0, E0, E1, P0, PD0, PD1, RouterHarness
from triptych.messages.stats import InstanceStats, LanguageStats, PageUsage
from triptych.messages.work import Draining, Encoded, Heartbeat, Tokens


def stages(harness: RouterHarness, name: str) -> dict[str, float]:
    text = generate_latest(harness.router.metrics.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["stage"]: sample.value for sample in families[f"triptych:stage_{name}"].samples}


def language(waiting: int = 0, prefilling: int = 0, used: int = 0) -> InstanceStats:
    pages = [PageUsage("full", 10, used, 0), PageUsage("window 64", 0, 0, 0)]
    return InstanceStats(language=LanguageStats(waiting, prefilling, 0, pages, 0, 0, 0, 0, 0))


def test_stages_without_an_instance_are_saturated() -> None:
    assert stages(RouterHarness(), "saturation") == {"encode": 1, "prefill": 1, "decode": 1}
    assert stages(RouterHarness(E0, PD0), "saturation") == {"encode": 0, "prefill": 0, "decode": 0}
    assert stages(RouterHarness(E0, D0), "saturation") == {"encode": 0, "prefill": 1, "decode": 0}


def test_saturation_is_the_mean_of_what_instances_have_of_what_they_may_have() -> None:
    harness = RouterHarness(PD0, PD1, max_num_seqs=8, max_queue=100)
    for expected in (0.05, 0.1, 0.15):
        harness.submit()
        assert stages(harness, "saturation")["decode"] == pytest.approx(expected)
    for _ in range(30):
        harness.submit()
    assert stages(harness, "saturation") == {"encode": 1, "prefill": 1, "decode": 1}


def test_an_encode_instance_is_saturated_by_patches_and_by_long_items() -> None:
    harness = RouterHarness(E0, E1, PD0, encode_batch_patches=4)
    stream = harness.submit(5.0, 7.0)
    first, _ = harness.need(stream, 0, 1)
    assert 0 < stages(harness, "saturation")["encode"] < 1
    assert stages(harness, "outstanding")["encode"] == 12
    harness.router.handle(Encoded(first, cached=False, intervals=[]))
    assert stages(harness, "outstanding")["encode"] == 7


def test_a_full_kv_cache_saturates_a_language_instance() -> None:
    harness = RouterHarness(PD0, PD1)
    harness.router.handle(Heartbeat(PD0, language(used=10)))
    harness.router.handle(Heartbeat(PD1, language(used=5)))
    assert stages(harness, "saturation")["decode"] == 0.75


def test_a_prefill_instance_is_saturated_by_the_prompts_that_it_reports() -> None:
    harness = RouterHarness(P0, D0, max_num_seqs=8)
    harness.router.handle(Heartbeat(P0, language(waiting=3, prefilling=1)))
    assert stages(harness, "saturation") == {"encode": 1, "prefill": 0.5, "decode": 0}
    harness.router.handle(Heartbeat(P0, language(waiting=300)))
    assert stages(harness, "saturation")["prefill"] == 1


def test_an_instance_that_drains_does_not_count() -> None:
    harness = RouterHarness(PD0, PD1)
    harness.router.handle(Heartbeat(PD0, language(used=10)))
    harness.router.handle(Draining(PD0))
    assert stages(harness, "saturation")["decode"] == 0
    harness.router.handle(Draining(PD1))
    assert stages(harness, "saturation")["decode"] == 1


def test_work_in_flight_counts_until_it_is_done_queued_or_not() -> None:
    harness = RouterHarness(PD0, max_num_seqs=1)
    streams = [harness.submit() for _ in range(5)]
    assert stages(harness, "outstanding") == {"encode": 0, "prefill": 5, "decode": 5}
    harness.router.handle(Tokens(streams[0].request, [7], 0))
    assert stages(harness, "outstanding") == {"encode": 0, "prefill": 4, "decode": 5}
    for stream in streams:
        harness.router.lifecycle.cancel(stream.request)
    assert stages(harness, "outstanding") == {"encode": 0, "prefill": 0, "decode": 0}


def test_slots_and_snapshots_of_states_are_reported() -> None:
    harness = RouterHarness(PD0, PD1)
    for address, used in ((PD0, 3), (PD1, 0)):
        stats = LanguageStats(0, 0, 0, [], 0, 0, 0, 0, 0, 8, used, 4, 2)
        harness.router.handle(Heartbeat(address, InstanceStats(language=stats)))
    text = generate_latest(harness.router.metrics.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, expected in (("state_slots", [8, 8]), ("state_slots_used", [3, 0]), ("state_snapshots_cached", [2, 2])):
        found = {one.labels["instance_name"]: one.value for one in families[f"triptych:{name}"].samples}
        assert [found[name] for name in ("pd0", "pd1")] == expected
