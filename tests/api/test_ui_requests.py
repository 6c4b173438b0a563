"""What the page shows of requests, and of prompts before they are sent."""

import threading
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from tests.support.serving import CHAT, Served, image, image_part, text_part, wait_for
from triptych.observe.pipeline import Figures, RequestView

SECRET = "the-content-of-a-request"


def get(service: Served, path: str, kind: Any) -> Any:
    with service.client() as client:
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        assert SECRET not in answer.text
        assert answer.headers["cache-control"] == "no-store"
        return msgspec.json.decode(answer.content, type=kind)


def ask(service: Served, name: str, content: Any, **settings: Any) -> int:
    with service.client() as client:
        body = service.body(content, **settings)
        return client.post(CHAT, json=body, headers={"X-Request-ID": name}).status_code


def test_a_request_is_listed_and_shown_with_its_timeline(service: Served) -> None:
    content = [image_part(image(seed=641)), text_part(SECRET)]
    assert ask(service, "org/model:1", content) == 200
    assert ask(service, "refused", SECRET, max_tokens=10**6) == 400
    listed = get(service, "/ui/requests?limit=2", list[RequestView])
    assert [(view.id, view.status, view.error) for view in listed] == [
        ("refused", 400, "PromptTooLong"), ("org/model:1", 200, ""),
    ]  # fmt: skip
    assert all(view.client.startswith("address ") and not view.timeline for view in listed)
    assert "127.0.0.1" not in listed[0].client
    [ok] = get(service, "/ui/requests?status=ok&limit=1", list[RequestView])
    assert ok.id == "org/model:1"
    assert get(service, f"/ui/requests?client={ok.client}&stage={ok.slowest}&status=200&limit=1", list[RequestView])
    assert get(service, "/ui/requests?client=another", list[RequestView]) == []
    one = get(service, "/ui/requests/org/model:1", RequestView)
    assert {"fetch", "plan", "preprocess", "encode", "prefill", "decode"} <= {part.stage for part in one.timeline}
    assert (one.num_items, one.num_tokens, one.finish_reason) == (1, 8, "length")
    assert one.time_to_first_token is not None and 0 < one.time_to_first_token < one.seconds
    trace = get(service, "/ui/requests/org/model:1/perfetto", dict[str, Any])
    assert {"encode", "decode"} <= {event["name"] for event in trace["traceEvents"]}
    figures = get(service, "/ui/figures?ttft_ms=1e6&tpt_ms=1e6", Figures)
    assert sum(bucket.num_good for bucket in figures.buckets) >= 1
    assert sum(bucket.num_good for bucket in get(service, "/ui/figures?ttft_ms=0.001", Figures).buckets) == 0


def test_a_request_in_flight_is_shown_with_what_is_done_now(service: Served) -> None:
    service.encoder.close()
    with ExitStack() as stack:
        asking = threading.Thread(target=ask, args=[service, "in-flight", [image_part(image(seed=642))]])
        asking.start()
        stack.callback(asking.join)
        stack.callback(service.encoder.opened.set)
        wait_for(service.encoder.entered.is_set)
        one = get(service, "/ui/requests/in-flight", RequestView)
        assert (one.ended, one.status, one.timeline[-1].stage, one.timeline[-1].instance) == (False, 0, "encode", "e0")
        assert (one.seconds > 0, one.timeline[-1].end) == (True, 0)
        events = get(service, "/ui/requests/in-flight/perfetto", dict[str, Any])["traceEvents"]
        [encode] = [event for event in events if event["name"] == "encode"]
        assert encode["dur"] > 0  # until now
        running = get(service, "/ui/requests?status=running", list[RequestView])
        assert [view.id for view in running] == ["in-flight"]


@pytest.mark.parametrize("path", ["requests/nothing", "requests/nothing/perfetto", "requests/%3Cscript%3E"])
def test_an_unknown_request_is_not_found(service: Served, path: str) -> None:
    with service.client() as client:
        answer = client.get(f"/ui/{path}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/json"
        assert "<script>" not in answer.text


@pytest.mark.parametrize(
    "query", ["requests?limit=x", "requests?limit=-1", "figures?ttft_ms=nan", "figures?tpt_ms=x", "figures?seconds=7"]
)
def test_a_query_that_means_nothing_is_refused(service: Served, query: str) -> None:
    with service.client() as client:
        assert client.get(f"/ui/{query}").status_code == 400


def test_names_that_clients_choose_are_data(service: Served) -> None:
    """What comes back is JSON, or an answer that says its type and may not be sniffed."""
    evil = "<img src=x onerror=alert(1)>"
    with service.client() as client:
        client.post(CHAT, json=service.body("x", model=evil), headers={"X-Request-ID": evil})
        for path in ("/ui/requests", "/ui/figures", f"/ui/requests/{evil}", f"/ui/{evil}", f"/ui/events?rate={evil}"):
            answer = client.get(path)
            assert answer.headers["content-type"] == "application/json", path
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert evil not in answer.text
