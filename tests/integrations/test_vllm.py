"""A real vLLM whose rows come from Triptych's towers: ``scripts/test-vllm ENVIRONMENT``."""

import base64
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.ec_vllm import MODEL, VARIABLE, VllmServer, free_port, vllm_server
from tests.support.image_cases import picture, png
from tests.support.row_gateway import RowGateway, Rule
from tests.support.serving import CHAT, Served, served, wait_for
from tests.support.towers import Tower
from tests.support.vllm_checkpoints import SHAPES
from triptych.messages.rows import RowLayout
from triptych.messages.tickets import PARAMETER
from triptych.messages.work import EncodeNeeded
from triptych.types import TransferId

ENVIRONMENT = os.environ.get(VARIABLE, "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT, reason=f"{VARIABLE} names no environment with vLLM (scripts/test-vllm)"),
]

FILES = {str(number): png(picture(160 + 40 * number, 200 - 20 * number, number)) for number in range(6)}
PROMPTS: list[Sequence[str]] = [
    ["What is this?", "0"],
    ["1", "And this, in one word?"],
    ["Compare ", "0", " with ", "2"],
    ["0", "0", "Twice the same?"],
    ["1", "2", "3", "4", "5", "All of them."],
    ["No picture at all."],
    ["3", "What is this? " * 20],
]
"""Texts, and names of files."""
MAX_CPU = 0.05
"""Cores that the engine's process may use while all its requests wait."""


@dataclass
class Setup:
    """A vLLM with the connector, and what the same model answers alone."""

    server: VllmServer
    gateway: RowGateway
    """Sends rows as tests say."""
    service: Served
    """A real one before the server, with real encode instances."""
    tower: Tower
    alone: list[list[int]]
    takes_grid: bool

    def part(self, key: str, uuid: str = "") -> dict[str, Any]:
        """A picture as the gateway gives it to vLLM."""
        named = {"uuid": uuid or key}
        if not self.takes_grid:
            return pixels(key) | named
        grid = {"image_grid_thw": list(self.tower.plan(FILES[key]).grid)}
        return {"type": "image_embeds", "image_embeds": grid} | named

    def body(self, prompt: Sequence[str], **more: Any) -> dict[str, Any]:
        made = chat([self.part(one) if one in FILES else text(one) for one in prompt], **more)
        keys = [one for one in prompt if one in FILES]
        if keys and "ec_transfer_params" not in made:
            made["ec_transfer_params"] = {PARAMETER: self.gateway.ticket(keys)}
        return made

    def fresh(self, key: str, uuid: str, *, timeout: float = 60.0) -> dict[str, Any]:
        """A request for a picture that vLLM has no rows and no keys of."""
        sealed = {PARAMETER: self.gateway.ticket([key], names=[uuid], timeout=timeout)}
        return chat([text(uuid), self.part(key, uuid)], ec_transfer_params=sealed)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def pixels(key: str) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(FILES[key]).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def chat(content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Sixteen tokens that the end token can't cut short."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16}
    return {**body, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


def tokens(answer: tuple[int, Any]) -> list[int]:
    status, body = answer
    assert status == 200, body
    return list(body["choices"][0]["token_ids"])


@pytest.fixture(scope="module", params=SHAPES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    shape = str(request.param)
    folder = SHAPES[shape](tmp_path_factory.mktemp("checkpoint") / shape)
    logs = tmp_path_factory.mktemp("logs")
    environment = Path(ENVIRONMENT)
    with vllm_server(environment, folder, logs / "alone.log") as server:
        alone = [
            tokens(server.post(chat([pixels(one) if one in FILES else text(one) for one in prompt])))
            for prompt in PROMPTS
        ]
    tower = Tower(folder)
    rows = {key: tower.rows(file) for key, file in FILES.items()}
    gateway, port = RowGateway(rows, tower.layout, tower.identity), free_port()
    takes_grid = shape != "llava"
    flags = ["--language-model-only"] if takes_grid else []
    try:
        with served(folder, "2E", servers=f"vllm-ec=http://127.0.0.1:{port}", restart_hold=60.0) as service:
            router = service.running.frontend.router
            connector = {"frontends": [gateway.join, router.control], "pool_mb": 1}
            log = logs / "connector.log"
            with vllm_server(environment, folder, log, *flags, port=port, connector=connector) as server:
                wait_for(lambda: gateway.consumers and router.availability.can_serve)
                yield Setup(server, gateway, service, tower, alone, takes_grid)
    finally:
        gateway.stop()


@pytest.fixture(autouse=True)
def follows_rules(setup: Setup) -> Iterator[None]:
    setup.gateway.rule = lambda *_: True
    setup.gateway.asked.clear()
    setup.gateway.failed.clear()
    yield
    assert setup.server.is_healthy()
    wait_for(lambda: setup.gateway.sender.idle)


def test_tokens_are_those_of_vllm_alone_and_each_picture_is_asked_for_once(setup: Setup) -> None:
    """With ``--language-model-only`` there is no tower that could be called."""
    for prompt, expected in zip(PROMPTS, setup.alone, strict=True):
        assert tokens(setup.server.post(setup.body(prompt))) == expected, prompt
    assert setup.gateway.asked == dict.fromkeys(FILES, 1)
    assert not setup.gateway.failed


def test_many_at_once_and_streamed(setup: Setup) -> None:
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        body = setup.body(PROMPTS[number % len(PROMPTS)], stream=number % 2 == 1)
        with closing(setup.server.begin(body)) as connection:
            answer = connection.getresponse().read().decode()
        if number % 2 == 0:
            found[number] = tokens((200, json.loads(answer)))
            return
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        found[number] = [token for chunk in chunks for one in chunk["choices"] for token in one.get("token_ids") or ()]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(28)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == {number: setup.alone[number % len(PROMPTS)] for number in range(28)}


def test_rows_answer_and_not_the_tower(setup: Setup) -> None:
    """Of a family that is given the file as well: rows of another picture, so its answer."""
    if setup.takes_grid:
        pytest.skip("there is no tower")
    asked = chat([text("What is this?"), setup.part("0", "of 1")])
    sealed = {PARAMETER: setup.gateway.ticket(["1"], names=["of 1"])}
    answer = tokens(setup.server.post(asked | {"ec_transfer_params": sealed}))
    other = chat([text("What is this?"), pixels("1")])
    assert answer == tokens(setup.server.post(other)) != setup.alone[0]


def late(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.later(1.5, lambda: gateway.send_rows(needed, transfer, gateway.rows[key]))
    return False


def never(*_: Any) -> bool:
    return False


def wide(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    layout = gateway.layout
    wider = RowLayout(layout.model, layout.dtype, 2 * layout.width, 2 * layout.row_bytes)
    gateway.send_rows(needed, transfer, np.concatenate([gateway.rows[key]] * 2, axis=1), wider)
    return False


def short(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.send_rows(needed, transfer, gateway.rows[key][:-1])
    return False


def unknown(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.forget(needed)
    return False


def garbage(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.send_garbage(needed.consumer)
    return True


@pytest.mark.parametrize(
    ("rule", "status"),
    [(late, 200), (garbage, 200), (never, 500), (wide, 500), (short, 500), (unknown, 500)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_bad_rows_end_their_request_alone(setup: Setup, rule: Rule, status: int) -> None:
    setup.gateway.rule = lambda gateway, needed, transfer, key: key != "5" or rule(gateway, needed, transfer, key)
    other: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: other.append(setup.server.post(setup.body(PROMPTS[2], max_tokens=16))))
    thread.start()
    found = setup.server.post(setup.fresh("5", f"{rule.__name__} {time.time()}", timeout=3.0))
    thread.join(60)
    assert found[0] == status, found
    wait_for(lambda: len(setup.gateway.failed) == (status != 200))
    assert tokens(other[0]) == setup.alone[2]
    assert tokens(setup.server.post(setup.body(PROMPTS[0]))) == setup.alone[0]


Forge = Callable[[Setup, str], Any]


@pytest.mark.parametrize(
    "forge",
    [
        lambda setup, uuid: None,
        lambda setup, uuid: {},
        lambda setup, uuid: {PARAMETER: None},
        lambda setup, uuid: {PARAMETER: "AAAA"},
        lambda setup, uuid: {PARAMETER: {"frontend": "tcp://127.0.0.1:1"}},
        lambda setup, uuid: {PARAMETER: setup.gateway.ticket(["0"], names=["other"])},
        lambda setup, uuid: {PARAMETER: setup.gateway.ticket(["5"], names=[uuid])},
        lambda setup, uuid: {PARAMETER: setup.gateway.ticket(["0"], names=[uuid])[:-8] + "AAAAAAAA"},
    ],
)
def test_forged_tickets_are_refused(setup: Setup, forge: Forge) -> None:
    if not setup.takes_grid:
        pytest.skip("it has pixels, so it needs no ticket")
    uuid = f"forged {time.time()}"
    given = forge(setup, uuid)
    body = chat([setup.part("0", uuid)], **({} if given is None else {"ec_transfer_params": given}))
    assert setup.server.post(body)[0] == 500
    assert not setup.gateway.asked
    assert tokens(setup.server.post(setup.body(PROMPTS[0]))) == setup.alone[0]


def test_clients_that_hang_up_leave_nothing(setup: Setup) -> None:
    def offer(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
        gateway.sender.offer(transfer, needed.consumer, len(gateway.rows[key]), gateway.layout)
        return False

    setup.gateway.rule = offer
    begun = [setup.server.begin(setup.fresh("3", f"aborted {number}")) for number in range(20)]
    wait_for(lambda: setup.gateway.asked["3"] == len(begun), 60)
    for connection in begun:
        connection.close()
    wait_for(lambda: setup.gateway.sender.idle, 60)
    assert not setup.gateway.failed
    setup.gateway.rule = lambda *_: True
    assert tokens(setup.server.post(setup.body(PROMPTS[4]))) == setup.alone[4]


def test_an_engine_whose_requests_wait_rests(setup: Setup, record_property: Callable[[str, object], None]) -> None:
    setup.gateway.rule = never
    with_rest = setup.server.begin(setup.fresh("2", f"waits {time.time()}"))
    wait_for(lambda: setup.gateway.asked["2"])
    engine = setup.server.engine
    began, before = time.monotonic(), sum(engine.cpu_times()[:2])
    time.sleep(10)
    share = (sum(engine.cpu_times()[:2]) - before) / (time.monotonic() - began)
    with_rest.close()
    record_property("cores", round(share, 4))
    print(f"cores of the engine's process: {share:.3f}")
    assert share <= MAX_CPU


def test_a_lost_encode_instance_is_replaced(setup: Setup) -> None:
    def lose(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
        if gateway.asked[key] > 1:
            return True
        gateway.sender.offer(transfer, needed.consumer, len(gateway.rows[key]), gateway.layout)
        gateway.later(0.0, lambda: gateway.lose_producer(needed.consumer))
        return False

    setup.gateway.rule = lose
    assert setup.server.post(setup.fresh("4", f"lost {time.time()}"))[0] == 200
    assert setup.gateway.asked["4"] == 2


# ── through a real gateway ───────────────────────────────────────────────────────────────────────────────────────


def to_gateway(setup: Setup, prompt: Sequence[str], **more: Any) -> dict[str, Any]:
    content = [pixels(one) if one in FILES else text(one) for one in prompt]
    return chat(content, **more) | {"model": setup.service.model}


def through(setup: Setup, prompt: Sequence[str], **more: Any) -> tuple[int, Any]:
    with setup.service.client() as client:
        response = client.post(CHAT, json=to_gateway(setup, prompt, **more), timeout=300)
    return response.status_code, response.json()


def test_a_gateway_answers_as_vllm_alone(setup: Setup) -> None:
    for prompt, expected in zip(PROMPTS, setup.alone, strict=True):
        assert tokens(through(setup, prompt)) == expected, prompt
    assert not setup.gateway.asked
    wait_for(setup.service.is_idle)


def test_a_gateway_with_many_clients(setup: Setup) -> None:
    """A salt of each one's own, so that nothing is cached."""

    def ask(number: int) -> list[int]:
        return tokens(through(setup, PROMPTS[number % len(PROMPTS)], cache_salt=f"many {number}"))

    with ThreadPoolExecutor(14) as threads:
        found = list(threads.map(ask, range(28)))
    assert found == [setup.alone[number % len(PROMPTS)] for number in range(28)]
    wait_for(setup.service.is_idle)


def test_clients_of_a_gateway_that_hang_up_leave_nothing(setup: Setup) -> None:
    setup.service.encoder.close()

    def ask(number: int) -> None:
        with setup.service.client() as client, pytest.raises(httpx.ReadTimeout):
            body = to_gateway(setup, PROMPTS[4], cache_salt=f"hangs up {number}")
            client.post(CHAT, json=body, timeout=3 + 0.1 * number)

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(ask, range(10)))
    setup.service.settle(30.0)
    assert tokens(through(setup, PROMPTS[4])) == setup.alone[4]


def test_files_that_cant_be_decoded_are_the_clients_fault(setup: Setup) -> None:
    url = "data:image/png;base64," + base64.b64encode(FILES["0"][:-40]).decode()
    body = chat([{"type": "image_url", "image_url": {"url": url}}]) | {"model": setup.service.model}
    with setup.service.client() as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 400
    # vLLM reads a file that it gets before rows are asked for, and names no field
    param = "messages[0].content[0].image_url.url" if setup.takes_grid else None
    assert response.json()["error"]["param"] == param
