"""``/metrics`` after requests with known numbers."""

import pytest

from tests.support.scraping import Scrape, scrape
from tests.support.serving import CHAT, Served, image, image_part, text_part, wait_for
from triptych.encode.loop import EncodeLoop
from triptych.router.request_state import MAX_FAILURES

STAGES = {"fetch", "plan", "queue", "preprocess", "encode", "transfer", "prefill", "decode"}


def growth(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after.total(name, **labels) - before.total(name, **labels)


def test_a_request_with_an_image_is_counted_once_in_every_metric_it_belongs_to(service: Served) -> None:
    with service.client() as client:
        before = scrape(client)
        content = [image_part(image(seed=900)), text_part("What is it?")]
        usage = service.post(content).json()["usage"]
        service.post(content)
        after = scrape(client)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert growth(before, after, name + "_count") == 2, name
    assert growth(before, after, "inter_token_latency_seconds_count") == 2 * 7
    assert growth(before, after, "prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert growth(before, after, "generation_tokens_total") == 2 * 8
    assert growth(before, after, "request_success_total", finished_reason="length") == 2
    assert growth(before, after, "request_success_total") == 2
    assert growth(before, after, "mm_items_total") == 2
    assert 0 < growth(before, after, "prompt_tokens_cached_total") < usage["prompt_tokens"]
    assert growth(before, after, "http_requests_total", handler=CHAT, status="200") == 2
    for stage in STAGES - {"queue"}:
        assert growth(before, after, f"request_{stage}_time_seconds_count") >= 1, stage
    for stage in ("encode", "prefill"):
        assert growth(before, after, "request_queue_time_seconds_count", stage=stage) >= 1, stage
    both = growth(before, after, "time_to_first_token_seconds_sum")
    assert 0 < both < growth(before, after, "e2e_request_latency_seconds_sum")


def test_instances_report_pools_caches_transfers_and_load(service: Served) -> None:
    encoder = next(host for instance in service.running.instances for host in instance.loops)
    assert isinstance(encoder, EncodeLoop)
    with service.client() as client:
        wait_for(lambda: scrape(client).total("mm_items_encoded_total") == encoder.num_encoded)
        (language,) = service.running.engine_loops()
        wait_for(lambda: scrape(client).total("instance_steps_total", instance_name="pd1") == language.num_steps)
        before = scrape(client)
        service.steps.close()
        pending = client.build_request("POST", CHAT, json=service.body([image_part(image(seed=901))], stream=True))
        service.steps.opened.set()
        service.steps.delay = 0.2  # eight steps: more than a heartbeat
        response = client.send(pending, stream=True)
        with service.client() as other:
            wait_for(lambda: scrape(other).total("num_requests_running", instance_name="pd1", stage="decode") == 1)
            during = scrape(other)
        assert 0 < during.total("kv_cache_usage_perc", instance_name="pd1") < 1
        response.read()
        wait_for(lambda: scrape(client).total("instance_steps_total") >= before.total("instance_steps_total") + 8)
        wait_for(lambda: scrape(client).total("num_requests_running") == 0)
        after = scrape(client)
    assert after.total("kv_cache_usage_perc") == 0
    assert growth(before, after, "mm_items_encoded_total", instance_name="e0", role="E") == 1
    assert growth(before, after, "mm_cache_queries_total") == 1
    assert growth(before, after, "transfer_received_total", kind="media", instance_name="pd1") == 1
    sent, received = (growth(before, after, f"transfer_{way}_bytes_total") for way in ("sent", "received"))
    assert sent == received > 0
    assert growth(before, after, "instance_busy_seconds_total", instance_name="pd1") > 8 * 0.2
    assert after.total("instance_resident_bytes", instance_name="e0") > 2**20
    assert after.total("mm_cache_bytes", instance_name="e0") > 0


@pytest.mark.parametrize("stop", [True, False])
def test_finish_reasons_are_counted_separately(service: Served, stop: bool) -> None:
    with service.client() as client:
        before = scrape(client)
        if stop:
            text = service.text("Tell me", max_tokens=60)
            service.text("Tell me", max_tokens=60, stop=[text[1:3]])
        else:
            body = service.body(max_tokens=3000, stream=True)
            with client.stream("POST", CHAT, json=body) as response:
                next(response.iter_lines())
        wait_for(lambda: scrape(client).total("request_success_total") > before.total("request_success_total") + stop)
        after = scrape(client)
    assert growth(before, after, "request_success_total", finished_reason="stop") == stop
    assert growth(before, after, "request_success_total", finished_reason="abort") == (not stop)


def test_failures_and_refusals_are_counted_by_name_and_routes_by_template(service: Served) -> None:
    with service.client() as client:
        before = scrape(client)
        service.steps.failures = MAX_FAILURES
        assert service.post("Fail, please").status_code == 500
        assert client.get("/no/such/path/in/here").status_code == 404
        assert client.patch("/v1/models").status_code == 405
        assert client.post(CHAT, json={"model": service.model}).status_code == 400
        after = scrape(client)
    assert growth(before, after, "request_failure_total", error="InternalError") == 1
    assert growth(before, after, "http_requests_total", handler="unknown", status="404") == 1
    assert growth(before, after, "http_requests_total", handler=CHAT, status="400") == 1
    assert growth(before, after, "http_requests_total", handler=CHAT, status="500") == 1


def test_no_client_input_becomes_a_label(service: Served) -> None:
    odd = "client-chose-this"
    with service.client() as client:
        client.get(f"/{odd}", headers={"x-request-id": odd})
        client.delete(f"/v1/{odd}")
        client.post(CHAT, json=service.body("x", user=odd) | {"model": odd})
        service.post("x", user=odd, cache_salt=odd)
        assert odd not in client.get("/metrics").text.lower()
