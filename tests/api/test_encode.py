"""``/v1/encode``: who may use it, what it answers, and that nothing is lost, hung or left behind."""

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.chat import input_audio, video_part
from tests.support.clips import clip
from tests.support.serving import CHAT, SOON, Served, image, image_part, served, text_part, wait_for
from tests.support.tiny import make_tiny
from triptych.api.encode import EncodedMedia
from triptych.api.encode import body as body_of
from triptych.api.security import ApiKeys
from triptych.client import EncodeClient, EncodeError, content_part, npy, read_answer, vllm_part
from triptych.config import AuthConfig
from triptych.config.item_limits import ItemLimits
from triptych.encode.loop import EncodeLoop
from triptych.errors import ConfigError
from triptych.messages.rows import RowLayout
from triptych.transfer import collector

PATH = "/v1/encode"
PLAIN, WITH_RIGHT, OF_FLAG = "sk-plain", "sk-encode", "sk-flag"


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]} | fields


def asked(service: Served, *parts: dict[str, Any], key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with service.client() as client:
        return client.post(PATH, json=body(*parts, **fields), headers=headers)


def idle(service: Served) -> bool:
    rows = service.running.frontend.router.lifecycle.rows
    return service.everything_is_back() and rows.idle


def settled(service: Served, seconds: float = SOON) -> None:
    service.settle(seconds)
    wait_for(lambda: idle(service), seconds)
    service.running.frontend.router.lifecycle.rows.check_idle()


# ── who may use it ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{PLAIN}\n{WITH_RIGHT}  encode \n")
    file.chmod(0o600)
    with served(folder, api_key=(OF_FLAG,), api_key_file=str(file)) as service:
        yield service


@pytest.mark.parametrize(("key", "status"), [(WITH_RIGHT, 200), (PLAIN, 403), (OF_FLAG, 403), ("sk-none", 401)])
def test_only_a_key_with_the_right_is_served(guarded: Served, key: str, status: int) -> None:
    response = asked(guarded, image_part(), key=key)
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "forbidden"
    with guarded.client() as client:
        chat = client.post(CHAT, json=guarded.body(), headers={"authorization": f"Bearer {key}"})
    assert chat.status_code == (401 if status == 401 else 200)
    settled(guarded)


def test_without_keys_only_a_loopback_address_serves_it(folder: Path) -> None:
    with served(folder, host="0.0.0.0") as service:
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        response = httpx.post(f"{url}{PATH}", json=body(image_part()), trust_env=False)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({}, {"x-forwarded-for": "192.0.2.1"}),
        ({}, {"via": "1.1 proxy"}),
        ({"allowed_hosts": ("models.example",)}, {"host": "models.example"}),
        ({"allowed_hosts": ("models.example",)}, {}),
        ({"allowed_origins": ("*",)}, {"origin": "https://page.example"}),
        ({"client_header": "X-Client"}, {"x-client": "someone"}),
    ],
)
def test_without_keys_no_proxy_and_no_other_page_gets_rows(
    folder: Path, settings: dict[str, Any], headers: dict[str, str]
) -> None:
    with served(folder, **settings) as service:
        response = httpx.post(f"{service.url}{PATH}", json=body(image_part()), headers=headers, trust_env=False)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("line", ["sk-1 decode", "sk-1 encode chat", "sk-1 encode,", "a b"])
def test_unknown_rights_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{line}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="may have encode, media alone") as caught:
        AuthConfig(api_key_file=str(file)).key_rights()
    assert "sk-1" not in str(caught.value)


def test_rights_of_a_key_that_is_named_twice_are_added(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a encode\na\nb\n")
    file.chmod(0o600)
    rights = AuthConfig(api_key_file=str(file), api_key=("a",)).key_rights()
    assert rights == {"a": {"encode"}, "b": set()}
    keys = ApiKeys(rights, rights)
    assert [keys.rights_of(keys.identify(key) or "") for key in "ab"] == [{"encode"}, set()]


# ── what it answers ──────────────────────────────────────────────────────────────────────────────────────────────


def test_both_formats_have_the_same_rows(service: Served) -> None:
    parts = [text_part("a"), image_part(image(96, 64)), image_part(image(64, 96, 1)), image_part(image(96, 64))]
    file = asked(service, *parts)
    assert file.headers["content-type"] == "application/octet-stream"
    tensors = safetensors.numpy.load(file.content)
    answer = asked(service, *parts, encoding_format="npy").json()
    assert set(tensors) == {"0", "1", "2"}
    assert len(answer["data"]) == 3
    for number, entry in enumerate(answer["data"]):
        rows = base64.b64decode(entry.pop("rows"))
        assert rows == npy(tensors[str(number)])
        assert entry["shape"] == list(tensors[str(number)].shape) == [entry["tokens"], answer["width"]]
        assert entry["index"] == number
    header = json.loads(file.content[8 : 8 + int.from_bytes(file.content[:8], "little")])
    assert json.loads(header["__metadata__"]["answer"]) == answer
    first, second, third = answer["data"]
    assert first["key"] == third["key"] != second["key"]
    assert np.array_equal(tensors["0"], tensors["2"])
    assert (first["size"], second["size"]) == ({"height": 64, "width": 96}, {"height": 96, "width": 64})
    settled(service)


def test_bfloat16_rows_are_exact_in_both_formats(service: Served) -> None:
    """A processor's rows are float32; a GPU's are not."""
    api = service.running.frontend.api
    prompt = api.prompt_builder.build([{"role": "user", "content": [{"type": "image", "data": image()}]}])
    (item,) = prompt.items
    bits = np.random.default_rng(1).integers(0, 2**16, (item.plan.rows, 6), dtype=np.uint16)
    layout = RowLayout("model", "bfloat16", 6, 12)
    media = EncodedMedia({"model_type": "m"}, [(item, bits.view(np.uint8))], layout)
    exact = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    (read,) = read_answer(joined(body_of(media, "safetensors")))
    assert np.array_equal(read.rows, exact, equal_nan=True)
    (entry,) = json.loads(joined(body_of(media, "npy")))["data"]
    assert base64.b64decode(entry["rows"]) == npy(exact)


def joined(pieces: AsyncGenerator[bytes, None]) -> bytes:
    async def collect() -> bytes:
        return b"".join([piece async for piece in pieces])

    return asyncio.run(collect())


def test_an_item_larger_than_the_pool_arrives_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder) as service, EncodeClient(service.url) as client:
        (whole,) = client.encode(image_part(image(512, 512)))
    monkeypatch.setattr(collector, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(collector.RowCollector.__init__, "__kwdefaults__", {"pool_bytes": 4096, "check_always": True})
    with served(folder) as service, EncodeClient(service.url) as client:
        (parted,) = client.encode(image_part(image(512, 512)))
        settled(service)
        assert parted.rows.nbytes > 8 * 4096
    assert np.array_equal(whole.rows, parted.rows)


def test_a_picture_is_encoded_once_for_both_endpoints(service: Served) -> None:
    part = image_part(image(seed=77))
    before = encoded(service)
    asked(service, part)
    service.text([part])
    asked(service, part)
    wait_for(lambda: encoded(service) == before + 1)
    other = asked(service, part, cache_salt="another")
    assert other.status_code == 200
    wait_for(lambda: encoded(service) == before + 2)
    settled(service)


def encoded(service: Served) -> int:
    """Items that went through the tower."""
    loops = [host for instance in service.running.instances for host in instance.loops]
    return sum(host.num_encoded for host in loops if isinstance(host, EncodeLoop))


def test_videos_and_audio_are_encoded_in_the_order_of_the_request(hearing: Served) -> None:
    parts = [input_audio(), text_part("x"), video_part(clip("mp4", frames=20)), image_part()]
    with EncodeClient(hearing.url) as client:
        sound, film, still = client.encode(*(part for part in parts if part["type"] != "text"))
        (message,) = body(*parts)["messages"]
        assert [one.key for one in client.encode_messages([message])] == [sound.key, film.key, still.key]
    assert [one.type for one in (sound, film, still)] == ["audio", "video", "image"]
    assert film.info["seconds"] > 0 < sound.info["seconds"]
    assert "size" not in sound.info
    assert film.grid_thw[0] > still.grid_thw[0] == 1
    width = hearing.running.frontend.api.lifecycle.row_layout().width
    hidden = width // 3  # two deepstack levels
    assert {one.rows.shape[1] for one in (sound, film, still)} == {width}
    assert film.rows[:, hidden:].any()
    assert not sound.rows[:, hidden:].any()  # audio has no deepstack levels
    assert sound.rows[:, :hidden].any()
    settled(hearing)


def test_a_refusal_leaves_the_connection_usable(guarded: Served) -> None:
    """The body isn't looked at."""
    large = image_part(np.random.default_rng(1).bytes(2**21))
    with guarded.client() as client:
        for key, status in ((PLAIN, 403), (WITH_RIGHT, 200), (PLAIN, 403)):
            part = large if status == 403 else image_part()
            response = client.post(PATH, json=body(part), headers={"authorization": f"Bearer {key}"})
            assert response.status_code == status
    settled(guarded)


def test_media_with_a_uuid_are_remembered(service: Served) -> None:
    part = image_part(image(seed=5)) | {"uuid": "five"}
    first, second = asked(service, part), asked(service, {"type": "image_url", "image_url": None, "uuid": "five"})
    assert first.content == second.content


def test_rows_that_are_asked_for_at_once(service: Served) -> None:
    def one(seed: int) -> bytes:
        return asked(service, image_part(image(seed=seed % 4)), key=f"client {seed % 3}").content

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(one, range(48)))
    assert [answers[n] == answers[n % 4] for n in range(48)] == [True] * 48
    settled(service)


# ── what it refuses ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "only text"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"encoding_format": "pickle"}, "encoding_format"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"timeout": 0}, "timeout"),
        ({"mm_processor_kwargs": {"min_pixels": -1}}, "mm_processor_kwargs.min_pixels"),
    ],
)
def test_bad_requests_name_the_field(service: Served, fields: dict[str, Any], param: str) -> None:
    response = asked(service, image_part(), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_bad_media_name_the_field(service: Served) -> None:
    bad = image_part(b"no picture")
    response = asked(service, text_part("x"), image_part(), bad)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content[2].image_url.url")
    truncated = asked(service, image_part(image(seed=9)[:-40]))
    assert (truncated.status_code, truncated.json()["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    settled(service)


def test_limits_are_those_of_chats(folder: Path) -> None:
    with served(folder, limit_mm_per_prompt=ItemLimits(image=2), max_queue_per_client=2) as service:
        assert asked(service, *[image_part()] * 3).status_code == 400
        service.encoder.close()
        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(asked, service, image_part(image(seed=n))) for n in (1, 2)]
            wait_for(lambda: service.running.frontend.router.num_requests == 2)
            refused = asked(service, image_part(image(seed=3)))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            service.encoder.opened.set()
            assert [one.result().status_code for one in waiting] == [200, 200]
        settled(service)


def test_rows_beyond_the_memory_budget_are_refused(folder: Path) -> None:
    """Small files, whose rows are many; one client may use half of the budget."""
    flat = io.BytesIO()
    Image.new("RGB", (512, 512)).save(flat, "PNG")
    part = image_part(flat.getvalue())
    memory: dict[str, Any] = {"max_inflight_mb": 4, "max_body_mb": 1, "max_media_mb": 1, "max_file_mb": 1}
    with served(folder, **memory, max_image_pixels=2**24, limit_mm_per_prompt=ItemLimits(image=999)) as service:
        with EncodeClient(service.url) as client:
            (one,) = client.encode(part)
        limit = 2 * 2**20 // one.rows.nbytes
        assert asked(service, *[part] * (limit // 2)).status_code == 200
        refused = asked(service, *[part] * (limit + 1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        budget = service.running.frontend.api.memory_budget
        wait_for(lambda: budget.total == 0)
        settled(service)


def test_a_deadline_ends_it(service: Served) -> None:
    service.encoder.close()
    began = time.monotonic()
    response = asked(service, image_part(image(seed=30)), timeout=0.5)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - began < 5
    wait_for(lambda: idle(service))
    settled(service)


def test_a_service_without_encode_instances(folder: Path) -> None:
    with served(folder, "1PD") as service:
        response = asked(service, image_part())
        assert (response.status_code, response.json()["error"]["code"]) == (400, "media_not_served")


def test_a_model_of_text_alone(tmp_path: Path) -> None:
    with served(make_tiny(tmp_path / "text", "qwen2"), "1PD") as service:
        assert asked(service, image_part()).json()["error"]["code"] == "media_not_served"


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("phase", ["preprocessor", "encoder"])
def test_a_client_that_goes_away_leaves_nothing(service: Served, phase: str) -> None:
    gate = getattr(service, phase)
    gate.close()
    with pytest.raises(httpx.ReadTimeout), service.client() as client:
        client.post(PATH, json=body(image_part(image(seed=40 + len(phase)))), timeout=0.7)
    assert gate.entered.is_set()
    wait_for(service.everything_is_back, SOON)
    gate.opened.set()
    settled(service)
    assert asked(service, image_part()).status_code == 200


def end(service: Served, name: str) -> None:
    asyncio.run_coroutine_threadsafe(service.running.end(name), service.loop).result(30)


def test_another_encode_instance_takes_over(folder: Path) -> None:
    pictures = [image(128, 128, seed) for seed in range(12)]
    with served(folder, "2E1PD") as service:
        expected = [asked(service, image_part(one)).content for one in pictures]
    with served(folder, "2E1PD") as service:
        service.encoder.delay = 0.1
        with ThreadPoolExecutor(12) as threads:
            waiting = [threads.submit(asked, service, image_part(one)) for one in pictures]
            wait_for(lambda: service.running.frontend.router.num_requests == 12)
            end(service, "e0")
            answers = [one.result() for one in waiting]
        assert [one.status_code for one in answers] == [200] * 12
        assert [one.content for one in answers] == expected
        assert service.running.frontend.router.lifecycle.rows.idle
        service.running.frontend.router.lifecycle.rows.check_idle()


def test_the_loss_of_the_only_encode_instance_is_told(folder: Path) -> None:
    with served(folder, "1E1PD") as service:
        service.encoder.close()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(asked, service, image_part())
            assert service.encoder.entered.wait(10)
            threading.Timer(0.2, service.encoder.opened.set).start()
            end(service, "e0")
            assert waiting.result().status_code in (200, 503)  # it may have finished the item while it drained
        refused = asked(service, image_part(image(seed=3)))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


def test_an_encoder_that_fails_is_tried_again(service: Served) -> None:
    service.encoder.failures = 1
    assert asked(service, image_part(image(seed=61))).status_code == 200
    service.encoder.failures = 100
    failed = asked(service, image_part(image(seed=62)))
    service.encoder.failures = 0
    assert failed.status_code == 500
    assert "secret" not in failed.text
    settled(service, 10)


def test_rows_need_no_language_instance(folder: Path) -> None:
    with served(folder, "1E1PD") as service:
        expected = asked(service, image_part()).content
        end(service, "pd1")
        wait_for(lambda: len(service.running.frontend.router.membership) == 1)
        assert asked(service, image_part()).content == expected


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_client_reads_files_and_urls_and_names_refusals(guarded: Served, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(image())
    with EncodeClient(f"{guarded.url}/v1/", WITH_RIGHT) as client:
        items = client.encode(tmp_path / "picture.png", image_part()["image_url"]["url"])
        assert items[0].key == items[1].key
        with pytest.raises(EncodeError, match="scheme") as refused:
            client.encode("nowhere")
        assert (refused.value.status, refused.value.param) == (400, "messages[0].content[0].image_url.url")
    with EncodeClient(guarded.url, PLAIN) as client, pytest.raises(EncodeError) as forbidden:
        client.encode(image_part())
    assert (forbidden.value.status, forbidden.value.code) == (403, "forbidden")


def test_parts_for_vllm(service: Served) -> None:
    with EncodeClient(service.url) as client:
        (item,) = client.encode(image_part())
    part = vllm_part(item)
    assert part["uuid"] == item.key
    assert part["image_embeds"]["image_grid_thw"] == list(item.grid_thw)
    data = base64.b64decode(part["image_embeds"]["image_embeds"])
    assert np.array_equal(np.frombuffer(data[-item.rows.nbytes :], "<f4").reshape(item.rows.shape), item.rows)


@pytest.mark.parametrize(
    ("media", "kind"),
    [("https://x/a.mp4", "video"), ("a.wav", "audio"), ("data:video/mp4;base64,AA", "video"), ("x", "image")],
)
def test_the_kind_of_media_follows_from_their_names(media: str, kind: str) -> None:
    assert content_part(media) == {"type": f"{kind}_url", f"{kind}_url": {"url": media}}


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_damaged_answers_raise_one_error(data: bytes) -> None:
    with pytest.raises(EncodeError):
        read_answer(data)


def test_truncated_answers_raise_one_error(service: Served) -> None:
    whole = asked(service, image_part()).content
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        with pytest.raises(EncodeError):
            read_answer(whole[:length])
