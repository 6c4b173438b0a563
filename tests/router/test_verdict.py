"""Which stage binds in known situations, and what is said about it."""

from typing import Any

from triptych.router.load_sample import FrontendSample, InstanceSample, LoadSample, StageQueue
from triptych.router.request_state import RequestPhase
from triptych.router.verdict import verdict
from triptych.topology import Role, Stage

CONTROL = "127.0.0.1:7777"
ENCODING, PREFILLING, DECODING = RequestPhase.ENCODING, RequestPhase.PREFILLING, RequestPhase.DECODING


def instance(name: str, busy: float = 0.3, **what: Any) -> InstanceSample:
    """One that has 32 slots; its role is what its name begins with."""
    return InstanceSample(name, Role(name.rstrip("0123456789").upper()), busy, **{"max_running": 32} | what)


def window(*instances: InstanceSample, length: int = 10, **what: Any) -> list[LoadSample]:
    """Some seconds in which nothing changed."""
    queues = {Stage(stage.upper()): StageQueue(*what.pop(stage)) for stage in "epd" if stage in what}
    return [LoadSample(instances, queues, **what)] * length


def test_a_slow_encoder_binds() -> None:
    hungry = window(
        instance("e0", 0.98), instance("e1", 0.96), instance("pd0", 0.4, waiting=20), e=(34, 2.13), p=(5, 0.7),
        num_in={ENCODING: 30, DECODING: 2}, length=7,
    )  # fmt: skip
    fed = window(instance("e0", 0.98), instance("e1", 0.96), instance("pd0", 0.4), e=(34, 2.13), p=(5, 0.7),
                 num_in={ENCODING: 30, PREFILLING: 1}, length=3)  # fmt: skip
    found = verdict(hungry + fed, CONTROL)
    assert found.stage == "encode"
    assert found.sentence == (
        "Encode binds: e0 and e1 are 97 % busy, 34 items wait, the first for 2.1 s; "
        "prefill waits for embeddings 70 % of the time."
    )
    assert found.advice == f"Another instance: triptych scale --control {CONTROL} E=3."


def test_a_frontend_without_time_binds() -> None:
    busy = FrontendSample(0.97, StageQueue(14, 0.32))
    calm = [instance("e0", 0.4), instance("pd0", 0.6)]
    found = verdict(window(*calm, frontend=busy))
    assert found.stage == "frontend"
    assert (
        found.sentence == "Frontend binds: it is 97 % busy, and 14 requests are being prepared, the first for 320 ms."
    )
    assert "--frontends 2" in found.advice
    # for a stage whose requests have waited longer, more frontends would do nothing
    assert verdict(window(instance("e0", 0.98), instance("pd0", 0.4), e=(30, 2.0), frontend=busy)).stage == "encode"
    # and one that is as busy, but prepares each request at once, keeps no request waiting
    assert verdict(window(*calm, frontend=FrontendSample(0.97, StageQueue()))).stage == ""


def test_media_that_are_fetched_slowly_are_no_load_on_the_frontend() -> None:
    found = verdict(window(instance("pd0", 0.1), frontend=FrontendSample(0.02, StageQueue(5, 8.0))))
    assert found.stage == "frontend"
    assert (
        "5 requests are being prepared, the first for 8.0 s, though it is 2 % busy: media are fetched" in found.sentence
    )
    assert "--media-fetch-timeout" in found.advice


def test_what_is_being_prepared_is_named_when_nothing_binds() -> None:
    found = verdict(window(instance("pd0", 0.1), frontend=FrontendSample(0.2, StageQueue(1, 0.02))))
    assert found.sentence.startswith("Nothing binds: 1 request is being prepared, the first for 20 ms, and pd0")


def test_items_that_wait_at_the_encoder_itself_count() -> None:
    found = verdict(window(instance("e0", 0.95, encode_waiting=6), instance("pd0", 0.2), num_in={ENCODING: 6}))
    assert found.stage == "encode"
    assert "6 items wait;" in found.sentence


def test_media_that_take_long_to_prepare_bind_encode_though_its_tower_is_idle() -> None:
    found = verdict(window(instance("e0", 0.2), instance("pd0", 0.2), e=(9, 3.0), num_in={ENCODING: 9}))
    assert found.stage == "encode"
    assert "though e0 is 20 % busy" in found.sentence
    assert "--decode-workers" in found.advice


def test_a_tiny_kv_cache_binds() -> None:
    full = instance("pd0", 0.9, kv_fill=0.97, waiting=12, running=3, preemptions=4)
    found = verdict(window(instance("e0"), full, p=(20, 4.0), num_in={PREFILLING: 12, DECODING: 3}), CONTROL)
    assert found.stage == "decode"
    assert found.sentence == (
        "Decode binds: the KV cache of pd0 is 97 % full, 12 requests wait for its pages, "
        "4 preemptions in the last 10 s."
    )
    assert found.advice.startswith("A larger KV cache (--kv-cache-memory)")
    assert f"triptych scale --control {CONTROL} PD=2" in found.advice


def test_a_full_cache_of_which_nothing_waits_binds_nothing() -> None:
    assert verdict(window(instance("pd0", 0.9, kv_fill=0.97, running=3), num_in={DECODING: 3})).stage == ""


def test_pages_that_are_held_by_requests_without_embeddings_are_not_the_cause() -> None:
    held = instance("pd0", 0.3, kv_fill=0.97, waiting=12)
    assert verdict(window(instance("e0", 0.99), held, e=(20, 2.0), num_in={ENCODING: 12})).stage == "encode"


def test_one_slow_decode_instance_binds() -> None:
    group = [instance(name, 0.6, running=4, step_seconds=0.021) for name in ("d0", "d2")]
    slow = instance("d1", 0.99, running=6, step_seconds=0.084)
    found = verdict(window(instance("p0", 0.5), *group, slow, num_in={DECODING: 14}), CONTROL)
    assert found.stage == "decode"
    assert found.sentence == (
        "Decode binds: a step takes 84 ms at d1 and 21 ms at d0 and d2, and d1 has 43 % of the requests that run."
    )
    assert "d1" in found.advice
    even = [instance(name, 0.9, running=4, step_seconds=0.02 + 0.005 * n) for n, name in enumerate(("d0", "d1", "d2"))]
    assert verdict(window(instance("p0", 0.5), *even, num_in={DECODING: 12})).stage == ""


def test_one_clients_load_binds_if_others_have_requests_too() -> None:
    busy = window(
        instance("e0", 0.97), instance("pd0", 0.5), e=(40, 6.0), p=(9, 4.0), num_in={ENCODING: 30},
        num_clients=3, largest_client="key 1a2b3c4d", largest_share=0.93,
    )  # fmt: skip
    found = verdict(busy, CONTROL)
    assert found.stage == "client"
    assert found.sentence == (
        "One client binds: key 1a2b3c4d has 93 % of the requests in flight, 40 items wait, the first for 6.0 s, and "
        "encode is 97 % busy."
    )
    assert "--max-queue-per-client" in found.advice
    alone = window(
        instance("e0", 0.97), instance("pd0", 0.5), e=(40, 6.0), num_in={ENCODING: 30}, num_clients=1,
        largest_client="key 1a2b3c4d", largest_share=1.0,
    )  # fmt: skip
    assert verdict(alone).stage == "encode"


def test_prefill_and_decode_bind_apart() -> None:
    both = [instance("p0", 0.98, waiting=7), instance("d0", 0.4)]
    assert verdict(window(*both, p=(7, 1.0), num_in={PREFILLING: 8})).stage == "prefill"
    assert verdict(window(*both, num_in={PREFILLING: 8})).stage == "prefill"
    both = [instance("p0", 0.3), instance("d0", 0.97, running=32)]
    found = verdict(window(*both, d=(15, 2.5), num_in={DECODING: 32}), CONTROL)
    assert found.stage == "decode"
    assert found.advice.endswith("D=2.")


def test_where_one_instance_prefills_and_decodes_what_it_does_most_binds() -> None:
    busy = instance("pd0", 0.99, running=32)
    assert verdict(window(busy, p=(15, 2.5), num_in={DECODING: 30, PREFILLING: 4})).stage == "decode"
    assert verdict(window(busy, p=(15, 2.5), num_in={DECODING: 3, PREFILLING: 29})).stage == "prefill"


def test_one_instance_of_all_stages_binds_where_the_work_waits() -> None:
    busy = instance("epd0", 0.99, running=8, encode_waiting=12)
    assert verdict(window(busy, e=(9, 1.0), num_in={ENCODING: 20, DECODING: 2})).stage == "encode"
    assert verdict(window(instance("epd0", 0.99, running=32), p=(9, 1.0), num_in={DECODING: 32})).stage == "decode"


def test_too_few_slots_bind() -> None:
    found = verdict(window(instance("pd0", 0.5, running=2, max_running=2), p=(9, 3.0), num_in={DECODING: 2}))
    assert found.stage == "prefill"
    assert "2 requests are in the 2 slots of pd0" in found.sentence
    assert "--max-num-seqs" in found.advice


def test_a_stage_without_an_instance_binds_once_something_waits_for_it() -> None:
    assert verdict(window(instance("pd0"))).stage == ""
    now = [*window(instance("pd0")), *window(instance("pd0"), e=(3, 0.1))[-1:]]
    assert verdict(now).sentence == "Encode binds: no instance takes work, and 3 items wait, the first for 100 ms."
    found = verdict(window(instance("pd0"), e=(3, 1.0)), CONTROL)
    assert (found.stage, found.sentence) == (
        "encode", "Encode binds: no instance takes work, and 3 items wait, the first for 1.0 s.",
    )  # fmt: skip


def test_nothing_binds_where_nothing_waits() -> None:
    for quiet in (window(), [], window(instance("e0"), instance("pd0", 0.62, running=4), num_in={DECODING: 4})):
        found = verdict(quiet)
        assert (found.stage, found.advice) == ("", "")
        assert found.sentence.startswith("Nothing binds")
    assert found.sentence == "Nothing binds: nothing waits, and pd0 is 62 % busy, the most of all."


def test_a_moment_is_not_enough() -> None:
    calm = window(instance("e0", 0.9), instance("pd0"), num_in={DECODING: 1}, length=6)
    burst = window(instance("e0", 0.9), instance("pd0"), e=(30, 0.1), num_in={ENCODING: 9}, length=4)
    found = verdict(calm + burst)
    assert found.stage == ""
    assert "30 items wait" in found.sentence


def test_many_instances_are_counted_and_not_named() -> None:
    found = verdict(window(*(instance(f"e{n}", 0.97) for n in range(5)), instance("pd0"), e=(9, 1.0)))
    assert "5 instances are 97 % busy" in found.sentence
