"""``--leave-instances``: a frontend that another service manager replaces fails no request, and ends no instance."""

import signal
from pathlib import Path

import httpx

from tests.support.cluster import free_port
from tests.support.commands import FAST, stream_of, triptych

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
