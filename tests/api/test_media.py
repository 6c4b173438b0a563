"""``/v1/media``: who may use it, and that chats about its media run no tower."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chat import input_audio, video_part, wav
from tests.support.clips import clip
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from triptych.encode.loop import EncodeLoop

PATH = "/v1/media"
PLAIN, WITH_RIGHT, OTHER = "sk-plain", "sk-media", "sk-other"


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]} | fields


def kept(service: Served, *parts: dict[str, Any], key: str = "", path: str = PATH, **fields: Any) -> httpx.Response:
    with service.client() as client:
        return client.post(path, json=body(*parts, **fields), headers={"authorization": f"Bearer {key}"} if key else {})


def named(uuid: str, modality: str = "image") -> dict[str, Any]:
    return {"type": f"{modality}_url", f"{modality}_url": None, "uuid": uuid}


def encoded(service: Served) -> int:
    """Items that went through the tower."""
    loops = [host for instance in service.running.instances for host in instance.loops]
    return sum(host.num_encoded for host in loops if isinstance(host, EncodeLoop))


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{PLAIN}\n{WITH_RIGHT} media\n{OTHER} encode media\n")
    file.chmod(0o600)
    with served(folder, api_key_file=str(file)) as service:
        yield service


@pytest.mark.parametrize(("key", "status"), [(WITH_RIGHT, 200), (OTHER, 200), (PLAIN, 403), ("sk-none", 401)])
def test_only_a_key_with_the_right_is_served(guarded: Served, key: str, status: int) -> None:
    assert kept(guarded, image_part(), key=key).status_code == status


def test_without_keys_only_a_loopback_address_serves_it(folder: Path) -> None:
    with served(folder, host="0.0.0.0") as service:
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        response = httpx.post(f"{url}{PATH}", json=body(image_part()), trust_env=False)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


def test_names_are_those_of_a_key(guarded: Served) -> None:
    (one,) = kept(guarded, image_part(image(seed=901)), key=WITH_RIGHT).json()["data"]
    answers = {key: kept(guarded, named(one["uuid"]), key=key, path=CHAT, max_tokens=1) for key in (WITH_RIGHT, OTHER)}
    assert answers[WITH_RIGHT].status_code == 200
    assert (answers[OTHER].status_code, answers[OTHER].json()["error"]["code"]) == (400, "unknown_media")


def test_chats_about_it_run_no_tower(hearing: Served) -> None:
    parts = [image_part(image(seed=902)) | {"uuid": "mine"}, video_part(clip("mp4", frames=23)), input_audio(wav(7001))]
    began, before = hearing.running.frontend.router.clock.wall(), encoded(hearing)
    answer = kept(hearing, *parts, text_part("x"), expires_after=60)
    assert answer.status_code == 200, answer.text
    still, film, sound = answer.json()["data"]
    assert [one["type"] for one in (still, film, sound)] == ["image", "video", "audio"]
    assert still["uuid"] == "mine"
    assert [one["cached"] for one in (still, film, sound)] == [True] * 3
    assert all(began + 59 <= one["expires_at"] <= began + 120 for one in (still, film, sound))
    wait_for(lambda: encoded(hearing) == before + 3)
    content = [named("mine"), named(film["uuid"], "video"), named(sound["uuid"], "audio")]
    asked = kept(hearing, *content, text_part("What is this?"), path=CHAT, max_tokens=4, temperature=0)
    assert asked.status_code == 200, asked.text
    assert encoded(hearing) == before + 3
    sent = kept(hearing, *parts, text_part("What is this?"), path=CHAT, max_tokens=4, temperature=0)
    assert sent.json()["choices"] == asked.json()["choices"]
    plan = kept(hearing, *content, path="/v1/plan").json()
    assert [(one["key"], one["tokens"], one["cached"]) for one in plan["data"]] == [
        (one["key"], one["tokens"], True) for one in (still, film, sound)
    ]
    wait_for(hearing.everything_is_back)


def test_media_are_named_by_uuid_url_and_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image(seed=903))
    with served(folder, allowed_local_media_path=str(tmp_path)) as service:
        by_url = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
        (first,) = kept(service, by_url).json()["data"]
        (second,) = kept(service, image_part(image(seed=903))).json()["data"]
        (third,) = kept(service, named(first["uuid"]), expires_after=9999).json()["data"]
        assert first["uuid"] == second["uuid"] == third["uuid"]
        assert third["expires_at"] > first["expires_at"]
        assert encoded(service) == 1


def test_a_salt_keeps_its_rows(service: Served) -> None:
    before = encoded(service)
    (one,) = kept(service, image_part(image(seed=904)), cache_salt="mine").json()["data"]
    chat = (named(one["uuid"]), text_part("x"))
    assert kept(service, *chat, path=CHAT, max_tokens=1, cache_salt="mine").status_code == 200
    assert encoded(service) == before + 1
    assert kept(service, *chat, path=CHAT, max_tokens=1).status_code == 200
    assert encoded(service) == before + 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "only text"}]}, "messages"),
        ({"expires_after": 0}, "expires_after"),
        ({"expires_after": 10**9}, "expires_after"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"encoding_format": "npy"}, "encoding_format"),
    ],
)
def test_bad_requests_name_the_field(service: Served, fields: dict[str, Any], param: str) -> None:
    response = kept(service, image_part(), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_file_that_cannot_be_kept_is_refused(folder: Path) -> None:
    with served(folder, mm_uuid_cache_mb=0) as service:
        response = kept(service, image_part())
        assert (response.status_code, response.json()["error"]["code"]) == (413, "media_too_large")
        assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
        wait_for(service.everything_is_back)
