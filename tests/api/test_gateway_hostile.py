"""Inputs that have ended engines, at a gateway: refused by name, or answered as others."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.support.exploits import (
    PLACEHOLDER,
    broken_pictures,
    forged_elsewhere,
    forged_texts,
    pickles,
    tiny_pictures,
)
from tests.support.gateways import WORDS, gateway_and_server
from tests.support.scraping import scrape
from tests.support.serving import CHAT, Served, text_part, wait_for
from tests.support.vllm_server import VllmServer
from triptych.prompt.tokenizer import Tokenizer

SECRETS = re.compile(r"0x[0-9a-f]{5,}|BytesIO|/tmp|\.py|Traceback", re.IGNORECASE)
"""What no message to a client may tell."""


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Served, VllmServer]]:
    with gateway_and_server(folder) as both:
        yield both


@pytest.fixture
def both(pair: tuple[Served, VllmServer]) -> Iterator[tuple[Served, VllmServer]]:
    """Afterwards the service answers, and has nothing left."""
    service, server = pair
    server.bodies.clear()
    yield pair
    server.behaviours.clear()
    assert service.text() == WORDS
    service.settle()
    wait_for(lambda: not service.running.frontend.api.memory_budget.total)


def test_tiny_pictures_have_the_rows_of_their_grid(both: tuple[Served, VllmServer]) -> None:
    """CVE-2026-22773"""
    service, server = both
    answered = 0
    for part in tiny_pictures():
        response = service.post([part, text_part("a")])
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
        answered += response.status_code == 200
    assert len(server.bodies) == answered > 0
    for body in server.bodies:
        embeds = body["messages"][0]["content"][0]["image_embeds"]
        frames, height, width = embeds["image_grid_thw"]
        rows = np.lib.format.read_array(io.BytesIO(base64.b64decode(embeds["image_embeds"])))
        assert len(rows) == frames * height * width // 4


@pytest.mark.parametrize(("name", "part"), [*broken_pictures()], ids=lambda one: one if isinstance(one, str) else "")
def test_broken_pictures_tell_nothing(both: tuple[Served, VllmServer], name: str, part: dict[str, object]) -> None:
    """CVE-2026-22778"""
    service, server = both
    response = service.post([text_part("a"), part])
    assert response.status_code in (400, 413), response.text
    assert response.json()["error"]["param"].startswith("messages[0].content[1].")
    assert not SECRETS.search(response.text)
    assert not server.bodies


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_a_server_tell_no_address(both: tuple[Served, VllmServer], *, stream: bool) -> None:
    """CVE-2026-22778: a server that gets a file decodes it itself."""
    service, server = both
    server.message = "cannot identify image file <_io.BytesIO object at 0x7f3a5c0d1e40>"
    server.behaviours.append("400")
    response = service.post(stream=stream)
    assert response.status_code == 400
    assert "cannot identify image file" in response.text
    assert "7f3a5c0d1e40" not in response.text


def test_errors_in_a_stream_tell_no_address_and_are_the_servers(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    chunk = {"choices": [{"index": 0, "delta": {"content": "one"}, "finish_reason": None}]}
    server.events = [chunk, {"error": {"message": "no <_io.BytesIO object at 0x7f3a5c0d1e40>", "code": 500}}]
    with service.client() as client:
        before = scrape(client)
        text = service.post(stream=True).text
        after = scrape(client)
    server.events = None
    assert '"one"' in text
    assert "BytesIO object at 0x…>" in text
    failures = [one.total("request_failure_total", error="InstanceLost") for one in (before, after)]
    assert failures[1] == failures[0] + 1


@pytest.mark.parametrize(("name", "fields"), [*forged_texts()], ids=lambda one: one if isinstance(one, str) else "")
def test_texts_with_placeholders_are_refused(
    both: tuple[Served, VllmServer], name: str, fields: dict[str, object]
) -> None:
    """CVE-2026-44222"""
    service, server = both
    response = service.post(**fields)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not server.bodies


def test_other_endpoints_refuse_them_too(both: tuple[Served, VllmServer], folder: Path) -> None:
    service, server = both
    token_id = Tokenizer(folder).id_of(PLACEHOLDER)
    assert token_id is not None
    with service.client() as client:
        for path, body in forged_elsewhere(token_id):
            response = client.post(path, json={"model": service.model, **body})
            assert response.status_code == 400, (path, body, response.text)
            assert "invalid_request_error" in response.text
    assert not server.bodies


def test_nothing_is_unpickled(both: tuple[Served, VllmServer], tmp_path: Path) -> None:
    """CVE-2026-3060"""
    service, _ = both
    with zmq.Context() as context:
        for channel in (service.running.frontend.channel, *(one.channel for one in service.running.instances)):
            with context.socket(zmq.PUSH) as socket:
                socket.set(zmq.LINGER, 1000)
                socket.connect(channel.address)
                for frame in pickles(tmp_path / "made"):
                    socket.send(frame)
                    socket.send_multipart([frame, frame])
    with service.client() as client:
        for frame in pickles(tmp_path / "made"):
            assert client.post(CHAT, content=frame).status_code == 400
    service.text([*tiny_pictures()][-1:])
    assert not (tmp_path / "made").exists()
