"""``/v1/plan``: what becomes of a chat request, whether it is admitted, and that no instance is needed for that."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chat import input_audio, video_part
from tests.support.clips import clip
from tests.support.frontends import alone
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for

PATH = "/v1/plan"
SECRET = "the-content-of-a-request"


def planned(service: Served, content: Any, **fields: Any) -> dict[str, Any]:
    with service.client() as client:
        answer = client.post(PATH, json=service.body(content, **fields))
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    plan: dict[str, Any] = answer.json()
    return plan


def test_a_plan_is_what_becomes_of_the_request_that_is_sent(service: Served) -> None:
    content = [image_part(image(96, 64, 801)), text_part(SECRET), image_part(image(64, 64, 802))]
    plan = planned(service, content, max_tokens=7)
    first, second = plan["data"]
    assert (first["index"], first["type"], first["parts"]) == (0, "image", 1)
    assert first["file_size"] == {"height": 64, "width": 96}
    assert (first["file_bytes"], second["file_bytes"]) == (len(image(96, 64, 801)), len(image(64, 64, 802)))
    assert first["tokens"] > second["tokens"] > 0 < second["cost"] < first["cost"]
    assert (first["cached"], second["cached"]) == (False, False)
    usage = service.post(content, max_tokens=7).json()["usage"]
    assert (plan["prompt_tokens"], plan["max_tokens"]) == (usage["prompt_tokens"], 7)
    after = planned(service, content, max_tokens=7)["data"]
    assert after == [first | {"cached": True}, second | {"cached": True}]
    with service.client() as client:
        answer = client.post(
            "/v1/encode", json={"messages": service.body(content)["messages"], "encoding_format": "npy"}
        )
    rows = answer.json()["data"]
    shared = ("index", "type", "key", "tokens", "grid_thw", "size")
    assert [{name: one[name] for name in shared} for one in rows] == [
        {name: one[name] for name in shared} for one in after
    ]
    width = service.running.frontend.api.lifecycle.row_layout().row_bytes
    assert [one["bytes"] for one in after] == [one["tokens"] * width for one in rows]


def test_another_salt_shares_no_rows(service: Served) -> None:
    content = [image_part(image(seed=803))]
    service.post(content, cache_salt="one")
    assert planned(service, content, cache_salt="one")["data"][0]["cached"] is True
    assert planned(service, content, cache_salt="two")["data"][0]["cached"] is False


def test_videos_and_audio_are_in_the_order_of_the_request(hearing: Served) -> None:
    sound, film, still = planned(hearing, [input_audio(), video_part(clip("mp4", frames=20)), image_part()])["data"]
    assert [one["type"] for one in (sound, film, still)] == ["audio", "video", "image"]
    assert sound["seconds"] > 0 < film["seconds"]
    assert film["frames"] >= film["grid_thw"][0] > 1
    assert not {"size", "file_size", "frames"} & set(sound)


def test_nothing_is_decoded_and_nothing_is_counted(service: Served) -> None:
    service.preprocessor.close()
    service.encoder.close()
    before = service.running.frontend.router.metrics.registry.get_sample_value("vllm:request_success_total") or 0
    truncated = image_part(image(256, 256, 804)[:-40])  # which the header doesn't show
    assert planned(service, [truncated])["data"][0]["tokens"] > 0
    with service.client() as client:
        listed = client.get("/ui/requests").json()
    assert not [one for one in listed if one["endpoint"] == PATH]
    registry = service.running.frontend.router.metrics.registry
    assert (registry.get_sample_value("vllm:request_success_total") or 0) == before
    assert service.everything_is_back()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"[" * 100_000, b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "y": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "("}}',
        b"\xff\xfe", json.dumps({"model": "another", "messages": [{"role": "user", "content": "x"}]}).encode(),
        json.dumps({"messages": [{"role": "user", "content": [image_part(b"no image")]}]}).encode(),
        json.dumps({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "x " * 200_000}]}).encode(),
    ],
)  # fmt: skip
def test_a_wrong_request_has_no_plan(service: Served, body: bytes) -> None:
    with service.client() as client:
        headers = {"Content-Type": "application/json"}
        plan, chat = (client.post(path, content=body, headers=headers) for path in (PATH, CHAT))
    assert plan.status_code == chat.status_code >= 400
    assert plan.json()["error"] == chat.json()["error"]


def test_no_instance_is_needed(folder: Path) -> None:
    """The answer says what the chat would be told."""
    body = {"model": folder.name, "messages": [{"role": "user", "content": [image_part(), text_part("x")]}]}
    with alone(folder, api_key=("sk",), max_body_mb=1, max_media_mb=1) as frontend, frontend.client() as client:
        assert client.post(PATH, json=body).status_code == 401
        key = {"Authorization": "Bearer sk"}
        plan, chat = (client.post(path, json=body, headers=key) for path in (PATH, CHAT))
        assert (plan.status_code, chat.status_code) == (200, 503)
        assert plan.json()["data"][0]["bytes"] is None
        admission = plan.json()["admission"]
        assert (admission["admitted"], admission["error"]) == (False, chat.json()["error"])
        assert admission["retry_after"] == int(chat.headers["retry-after"])
        assert client.post(PATH, content=b"x" * 2**21, headers=key).status_code == 413
    with alone(folder) as frontend:
        assert frontend.ask_as("192.0.2.7", PATH, {"origin": "https://page.example"}, "POST").status_code == 403


def test_the_forecast_is_the_admission_s(folder: Path) -> None:
    """Nothing is known at first; then the answer's time is, and a deadline that can't be met is told."""
    with served(folder) as service:
        known = planned(service, "x")["admission"]
        nothing = {"wait_seconds": None, "answer_seconds": None, "error": None, "retry_after": None}
        assert known == {"admitted": True} | nothing
        for number in range(10):
            service.text(f"x {number}", max_tokens=20)
        known = planned(service, "x", max_tokens=20)["admission"]
        assert known["admitted"]
        assert 0 <= known["wait_seconds"] < known["answer_seconds"]


def test_a_full_service_makes_no_plans(folder: Path) -> None:
    """Which takes work, as an answer does."""
    with served(folder, max_queue=1) as service, ThreadPoolExecutor(1) as threads:
        service.encoder.close()
        waiting = threads.submit(service.post, [image_part()])
        wait_for(lambda: service.running.frontend.router.num_requests == 1)
        answer = httpx.post(f"{service.url}{PATH}", json=service.body("x"), trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        service.encoder.opened.set()
        assert waiting.result().status_code == 200
