"""Stored responses: the store's bounds and faults, and requests that refer to what it holds."""

import asyncio
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.support.chat import the_error
from tests.support.image_cases import png
from tests.support.reasoning import make_thinking_checkpoint
from tests.support.responses import RESPONSES, answer, post
from tests.support.serving import Served, image_part, served
from triptych.api import response_store
from triptych.api.response_store import ResponseStore, StoredResponse
from triptych.config import ResponsesConfig
from triptych.errors import ConfigError, Unavailable

HOSTILE = ["' OR 1=1 --", "%", "../../x", "é\u2028", "x" * 128, "resp_*"]


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("store")
    with served(make_thinking_checkpoint(folder / "thinker"), response_store=str(folder / "kept.db")) as service:
        yield service


def stored(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, previous, b"[]", b'{"output":[]}'.ljust(size))


def with_store(path: Path, work: Callable[[ResponseStore], Coroutine[Any, Any, None]], **settings: Any) -> None:
    store = ResponseStore(ResponsesConfig(response_store=str(path), **settings))
    try:
        asyncio.run(work(store))
    finally:
        store.close()


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_stored_is_found_by_its_key_alone(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        for name in ("a", *HOSTILE):
            assert await store.put("me", stored(name), [f"item {name}"])
            assert await store.get("you", name) is None
            assert await store.holding("you", f"item {name}") is None
            assert (await store.get("me", name)) == (await store.holding("me", f"item {name}")) == stored(name)
            assert not await store.delete("you", name)
        for name in HOSTILE:
            assert await store.delete("me", name)
            assert not await store.delete("me", name)
            assert await store.holding("me", f"item {name}") is None
        assert await store.get("me", "a") == stored("a")

    with_store(tmp_path / "kept.db", work)
    assert stat.S_IMODE(os.stat(tmp_path / "kept.db").st_mode) == 0o600


def test_two_frontends_share_a_file(tmp_path: Path) -> None:
    other = ResponseStore(ResponsesConfig(response_store=str(tmp_path / "kept.db")))

    async def work(store: ResponseStore) -> None:
        puts = [one.put("me", stored(f"{n}"), []) for n, one in enumerate([store, other] * 10)]
        assert all(await asyncio.gather(*puts))
        assert all([await one.get("me", f"{n}") for n in range(20) for one in (store, other)])

    with_store(tmp_path / "kept.db", work)
    other.close()


def test_the_oldest_of_the_key_with_most_goes_first(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("small", stored("s"), [])
        for number in range(12):
            await store.put("large", stored(f"{number}", size=2**18), [f"item {number}"])
        kept = [number for number in range(12) if await store.get("large", f"{number}")]
        assert kept == [9, 10, 11]  # 3 × 256 KiB and the small one fit in 1 MiB
        assert await store.get("small", "s")
        assert await store.holding("large", "item 0") is None
        assert not await store.put("large", stored("huge", size=2**20), [])
        assert await store.get("large", "11")

    with_store(tmp_path / "bytes.db", work, response_store_mb=1)

    async def rows(store: ResponseStore) -> None:
        for number in range(7):
            await store.put("me", stored(f"{number}"), [])
        assert [number for number in range(7) if await store.get("me", f"{number}")] == [4, 5, 6]

    with_store(tmp_path / "rows.db", rows, response_store_rows=3)


def test_old_responses_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ResponseStore) -> None:
        now = 1e9
        monkeypatch.setattr("time.time", lambda: now)
        await store.put("me", stored("a"), ["i"])
        now += 86_400
        assert await store.get("me", "a")
        now += 1
        assert await store.get("me", "a") is None
        assert await store.holding("me", "i") is None

    with_store(tmp_path / "kept.db", work, response_store_days=1)


def test_a_chain_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_CHAIN", 5)

    async def work(store: ResponseStore) -> None:
        for number in range(6):
            await store.put("me", stored(f"{number}", f"{number - 1}" if number else None, size=100), [])
        await store.put("me", stored("self", "self"), [])
        chain = await store.chain("me", "4", 1000)
        assert [one.id for one in chain or ()] == ["0", "1", "2", "3", "4"]
        assert await store.chain("me", "5", 1000) is None
        assert await store.chain("me", "self", 1000) is None
        assert await store.chain("me", "4", 400) is None
        await store.delete("me", "2")
        assert await store.chain("me", "4", 1000) is None

    with_store(tmp_path / "kept.db", work)


def test_files_that_are_no_store(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to look like the header of one" * 20)
    sqlite3.connect(tmp_path / "other.db").executescript("CREATE TABLE other (a); INSERT INTO other VALUES (1);")
    for name in ("text", "other.db", "missing/folder.db", "."):
        with pytest.raises(ConfigError, match="--response-store"):
            ResponseStore(ResponsesConfig(response_store=str(tmp_path / name)))
    assert sqlite3.connect(tmp_path / "other.db").execute("SELECT a FROM other").fetchall() == [(1,)]


def test_faults_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked file and a damaged one: nothing is stored, and what refers to it can be tried again."""
    monkeypatch.setattr(response_store, "LOCK_TIMEOUT", 0.05)

    async def work(store: ResponseStore) -> None:
        await store.put("me", stored("a"), [])
        other = sqlite3.connect(tmp_path / "kept.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert not await store.put("me", stored("b"), [])
        with pytest.raises(Unavailable):
            await store.delete("me", "a")
        assert await store.get("me", "a")
        other.execute("ROLLBACK")
        assert await store.put("me", stored("b"), [])
        other.execute("DROP TABLE responses")
        assert not await store.put("me", stored("c"), [])
        with pytest.raises(Unavailable):
            await store.get("me", "a")
        other.close()

    with_store(tmp_path / "kept.db", work)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def text_of(response: Any) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_a_conversation_by_references(storing: Served) -> None:
    """Whichever way a conversation is sent, the answer is the same; images are kept with it."""
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    url = image_part(png(Image.fromarray(noise)))["image_url"]["url"].replace(";", ';name="a";', 1)
    assert len(url) > 4096
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": 'What? "é"'}]
    question = {"role": "user", "content": parts}
    first = answer(storing, input=[question], instructions="Be brief.", **settings)
    assert first["store"] is True
    (said,) = first["output"]
    more = {"role": "user", "content": "And now?"}
    whole = answer(storing, input=[question, said, more], store=False, **settings)
    assert whole["store"] is False
    second = answer(storing, input=[more], previous_response_id=first["id"], **settings)
    assert second["previous_response_id"] == first["id"]
    reference = {"type": "item_reference", "id": said["id"]}
    by_item = answer(storing, input=[question, reference, more], **settings)
    by_bare_id = answer(storing, input=[question, {"id": said["id"]}, more], **settings)
    assert text_of(whole) == text_of(second) == text_of(by_item) == text_of(by_bare_id)
    third = answer(storing, input="Go on.", previous_response_id=second["id"], **settings)
    also = answer(storing, input="Go on.", previous_response_id=by_item["id"], **settings)
    assert text_of(third) == text_of(also)
    with storing.client() as client:
        items = client.get(f"{RESPONSES}/{second['id']}/input_items", params={"order": "asc"}).json()
        assert [item["role"] for item in items["data"]] == ["user", "assistant", "user"]
        assert items["data"][0]["content"] == [parts[0] | {"detail": "auto"}, parts[1]]
        last = client.get(f"{RESPONSES}/{second['id']}/input_items", params={"limit": "1"}).json()
        assert (last["data"], last["has_more"]) == (items["data"][2:], True)
        rest = client.get(f"{RESPONSES}/{second['id']}/input_items", params={"after": last["last_id"]}).json()
        assert (rest["data"], rest["has_more"]) == (items["data"][1::-1], False)
        for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
            the_error(client.get(f"{RESPONSES}/{second['id']}/input_items", params=wrong), 400, *wrong)
        count = {"model": storing.model, "input": [more], "previous_response_id": first["id"]}
        counted = client.post(f"{RESPONSES}/input_tokens", json=count).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}


def test_openais_client_reads_and_deletes(storing: Served) -> None:
    with openai.OpenAI(base_url=f"{storing.url}/v1", api_key="one", max_retries=0, timeout=30) as client:
        ask: dict[str, Any] = {"model": storing.model, "max_output_tokens": 24, "temperature": 0}
        ask["extra_body"] = {"structured_outputs": {"choice": ["a cat", "two dogs"]}}
        with client.responses.stream(input="Hello", **ask) as stream:
            made = stream.get_final_response()
        again = client.responses.retrieve(made.id)
        assert again.model_dump() == made.model_dump() | {"output": again.model_dump()["output"]}
        assert again.output_text == made.output_text
        assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
        assert (
            client.responses.create(input="More", previous_response_id=made.id, **ask).previous_response_id == made.id
        )
        with openai.OpenAI(base_url=f"{storing.url}/v1", api_key="two", max_retries=0) as other:
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(made.id)
            with pytest.raises(openai.BadRequestError, match="store: false"):
                other.responses.create(input="More", previous_response_id=made.id, **ask)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(made.id)
        client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)


def test_what_is_not_stored_is_not_found(storing: Served, service: Served) -> None:
    unkept = answer(storing, store=False)
    for one, name in ((storing, unkept["id"]), *((storing, name) for name in HOSTILE), (service, unkept["id"])):
        with one.client() as client:
            where = httpx.URL(RESPONSES).copy_with(
                raw_path=f"{RESPONSES}/{httpx.URL('/' + name).raw_path[1:].decode()}".encode()
            )
            assert client.get(where).status_code == 404
        the_error(post(one, previous_response_id=name), 400, "previous_response_id")
        the_error(post(one, input=[{"type": "item_reference", "id": name}]), 400, "input[0]")
    assert answer(service, store=True)["store"] is False


def test_an_answer_is_given_though_it_cannot_be_stored(storing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    store = storing.running.frontend.api.responses
    assert store is not None

    def fail(*_: Any) -> bool:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_put", fail)
    assert answer(storing)["store"] is False
    last = json.loads(post(storing, stream=True).text.strip().rpartition("data: ")[2])
    assert last["response"]["status"] in ("completed", "incomplete")
    assert last["response"]["store"] is False
    monkeypatch.setattr(store, "_row", fail)
    the_error(post(storing, previous_response_id="resp_1"), 503)
