"""Records of ended requests: the log line, the trace, and the file for Perfetto."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import Collector, collecting
from tests.support.exits import exit_code
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from triptych.config import ObserveConfig

SECRET = "a prompt that stays private"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def observed(folder: Path, collector: Collector, log_file: Path) -> Iterator[Served]:
    observe = ObserveConfig(
        enable_log_requests=True, request_log_file=str(log_file), otlp_traces_endpoint=collector.url
    )
    with served(folder, topology="1E1P1D", observe=observe) as service:
        yield service


def ask(service: Served, request_id: str, content: Any = SECRET, **headers: str) -> str:
    """Return the answer's request id."""
    with service.client() as client:
        response = client.post(CHAT, json=service.body(content), headers={"x-request-id": request_id} | headers)
    return str(response.headers["x-request-id"])


def line(log_file: Path, request_id: str) -> dict[str, Any]:
    """Return the only log line of a request."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        lines = [json.loads(text) for text in log_file.read_text().splitlines() if text.startswith('{"')]
        found[:] = [one for one in lines if one["request_id"] == request_id]
        return bool(found)

    wait_for(look)
    (only,) = found
    return only


def test_the_log_line_has_outcome_and_timings_but_no_content(observed: Served, log_file: Path) -> None:
    assert ask(observed, "one", [image_part(image(seed=970)), text_part(SECRET)]) == "one"
    logged = line(log_file, "one")
    assert (logged["path"], logged["status"], logged["error"]) == (CHAT, 200, None)
    assert (logged["finish_reasons"], logged["generation_tokens"], logged["mm_items"]) == (["length"], 8, 1)
    assert 0 < logged["ttft_ms"] < logged["e2e_ms"]
    instances = {row["stage"]: row.get("instance", "frontend") for row in logged["timeline"]}
    assert instances == {
        "fetch": "frontend", "plan": "frontend", "queue": instances["queue"], "preprocess": "e0", "encode": "e0",
        "transfer": instances["transfer"], "prefill": "p1", "decode": "d2",
    }  # fmt: skip
    assert {row.get("instance") for row in logged["timeline"] if row["stage"] == "queue"} >= {"e0", "p1", "d2"}
    assert {row["instance"] for row in logged["timeline"] if row["stage"] == "transfer"} == {"p1", "d2"}
    assert all(0 <= row["start_ms"] <= row["end_ms"] <= logged["e2e_ms"] + 1 for row in logged["timeline"])
    assert SECRET not in log_file.read_text()
    assert "data:image" not in log_file.read_text()


def test_failed_and_aborted_requests_are_logged(observed: Served, log_file: Path) -> None:
    with observed.client() as client:
        client.post(CHAT, json={"model": observed.model}, headers={"x-request-id": "bad"})
        body = observed.body(max_tokens=3000, stream=True)
        with client.stream("POST", CHAT, json=body, headers={"x-request-id": "gone"}) as response:
            next(response.iter_lines())
        client.get("/health", headers={"x-request-id": "health"})
    assert (line(log_file, "bad")["status"], line(log_file, "bad")["error"]) == (400, "MissingField")
    assert line(log_file, "gone")["finish_reasons"] == ["abort"]
    wait_for(observed.everything_is_back)
    observed.steps.failures = 1000  # a step of the aborted request may still consume one
    ask(observed, "failed")
    observed.steps.failures = 0
    assert (line(log_file, "failed")["status"], line(log_file, "failed")["error"]) == (500, "InternalError")
    assert '"health"' not in log_file.read_text()
    wait_for(observed.everything_is_back)


@pytest.mark.parametrize("odd", ["", "x" * 129, 'a"b', "a b", "é"])
def test_an_id_that_could_not_be_logged_or_sent_back_is_replaced(observed: Served, odd: str) -> None:
    given = ask(observed, odd.encode())  # type: ignore[arg-type]
    assert len(given) == 32
    assert given != odd


@pytest.mark.parametrize("given", ["session-7/turn:3", "a b", "x" * 129])
def test_a_correlation_id_comes_back_and_is_logged(observed: Served, log_file: Path, given: str) -> None:
    kept = given if given.startswith("session") else None
    name = f"correlated-{len(given)}"
    headers = {"x-request-id": name, "x-correlation-id": given}
    with observed.client() as client:
        for body in (observed.body(), observed.body(stream=True), {}):
            response = client.post(CHAT, json=body, headers=headers | {"x-request-id": f"{name}-{len(body)}"})
            assert response.headers.get("x-correlation-id") == kept
            assert response.headers["x-request-id"] == f"{name}-{len(body)}"
            assert line(log_file, f"{name}-{len(body)}")["correlation_id"] == kept
        assert client.get("/health", headers=headers).headers.get("x-correlation-id") == kept
        assert "x-correlation-id" not in client.get("/health").headers


def test_a_trace_continues_the_clients_with_a_span_for_each_process(
    observed: Served, collector: Collector, log_file: Path
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    content = [image_part(image(seed=971)), text_part("What is it?")]
    ask(observed, "traced", content, traceparent=f"00-{trace}-{parent}-01", **{"x-correlation-id": "the-session"})
    assert line(log_file, "traced")["trace_id"] == trace

    def spans() -> list[tuple[str, Any]]:
        return [(instance, span) for instance, span in collector.spans if span.trace_id.hex() == trace]

    wait_for(lambda: any(span.parent_span_id.hex() == parent for _, span in spans()), 15)
    wait_for(lambda: len(spans()) == 1 + len(line(log_file, "traced")["timeline"]))
    (root,) = [span for _, span in spans() if span.parent_span_id.hex() == parent]
    assert root.name == f"POST {CHAT}"
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes["gen_ai.request.id"].string_value == "traced"
    assert attributes["triptych.correlation_id"].string_value == "the-session"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 8
    assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0
    children = [(instance, span) for instance, span in spans() if span is not root]
    assert all(span.parent_span_id == root.span_id for _, span in children)
    assert {instance for instance, _ in children} == {"frontend", "e0", "p1", "d2"}
    seen = {(instance, span.name) for instance, span in children}
    assert {("e0", "encode"), ("p1", "prefill"), ("d2", "decode")} <= seen
    slack = 2_000_000  # ns: an instance's last word comes a moment after its token
    for _, span in children:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + slack


def test_a_request_or_a_window_of_the_log_becomes_a_file_for_perfetto(
    observed: Served, log_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(observed, "first", [image_part(image(seed=972)), text_part("?")])
    line(log_file, "first")
    time.sleep(0.01)
    ask(observed, "second")
    second = line(log_file, "second")
    with log_file.open("a") as file:
        file.write("not a request\n{}\n")

    def traced(*arguments: str) -> list[dict[str, Any]]:
        out = tmp_path / "trace.json"
        assert exit_code(["trace", *arguments, "--log", str(log_file), "--out", str(out)]) == 0, capsys.readouterr()
        return list(json.loads(out.read_text())["traceEvents"])

    events = traced("first")
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(line(log_file, "first")["timeline"])
    assert {event["args"]["request_id"] for event in spans} == {"first"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {(names[event["pid"]], event["name"]) for event in spans} >= {
        ("frontend", "plan"), ("e0", "encode"), ("p1", "prefill"), ("d2", "decode"),
    }  # fmt: skip
    assert all(event["dur"] >= 0 and event["ts"] > 1.7e15 for event in spans), "microseconds since the epoch"
    later = {event["args"]["request_id"] for event in traced("--since", second["time"]) if event["ph"] == "X"}
    assert later == {"second"}
    earlier = {event["args"]["request_id"] for event in traced("--until", second["time"]) if event["ph"] == "X"}
    assert {"first", "second"} <= earlier
    for wrong in (["unknown"], ["--since", "noon"]):
        assert exit_code(["trace", *wrong, "--log", str(log_file), "--out", str(tmp_path / "none.json")]) in (1, 78)
    assert not (tmp_path / "none.json").exists()


def test_an_unreachable_collector_does_not_affect_requests(folder: Path) -> None:
    began = time.monotonic()
    with served(folder, "1EPD", observe=ObserveConfig(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")) as service:
        assert service.text()
    assert time.monotonic() - began < 20
