"""Instances on a GPU as processes: a service that a command starts, and an instance that it starts again."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="a service's libraries aren't all installed")
pytest.importorskip("fastapi", reason="a service's libraries aren't all installed")
pytest.importorskip("httpx", reason="the tests' libraries aren't all installed")
pytest.importorskip("psutil", reason="the tests' libraries aren't all installed")

import httpx

from tests.support.commands import FAST, picture_answer, triptych, wait_for


@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_a_killed_instance_comes_back(checkpoint_folder: Callable[..., Path], topology: str) -> None:
    """And answers as the first one did."""
    folder = checkpoint_folder()
    with triptych("serve", folder, *FAST, "--topology", topology, "--device", "cuda") as command:
        url = command.wait_until_ready()
        answer = picture_answer(url, folder.name)
        name = "epd0" if topology == "1EPD" else "d0"
        killed, parent = command.child(name), command.child(name).parent()
        assert parent is not None
        assert "triptych.server.fork_server" in parent.cmdline()
        killed.kill()
        command.wait_for_line(rf"instance {name} .* was killed by SIGKILL; starting again")
        wait_for(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 503, 10, command)
        wait_for(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 200, 60, command)
        assert picture_answer(url, folder.name) == answer
