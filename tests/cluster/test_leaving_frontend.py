"""Frontends that others replace: they answer what has reached them. With ``--leave-instances``, where another service
manager replaces one, they end no instance, either."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from pathlib import Path

import httpx

from tests.support.cluster import free_port
from tests.support.commands import FAST, stream_of, triptych
from tests.support.frontends import alone
from triptych.server.http_server import LAST_REQUESTS

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def ask(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/chat/completions", json=BODY)


def test_a_frontend_that_leaves_answers_what_still_comes_and_keeps_its_instances(folder: Path) -> None:
    control = f"127.0.0.1:{free_port()}"
    frontend = ("--role", "frontend", "--port", "0", "--control-port", control.rpartition(":")[2], "--leave-instances")
    with (
        triptych("serve", folder, *FAST, "--role", "PD", "--join", control) as instance,
        triptych("serve", folder, *FAST, *frontend) as old,
    ):
        url = old.wait_until_ready()
        old.wait_for_line("joined as PD")
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=30) as kept,
            httpx.Client(base_url=url, trust_env=False, timeout=30) as late,
            stream_of(url, "tiny", 1500) as lines,
        ):
            answer = ask(kept)
            assert answer.status_code == 200
            assert "connection" not in answer.headers
            old.send(signal.SIGTERM)
            old.wait_for_line("leaving the instances to the next frontend")
            for client in (kept, late):  # one has a connection, and one opens its own
                again = ask(client)
                assert (again.status_code, again.json()["choices"]) == (200, answer.json()["choices"])
                assert again.headers["connection"] == "close"
            ready = late.get("/ready")
            assert (ready.status_code, "shutting down" in ready.text) == (503, True)
            assert list(lines)[-1] == "data: [DONE]"
        assert old.end() == 0
        with triptych("serve", folder, *FAST, *frontend) as new:
            url = new.wait_until_ready()
            new.wait_for_line("joined as PD")
            assert instance.process.poll() is None
            with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
                assert ask(client).json()["choices"] == answer.json()["choices"]


def test_it_is_for_a_frontend_alone(folder: Path) -> None:
    with triptych("serve", folder, "--topology", "1PD", "--leave-instances") as command:
        assert command.end() == 78
        assert "--leave-instances is for --role frontend" in command.text


def answer_of(client: socket.socket) -> bytes:
    """The whole answer to a request on a connection that the server then closes."""
    client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with client.makefile("rb") as stream:
        return stream.read()


def test_one_that_hands_over_answers_each_connection_that_it_has_accepted(folder: Path) -> None:
    with alone(folder, supervised=True) as frontend, contextlib.ExitStack() as stack:
        listener = stack.enter_context(frontend.frontend.debug_state().listener.dup())
        clients: list[socket.socket] = []

        async def hand_over() -> None:
            draining = asyncio.create_task(frontend.frontend.drain())
            for _ in range(20):  # one comes at each turn of its loop
                clients.append(stack.enter_context(socket.create_connection(listener.getsockname(), 20)))
                await asyncio.sleep(0)
            await draining

        ending = threading.Thread(target=frontend.run, args=(hand_over(),))
        ending.start()
        time.sleep(0.2)
        listener.setblocking(False)
        waiting = set()  # for the next frontend
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, peer = listener.accept()
                waiting.add(peer)
                connection.close()
        *others, last = [client for client in clients if client.getsockname() not in waiting]
        assert waiting and others
        answers = [answer_of(client) for client in others]
        time.sleep(2 * LAST_REQUESTS)  # the last one was accepted while the frontend stopped to accept
        for answer in (*answers, answer_of(last)):
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        ending.join(20)
        assert not ending.is_alive()
