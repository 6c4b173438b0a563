"""A service before vLLM servers whose connectors ask for rows: real connectors, real encode instances, and small
servers that answer once their rows have come."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from triptych_vllm.row_consumer import ConsumerThread
from triptych_vllm.row_needs import Need
from triptych_vllm.settings import ConnectorSettings
from triptych_vllm.start import start_consumer

from tests.support import gateways
from tests.support.gateways import WORDS, states
from tests.support.hang_ups import hang_up
from tests.support.serving import CHAT, Served, image, image_part, text_part, wait_for
from tests.support.tiny import make_tiny
from tests.support.vllm_server import VllmServer, vllm_server
from triptych.client import EncodeClient
from triptych.config import AdmissionConfig
from triptych.messages.identity import ModelIdentity
from triptych.messages.tickets import PARAMETER, frontend_of, unseal
from triptych.models.registry import identity_of
from triptych.transfer.memory import Bytes


@dataclass
class Connector:
    """What a connector in a server does, without vLLM."""

    consumer: ConsumerThread
    asked: list[str] = field(default_factory=list)
    rows: dict[str, Bytes] = field(default_factory=dict)
    """By name."""
    asks: bool = True
    """Whether it lacks rows: vLLM's caches may have them."""

    def take_rows(self, body: dict[str, Any], gone: Callable[[], bool]) -> bool:
        if "ec_transfer_params" not in body or not self.asks:
            return True
        sealed = body["ec_transfer_params"][PARAMETER]
        frontend = frontend_of(sealed)
        wait_for(lambda: self.consumer.key_of(frontend))
        ticket = unseal(sealed, self.consumer.key_of(frontend) or b"")
        needs = {name: Need(frontend, ticket.request, item, ticket.timeout) for name, item in ticket.items.items()}
        for name, need in needs.items():
            self.asked.append(name)
            self.consumer.ask(need)
        try:
            wait_for(lambda: gone() or all(need.rows is not None or need.error is not None for need in needs.values()))
        finally:
            for need in needs.values():
                self.consumer.close(need)
        if gone():
            return False
        for name, need in needs.items():
            if need.error is not None:
                self.consumer.failed(ticket, need.error)
                return False
            assert need.rows is not None
            self.rows[name] = need.rows
        return True


@contextmanager
def connected(
    service: Served, server: VllmServer, folder: Path, *, name: str = "", identity: ModelIdentity | None = None
) -> Iterator[Connector]:
    wait_for(lambda: service.running.frontend.router.lifecycle.media_layout)
    layout = service.running.frontend.router.lifecycle.row_layout()
    settings = ConnectorSettings(frontends=(service.running.frontend.control,), pool_mb=1, name=name)
    consumer = start_consumer(
        settings,
        engine="test 1",
        identify=lambda: identity or identity_of(folder),
        width=layout.width,
        dtype=layout.dtype,
    )
    connector = Connector(consumer)
    server.take_rows = connector.take_rows
    try:
        yield connector
    finally:
        consumer.stop()


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triptych.gateway.servers.CHECK_SECONDS", 0.05)
        yield


gateway = partial(gateways.gateway, kind="vllm-ec")


@pytest.fixture(scope="module")
def trio(folder: Path) -> Iterator[tuple[Served, VllmServer, Connector]]:
    with (
        vllm_server(folder) as server,
        gateway(folder, server) as service,
        connected(service, server, folder) as connector,
    ):
        wait_for(lambda: states(service) == ["serving"])
        yield service, server, connector


@pytest.fixture
def all_three(trio: tuple[Served, VllmServer, Connector]) -> Iterator[tuple[Served, VllmServer, Connector]]:
    service, server, connector = trio
    server.bodies.clear()
    connector.asked.clear()
    connector.rows.clear()
    connector.asks = True
    yield trio
    server.behaviours.clear()
    service.settle()


def test_a_connector_gets_the_rows_that_it_asks_for(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, server, connector = all_three
    first, second = image_part(image(96, 64)), image_part(image(64, 96, 1))
    assert service.text([text_part("a"), first, second, first]) == WORDS
    (body,) = server.bodies
    sent = body["messages"][0]["content"][1:]
    with EncodeClient(service.url) as client:
        items = client.encode(first, second, first)
    for part, item in zip(sent, items, strict=True):
        grid = {"image_grid_thw": list(item.grid_thw)}
        assert part == {"type": "image_embeds", "image_embeds": grid, "uuid": item.key}
        assert np.array_equal(connector.rows[item.key].view(np.float32), item.rows)
    assert len(connector.asked) == 2


def test_what_isnt_asked_for_isnt_encoded(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, _, connector = all_three
    connector.asks = False
    service.encoder.close()
    assert service.text([image_part(image(seed=50))]) == WORDS
    service.encoder.opened.set()


def test_salts_have_names_of_their_own(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, server, _ = all_three
    for salt in ("a", "b"):
        service.text([image_part()], cache_salt=salt)
    first, second = (body["messages"][0]["content"][0]["uuid"] for body in server.bodies)
    assert first != second


def test_files_that_cant_be_decoded_are_the_clients_fault(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, server, _ = all_three
    response = service.post([image_part(image(seed=60)[:-40])])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    assert len(server.bodies) == 1


def test_a_client_that_hangs_up_ends_what_was_asked_for(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, _, connector = all_three
    service.encoder.close()
    with service.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=service.body([image_part(image(seed=61))]), timeout=0.5)
    wait_for(lambda: connector.asked and not service.running.frontend.router.num_requests)


def test_a_request_counts_once_while_a_server_has_it(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, _, connector = all_three
    service.encoder.close()
    admission = service.running.frontend.router.lifecycle.admission
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(service.text, [image_part(image(seed=62))])
        wait_for(lambda: connector.asked)
        assert admission.share_in_flight == 1 / AdmissionConfig().max_queue
        service.encoder.opened.set()
        assert answer.result() == WORDS
    assert admission.share_in_flight == 0


def test_other_models_are_refused(folder: Path) -> None:
    other = ModelIdentity("other", "config", "adapter")
    with vllm_server(folder) as server, gateway(folder, server) as service:
        with connected(service, server, folder, identity=other):
            wait_for(lambda: all(one.why for one in service.running.frontend.router.servers or ()))
            assert states(service) == ["awaited"]
        with connected(service, server, folder):
            wait_for(lambda: states(service) == ["serving"])


def test_families_without_a_grid_get_the_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "llava", "llava")
    with (
        vllm_server(folder) as server,
        gateway(folder, server) as service,
        connected(service, server, folder) as connector,
    ):
        wait_for(lambda: states(service) == ["serving"])
        assert service.text([image_part(), text_part("x")]) == WORDS
        (part, _) = server.bodies[0]["messages"][0]["content"]
        _, encoded = image_part()["image_url"]["url"].split(",")
        assert part["image_url"]["url"] == f"data:application/octet-stream;base64,{encoded}"
        assert list(connector.rows) == [part["uuid"]]


def test_encode_instances_that_are_lost(folder: Path) -> None:
    """The connector asks again, and another instance answers."""
    with (
        vllm_server(folder) as server,
        gateway(folder, server, topology="2E") as service,
        connected(service, server, folder) as connector,
        ThreadPoolExecutor(8) as threads,
    ):
        wait_for(lambda: states(service) == ["serving"])
        service.encoder.close()
        answers = [threads.submit(service.text, [image_part(image(seed=70 + n))]) for n in range(8)]
        wait_for(lambda: len(connector.asked) == 8)
        assert service.encoder.entered.wait(20)
        first = service.running.frontend.router.membership.encode_instances()[0]
        service.encoder.opened.set()
        asyncio.run_coroutine_threadsafe(service.running.end(first.name), service.loop).result(60)
        assert [one.result() for one in answers] == [WORDS] * 8
        wait_for(lambda: not service.running.frontend.router.num_requests)


def test_encode_instances_keep_nothing_of_a_connector_that_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are restarted, and encode instances outlive them."""
    with vllm_server(folder) as server, gateway(folder, server) as service:
        monkeypatch.setattr(service.running.frontend.router.consumers, "_expiry", 1.5)
        before = num_maps()
        with connected(service, server, folder):
            wait_for(lambda: states(service) == ["serving"])
            assert service.text([image_part(image(seed=90))]) == WORDS
            assert num_maps() > before + 1  # the connector's, and an encode instance's
        wait_for(lambda: num_maps() == before)


def num_maps() -> int:
    """Of pools that rows arrive in."""
    return Path("/proc/self/maps").read_text().count("/memfd:triptych-")


def test_text_needs_no_connector(
    all_three: tuple[Served, VllmServer, Connector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream goes on when the connector is silent, other texts are answered, and media wait for it."""
    service, server, _ = all_three
    servers = service.running.frontend.router.servers
    assert servers is not None
    server.opened.clear()
    server.behaviours.append("pause")
    with (
        service.client() as client,
        client.stream("POST", CHAT, json=service.body(stream=True)) as response,
        ThreadPoolExecutor(1) as threads,
    ):
        lines = response.iter_lines()
        next(lines)
        with monkeypatch.context() as silent:
            silent.setattr(servers, "has_connector", lambda _: False)
            wait_for(lambda: all("connector" in one.why for one in servers))
            assert states(service) == ["serving"]
            media = threads.submit(service.text, [image_part(image(seed=80))])
            wait_for(lambda: servers.num_waiting == 1)
            assert service.text() == WORDS
            server.opened.set()
            assert "data: [DONE]" in list(lines)
        assert media.result() == WORDS


def test_servers_are_told_apart_by_name(folder: Path) -> None:
    with (
        vllm_server(folder) as one,
        vllm_server(folder) as two,
        gateway(folder, one, two) as service,
        connected(service, two, folder, name=two.url.removeprefix("http://")) as connector,
    ):
        wait_for(lambda: states(service) == ["awaited", "serving"])
        assert service.text([image_part()]) == WORDS
        assert not one.bodies
        assert connector.asked


def test_clients_that_hang_up_at_any_time_leave_nothing(all_three: tuple[Served, VllmServer, Connector]) -> None:
    service, server, connector = all_three
    service.encoder.delay = 0.01
    content = [[image_part(image(seed=100 + number % 8)), text_part("a")] for number in range(120)]
    bodies = [service.body(one, stream=number % 2 == 1, cache_salt=f"{number}") for number, one in enumerate(content)]
    hang_up(httpx.URL(service.url).port or 0, bodies, longest=0.3, at_a_time=12)
    service.settle()
    frontend = service.running.frontend
    admission, servers = frontend.router.lifecycle.admission, frontend.router.servers
    wait_for(lambda: not server.running and not admission.share_in_flight and not frontend.api.memory_budget.total)
    assert servers is not None and not servers.num_waiting and not any(one.running for one in servers)
    wait_for(lambda: connector.consumer.is_idle)
    assert service.text(content[0]) == WORDS
