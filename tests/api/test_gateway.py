"""A service whose answers come from vLLM servers: what is passed on, what is refused, and what becomes of requests when
servers fail."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import gateways
from tests.support.gateways import WORDS, gateway_and_server, ready, states
from tests.support.serving import CHAT, Served, image, image_part, text_part, wait_for
from tests.support.tiny import make_tiny
from tests.support.vllm_server import COMPLETIONS, VllmServer, vllm_server
from triptych.client import EncodeClient
from triptych.config import EnginesConfig
from triptych.errors import ConfigError, TopologyError
from triptych.gateway.servers import ServerState
from triptych.topology import Topology

gateway = partial(gateways.gateway, engine_requests=4)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Servers are looked after often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triptych.gateway.servers.CHECK_SECONDS", 0.05)
        yield


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Served, VllmServer]]:
    with gateway_and_server(folder, engine_requests=4) as both:
        yield both


@pytest.fixture
def both(pair: tuple[Served, VllmServer]) -> Iterator[tuple[Served, VllmServer]]:
    """One service and its server; fails a test that leaves requests behind."""
    service, server = pair
    ready(service)
    server.opened.clear()
    server.bodies.clear()
    server.headers.clear()
    server.num_gone = 0
    yield pair
    server.opened.set()
    server.behaviours.clear()
    service.settle()
    wait_for(lambda: not server.running)
    wait_for(lambda: not any(one.running for one in service.running.frontend.router.servers or ()))


# ── what is passed on ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_passed_on_as_it_came(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    fields = {
        "model": service.model,
        "messages": [{"role": "user", "content": "Hi", "name": "x"}, {"role": "tool", "content": [text_part("a")]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "guided_something": {"deep": [1, None, "é"]},
        "temperature": 0.25,
        "cache_salt": "s",
    }
    with service.client() as client:
        response = client.post(CHAT, json=fields, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == WORDS
    (body,), (headers,) = server.bodies, server.headers
    assert body == fields | {"model": server.model}
    assert headers["x-request-id"] == "mine"
    assert "authorization" not in headers


def test_events_are_passed_on_as_they_came(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    server.behaviours.append("pause")
    with service.client() as client, client.stream("POST", CHAT, json=service.body(stream=True)) as response:
        lines = response.iter_lines()
        first = next(lines)
        assert json.loads(first.removeprefix("data: "))["extra"] == "as it came"
        server.opened.set()
        rest = [line for line in lines if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [json.loads(one[6:])["choices"][0]["delta"]["content"] for one in [first, *rest[:-1]]] == WORDS.split()
    assert rest[-1] == "data: [DONE]"


def test_rows_take_the_place_of_images(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    pictures = [image(96, 64), image(64, 96, 1)]
    first, second = map(image_part, pictures)
    answer = service.text([text_part("a"), first, text_part("b"), second, first])
    assert answer == WORDS
    (body,) = server.bodies
    (message,) = body["messages"]
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image_embeds", "text", "image_embeds", "image_embeds"]
    with EncodeClient(service.url) as client:
        items = client.encode(first, second, first)
    sent = [part for part in message["content"] if part["type"] == "image_embeds"]
    for part, item in zip(sent, items, strict=True):
        assert part["uuid"] == item.key
        assert part["image_embeds"]["image_grid_thw"] == list(item.grid_thw)
        rows = np.lib.format.read_array(io.BytesIO(base64.b64decode(part["image_embeds"]["image_embeds"])))
        assert np.array_equal(rows, item.rows)
    assert "mm_processor_kwargs" not in body


def test_rows_and_times_take_the_place_of_videos(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    video = listed_frames(5)
    assert service.text([video, image_part(), text_part("a")]) == WORDS
    (part, picture, _) = server.bodies[0]["messages"][0]["content"]
    assert (part["type"], picture["type"]) == ("video_embeds", "image_embeds")
    with EncodeClient(service.url) as client:
        (item,) = client.encode(video)
    assert part["video_embeds"]["video_grid_thw"] == list(item.grid_thw)
    assert part["video_embeds"]["timestamps"] == [0.25, 1.25, 2.0]
    rows = np.lib.format.read_array(io.BytesIO(base64.b64decode(part["video_embeds"]["video_embeds"])))
    assert np.array_equal(rows, item.rows)


def listed_frames(number: int, fps: float = 2.0) -> dict[str, Any]:
    frames = [image_part(image(64, 64, seed))["image_url"]["url"] for seed in range(number)]
    return {"type": "video", "video": frames, "fps": fps}


@pytest.mark.parametrize(
    ("family", "part", "param"),
    [
        ("llava", listed_frames(4), "type"),
        ("qwen2_5_omni", listed_frames(4), "type"),
        ("qwen2_5_omni", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "type"),
        ("qwen2_5_vl", listed_frames(8, 1.0), "video"),
    ],
)
def test_media_that_vllm_cant_take_are_refused(tmp_path: Path, family: str, part: dict[str, Any], param: str) -> None:
    """By name, before an item is encoded: kinds, and videos whose times vLLM isn't told."""
    folder = make_tiny(tmp_path / family, family)
    with vllm_server(folder) as server, gateway(folder, server) as service:
        ready(service)
        refused = service.post([text_part("a"), part])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"messages[0].content[1].{param}"
        assert "vLLM takes" in refused.json()["error"]["message"]
        if family == "qwen2_5_vl":
            assert service.text([listed_frames(8)]) == WORDS
            assert list(server.bodies[0]["messages"][0]["content"][0]["video_embeds"]) == [
                "video_embeds",
                "video_grid_thw",
            ]
            return
        assert not server.bodies


def test_families_without_a_grid_send_rows_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "llava", "llava")
    with vllm_server(folder) as server, gateway(folder, server) as service:
        ready(service)
        assert service.text([image_part(), text_part("x")]) == WORDS
        (part, _) = server.bodies[0]["messages"][0]["content"]
        assert isinstance(part["image_embeds"], str)


def test_pictures_are_known_by_name(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    service.text([image_part() | {"uuid": "cat"}])
    service.text([{"type": "image_url", "image_url": None, "uuid": "cat"}])
    first, second = (body["messages"][0]["content"][0]["uuid"] for body in server.bodies)
    assert first == second
    assert first != "cat"


def test_names_of_adapters_are_the_servers(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    service.text(model="adapter")
    service.text(model="default")
    assert [body["model"] for body in server.bodies] == ["adapter", server.model]
    refused = service.post(model="another")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


def test_requests_for_an_adapter_go_where_it_is(folder: Path) -> None:
    """Servers load and unload them at any time; that of a lost server is awaited."""
    with vllm_server(folder, adapters=[]) as one, vllm_server(folder) as two, gateway(folder, one, two) as service:
        ready(service, 2)
        for _ in range(4):
            assert service.text(model="adapter") == WORDS
        assert (len(one.bodies), len(two.bodies)) == (0, 4)
        one.adapters.append("late")
        wait_for(lambda: service.post(model="late").status_code == 200)
        assert one.bodies[-1]["model"] == "late"
        one.adapters.clear()
        wait_for(lambda: service.post(model="late").status_code == 404)
        two.behaviours += ["hang"] * 4
        with ThreadPoolExecutor(5) as threads:
            taken = [threads.submit(service.text, model="adapter") for _ in range(4)]
            wait_for(lambda: two.running == 4)
            unloaded = threads.submit(service.post, model="adapter")
            wait_for(lambda: num_waiting(service) == 1)
            two.adapters.clear()
            assert unloaded.result().status_code == 404
            two.adapters.append("adapter")
            two.opened.set()
            assert [answer.result() for answer in taken] == [WORDS] * 4
        wait_for(lambda: service.post(model="adapter").status_code == 200)
        two.kill()
        wait_for(lambda: "lost" in states(service))
        with ThreadPoolExecutor(1) as threads:
            awaited = threads.submit(service.text, model="adapter")
            wait_for(lambda: num_waiting(service) == 1)
            assert service.text() == WORDS
            two.start()
            assert awaited.result() == WORDS
        assert all(body["model"] != "adapter" for body in one.bodies)


def test_refusals_are_passed_on(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    for stream in (False, True):
        server.behaviours.append("400")
        error = service.post(stream=stream, top_k=-7)
        assert error.status_code == 400
        assert error.json()["error"] == {
            "message": "vLLM says no", "type": "invalid_request_error", "param": "top_k", "code": "invalid_value"
        }  # fmt: skip
    assert len(server.bodies) == 2


def test_a_plan_says_what_a_chat_would_be_told(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    with service.client() as client:
        plan = client.post("/v1/plan", json=service.body([image_part()])).json()
    assert (plan["admission"]["admitted"], plan["admission"]["error"]) == (True, None)
    assert not server.bodies


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ec_transfer_params": {"triptych": "x"}}, "ec_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"vllm_xargs": {"ec_transfer_params": "x"}}, "vllm_xargs.ec_transfer_params"),
        ({"chat_template": "{{ '<|image' + '_pad|>' }}"}, "chat_template"),
        ({"media_io_kwargs": {"video": {}}}, "media_io_kwargs"),
        ({"stream": "yes"}, "stream"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "long"}, "timeout"),
        ({"model": 3}, "model"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"messages": "x"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"tools": [{"type": "function", "function": {"name": "<|image_pad|>"}}]}, "tools[0].function.name"),
        ({"mm_processor_kwargs": {"min_pixels": -1}}, "mm_processor_kwargs.min_pixels"),
    ],
)
def test_fields_that_clients_may_not_send(both: tuple[Served, VllmServer], fields: dict[str, Any], param: str) -> None:
    service, server = both
    response = service.post(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not server.bodies


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "x"}, "type"),
        ({"type": "prompt_embeds", "data": "x"}, "type"),
        ({"type": "audio_url", "audio_url": {"url": "data:,"}}, "type"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "type"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "video_url.url"),
        ({"image_url": "data:,"}, "type"),
        ("text", "type"),
        ({"type": "text", "text": "x", "uuid": "forged"}, "uuid"),
        ({"type": "text", "text": "<|image_pad|>"}, "text"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}, "image_url.url"),
        ({"type": "image_url", "image_url": None}, "image_url"),
    ],
)
def test_parts_that_clients_may_not_send(both: tuple[Served, VllmServer], part: Any, param: str) -> None:
    service, server = both
    response = service.post([text_part("a"), part])
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"messages[0].content[1].{param}")
    assert not server.bodies


def test_what_is_no_json_is_refused(both: tuple[Served, VllmServer]) -> None:
    service, _ = both
    with service.client() as client:
        for text in (b"{", b"[]", b'{"messages": [{"role": "user", "content": NaN}]}', b"[" * 1000):
            assert client.post(CHAT, content=text).status_code == 400


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("sglang=http://a:1", "doesn't begin with vllm="),
        ("vllm=", "is not http://HOST:PORT"),
        ("vllm=http://a:1/x", "is not http://HOST:PORT"),
        ("vllm=http://u:p@a:1", "is not http://HOST:PORT"),
        ("vllm=http://a:1,http://a:1/v1", "twice"),
    ],
)
def test_servers_are_named_by_urls(engine: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EnginesConfig(engine=engine)
    assert EnginesConfig(engine="vllm=http://a:1/v1, https://[::1]:2/").urls == ("http://a:1", "https://[::1]:2")


def test_only_encode_instances_stand_before_a_server(tmp_path: Path) -> None:
    assert str(Topology.parse("2E", decodes=False)) == "2E"
    assert str(Topology.parse("1E", decodes=False).scaled({Topology.parse("1E1PD").roles[0]: 3})) == "3E"
    with pytest.raises(TopologyError, match="encode instances"):
        Topology.parse("1E1PD", decodes=False)
    folder = make_tiny(tmp_path / "gemma3", "gemma3")
    with (
        vllm_server(folder) as server,
        pytest.raises(ConfigError, match="takes no rows of gemma3"),
        gateway(folder, server),
    ):
        pass


# ── servers that are others, or fail ─────────────────────────────────────────────────────────────────────────────


def test_servers_of_another_model_get_nothing(folder: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", "qwen2_5_vl")
    with ExitStack() as stack:
        own = stack.enter_context(vllm_server(folder))
        tokenizer = stack.enter_context(vllm_server(folder, tokens=[1, 2]))
        weights = stack.enter_context(vllm_server(folder, root=str(other)))
        service = stack.enter_context(gateway(folder, weights, tokenizer, own))
        wait_for(lambda: states(service) == ["refused", "refused", "serving"])
        for _ in range(4):
            service.text()
        assert not weights.bodies
        assert not tokenizer.bodies
        why = [one.why for one in service.running.frontend.router.servers or ()]
        assert "another checkpoint: weights" in why[0]
        assert "tokenizer" in why[1]


def test_a_checkpoint_that_cant_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with (
        vllm_server(folder, root=str(tmp_path)) as one,
        vllm_server(folder, root="/" + "x" * 5000) as two,
        gateway(folder, one, two) as service,
    ):
        wait_for(lambda: states(service) == ["refused", "refused"])
        why = [server.why for server in service.running.frontend.router.servers or ()]
        assert str(tmp_path) in why[0]
        assert all("checkpoint can't be compared" in one for one in why)


@pytest.mark.parametrize(
    ("behaviour", "stream"),
    [(one, stream) for one in ("500", "429", "break") for stream in (False, True)]
    + [("html", False), ("garbage", True), ("error", True)],
)
def test_a_request_goes_on_elsewhere(folder: Path, behaviour: str, stream: bool) -> None:
    with vllm_server(folder) as one, vllm_server(folder) as two, gateway(folder, one, two) as service:
        ready(service, 2)
        one.behaviours.append(behaviour)
        response = service.post(stream=stream)
        assert response.status_code == 200
        assert "three" in response.text
        assert (len(one.bodies), len(two.bodies)) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_no_server_answers_ends_with_503(both: tuple[Served, VllmServer], *, stream: bool) -> None:
    service, server = both
    server.behaviours += ["500"] * 3
    response = service.post(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "instance_lost")
    assert len(server.bodies) == 3


def test_a_request_that_ends_two_servers_goes_to_no_third(folder: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(vllm_server(folder)) for _ in range(3)]
        service = stack.enter_context(gateway(folder, *servers))
        ready(service, 3)
        for server in servers:
            server.behaviours.append("die")
        response = service.post()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "instance_lost")
        assert sum(len(server.bodies) for server in servers) == 2
        (left,) = (server for server in servers if not server.bodies)
        left.behaviours.clear()
        assert service.text() == WORDS


@pytest.mark.parametrize("behaviour", ["half", "endless"])
def test_a_stream_that_breaks_says_so(both: tuple[Served, VllmServer], behaviour: str) -> None:
    service, server = both
    server.behaviours += [behaviour] * 3
    response = service.post(stream=True)
    if behaviour == "half":
        first, last = [one for one in response.text.split("\n\n") if one]
        assert "one" in first
        assert json.loads(last[6:])["error"]["code"] == "instance_lost"
        server.behaviours.clear()
    else:
        assert response.status_code == 503


def test_an_endless_answer_is_refused(both: tuple[Served, VllmServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.relay.MAX_ANSWER_BYTES", 2**22)
    service, server = both
    server.behaviours += ["endless"] * 3
    assert service.post().status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(both: tuple[Served, VllmServer], *, stream: bool) -> None:
    service, server = both
    server.behaviours.append("on" if stream else "hang")
    with service.client() as client:
        if stream:
            with client.stream("POST", CHAT, json=service.body(stream=True)) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=service.body(), timeout=0.2)
    wait_for(lambda: server.num_gone == 1)


@pytest.mark.parametrize(("header", "field"), [(0.3, 20.0), (20.0, 0.3), (0.3, None)])
def test_a_deadline_ends_a_request(both: tuple[Served, VllmServer], header: float, field: float | None) -> None:
    """The sooner one, of the header or the body, which the server doesn't get."""
    service, server = both
    server.behaviours += ["hang"]
    with service.client() as client:
        response = client.post(CHAT, json=service.body(timeout=field), headers={"x-request-timeout": str(header)})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "timeout" not in server.bodies[0]
    wait_for(lambda: server.num_gone == 1)


def test_a_server_that_is_killed_and_started_again(folder: Path) -> None:
    """Requests without a token go on there; those that wait are answered, too."""
    with vllm_server(folder) as server, gateway(folder, server) as service, ThreadPoolExecutor(8) as threads:
        ready(service)
        server.behaviours += ["hang"] * 4
        answers = [threads.submit(service.text, [image_part(image(seed=n % 3))]) for n in range(8)]
        for _ in range(4):  # the most that it may have
            assert server.entered.acquire(timeout=20)
        server.kill()
        wait_for(lambda: states(service) == ["lost"])
        answers.append(threads.submit(service.text))
        server.start()
        assert [one.result() for one in answers] == [WORDS] * 9
        assert server.most_running <= 4
        with service.client() as client:
            metrics = client.get("/metrics").text
        assert 'triptych:server_losses_total{server="vllm0"} 1.0' in metrics
        assert 'triptych:server_up{server="vllm0"} 1.0' in metrics
        service.settle()


def test_without_any_server_requests_wait_and_then_end(folder: Path) -> None:
    with vllm_server(folder) as server:
        server.kill()
        with gateway(folder, server, restart_hold=0.3) as service:
            waited = service.post([image_part()])
            assert (waited.status_code, waited.json()["error"]["code"]) == (503, "unavailable")
            with service.client() as client:
                plan = client.post("/v1/plan", json=service.body([image_part()])).json()
                assert plan["admission"]["error"]["code"] == "unavailable"
                why = client.get("/ready")
                assert (why.status_code, "vllm0" in why.json()["reason"]) == (503, True)
            server.start()
            ready(service)
            assert service.text() == WORDS
            with service.client() as client:
                assert client.get("/ready").status_code == 200


def test_a_server_that_says_it_is_ill_is_lost(folder: Path) -> None:
    with vllm_server(folder) as one, vllm_server(folder) as two, gateway(folder, one, two) as service:
        ready(service, 2)
        one.behaviours.append("hang")
        two.behaviours.append("hang")
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(service.text)
            wait_for(lambda: one.running or two.running)
            ill, other = (one, two) if one.running else (two, one)
            other.behaviours.clear()
            ill.healthy = False
            assert answer.result() == WORDS
        assert ServerState.LOST in states(service)


@pytest.mark.parametrize(
    ("before", "fields"),
    [({}, {}), ({}, {"max_tokens": -(10**12)}), ({"max_tokens": 10**300}, {}), ({"max_completion_tokens": 1e300}, {})],
)
def test_clients_take_turns(folder: Path, before: dict[str, Any], fields: dict[str, Any]) -> None:
    """Whatever numbers the one with many requests sends, or another one has sent before."""
    with vllm_server(folder) as server, gateway(folder, server) as service, ThreadPoolExecutor(16) as threads:
        ready(service)

        def ask(client_name: str, **more: Any) -> None:
            with service.client() as client:
                body = service.body(user=client_name, **more)
                assert client.post(CHAT, json=body, headers={"authorization": client_name}).status_code == 200

        for _ in range(2):
            ask("another", **before)
        server.behaviours += ["hang"] * 4
        many = [threads.submit(ask, "many", **fields) for _ in range(12)]
        wait_for(lambda: (service.running.frontend.router.servers or ()) and num_waiting(service) == 8)
        few = threads.submit(ask, "few")
        wait_for(lambda: num_waiting(service) == 9)
        server.opened.set()
        few.result()
        for one in many:
            one.result()
        assert [body["user"] for body in server.bodies].index("few") < 2 + 8


def test_numbers_beyond_all_limits_are_the_servers_to_judge(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    fields = {"max_tokens": 10**400, "priority": 2**70}
    assert service.text([image_part(image(seed=90))], **fields) == WORDS
    assert {name: server.bodies[0][name] for name in fields} == fields


def num_waiting(service: Served) -> int:
    servers = service.running.frontend.router.servers
    return servers.num_waiting if servers is not None else 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 65}),
        (CHAT, {"n": "3"}),
        (CHAT, {"n": 2.0}),
        (CHAT, {"best_of": 10**400}),
        (COMPLETIONS, {"n": 0, "prompt": "a"}),
        (COMPLETIONS, {"n": 64, "prompt": ["a"] * 64}),
        (COMPLETIONS, {"prompt": ["a"] * 1000}),
    ],
)
def test_numbers_of_answers_have_a_limit(both: tuple[Served, VllmServer], path: str, fields: dict[str, Any]) -> None:
    service, server = both
    with service.client() as client:
        response = client.post(path, json=service.body() | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))
    assert not server.bodies


def test_each_answer_counts(folder: Path) -> None:
    """Against a client's limit, a server's room, and its client's turn."""
    limits: dict[str, Any] = {"max_queue": 24, "max_queue_per_client": 10}
    with vllm_server(folder) as server, gateway(folder, server, **limits) as service, ThreadPoolExecutor(8) as threads:
        ready(service)

        def ask(name: str, content: Any = "Hello", **fields: Any) -> int:
            with service.client() as client:
                body = service.body(content, user=name, **fields)
                return client.post(CHAT, json=body, headers={"authorization": name}).status_code

        def running() -> list[int]:
            return [one.running for one in service.running.frontend.router.servers or ()]

        server.behaviours += ["hang"] * 2
        asked = [threads.submit(ask, "many", n=3)]
        wait_for(lambda: running() == [3])
        asked += [threads.submit(ask, "many", n=3) for _ in range(2)]  # three of four are taken
        wait_for(lambda: num_waiting(service) == 2)
        assert ask("many", n=2) == 429
        service.encoder.close()  # nothing is encoded for what is refused
        assert ask("another", [image_part(image(seed=77))], n=11) == 429
        service.encoder.opened.set()
        assert ask("third", n=20) == 503
        asked.append(threads.submit(ask, "few", best_of=1))
        wait_for(lambda: running() == [4])
        asked.append(threads.submit(ask, "whole", n=4))
        wait_for(lambda: num_waiting(service) == 3)
        asked.append(threads.submit(ask, "late"))
        wait_for(lambda: num_waiting(service) == 4)
        server.opened.set()
        assert {one.result() for one in asked} == {200}
        users = [body["user"] for body in server.bodies]
        assert (users[1], users.index("whole") < users.index("late")) == ("few", True)
        assert ask("whole", n=9) == 200  # more than a server's room: alone
        service.settle()


def test_adapters_are_listed_and_planned(both: tuple[Served, VllmServer]) -> None:
    service, _ = both
    with service.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [(service.model, None), ("adapter", service.model)]
        assert client.get("/v1/models/adapter").json()["id"] == "adapter"
        assert client.get("/v1/models/another").status_code == 404
        messages = service.body([image_part()])["messages"]
        for path in ("/v1/plan", "/tokenize"):
            for model, status in (("adapter", 200), ("another", 404)):
                assert client.post(path, json={"messages": messages, "model": model}).status_code == status
