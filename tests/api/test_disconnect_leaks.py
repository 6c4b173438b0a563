"""Many clients that disconnect at random moments: nothing leaks."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.serving import CHAT, SOON, Served, image, image_part, text_part, wait_for

AT_A_TIME = 6
BATCH = 25


def leave(service: Served, number: int) -> None:
    """One client: it may leave before its request is complete, while it is worked on, or while its answer comes."""
    chance = random.Random(number)
    content = [image_part(image(seed=1000 + number)), text_part("x" * chance.randrange(200))][chance.randrange(2) :]
    body = json.dumps(
        service.body(content, stream=chance.random() < 0.5, max_tokens=chance.choice((1, 20, 2000)))
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = service.url.removeprefix("http://").split(":")
    data = head + body
    if chance.random() < 0.2:
        data = data[: chance.randrange(len(data))]
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        time.sleep(chance.random() * 0.3)
        if chance.random() < 0.3:
            # closes at once, with what it hasn't read: a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_disconnects(service: Served, number: int) -> None:
    expected = service.text([image_part(), text_part("x")])
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        for first in range(0, number, BATCH):
            list(clients.map(lambda one: leave(service, one), range(first, first + BATCH)))
            wait_for(service.everything_is_back, SOON)
    assert service.text([image_part(), text_part("x")]) == expected
    frontend = service.running.frontend
    wait_for(lambda: not frontend.debug_state().num_responses, SOON)
    assert not frontend.debug_state().num_fetches
