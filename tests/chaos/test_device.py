"""A device that breaks for good, as a GPU does by an illegal access: its instance is out soon, and back by itself."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Asking, free_port, wait_for
from tests.support.commands import FAST, Command, triptych
from tests.support.serving import image, image_part, served, text_part
from triptych import exit_codes
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig

START = 120.0
OUT = 2.0
"""Seconds within which a broken instance must have left."""
REQUESTS = 12
SETTINGS: dict[str, Any] = {"max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("device") / "tiny")


def question(number: int) -> list[dict[str, Any]]:
    return [image_part(image(96, 96, number)), text_part(f"Question {number}?")]


def breaks(command: Command, victim: str, pids: Callable[[], dict[str, int]], ask: Callable[[], object]) -> float:
    """Breaks an instance's device at its next job. Returns the seconds from then until it has left. Calls ``ask`` again
    and again until there is a job: all that was asked before may be answered."""
    pid, before = pids()[victim], len(command.lines)
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while not any("injected fault" in line for line in command.lines[before:]):
        assert time.monotonic() < deadline, "no job began"
        ask()
        time.sleep(0.1)
    broke = time.monotonic()
    wait_for(lambda: pids().get(victim) != pid, OUT + 5)
    return time.monotonic() - broke


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "victims", "fault"),
    [
        ("2EPD", ["epd0", "epd1"], "device=0"),
        ("1E1PD", ["e0", "pd0"], "device=0"),
        ("1E1P1D", ["e0", "p0", "d0"], "device=0"),
        ("1E1PD", ["e0", "pd0"], "device=0,hang=1"),
    ],
)
def test_an_instance_whose_device_breaks_is_out_soon_and_back_by_itself(
    folder: Path, topology: str, victims: list[str], fault: str
) -> None:
    control = free_port()
    flags = ("--topology", topology, "--served-model-name", "tiny", "--control-port", str(control))
    with (
        triptych("serve", folder, *FAST, *flags, internal={"inject_faults": fault}) as command,
        served(folder, "1EPD") as reference,
        ControlClient(f"127.0.0.1:{control}", ClusterConfig()) as operator,
    ):
        command.wait_for_line("^ready: ", START)
        url = command.wait_until_ready()

        def pids() -> dict[str, int]:
            return {one.name: one.pid for one in operator.status().instances}

        asked: list[Asking] = []

        def ask() -> None:
            asked.append(Asking(url, question(len(asked)), **SETTINGS))

        for turn, victim in enumerate(victims):
            wait_for(lambda: len(pids()) == len(victims), START)
            answered = len(asked)
            for _ in range(REQUESTS):
                ask()
            time.sleep(random.Random(turn).uniform(0.05, 0.3))
            assert breaks(command, victim, pids, ask) < OUT
            for one in asked[answered:]:
                right = reference.text(one.content, **SETTINGS)
                assert (one.result(START).status, one.answer.code, one.answer.text) == (200, "", right)
            command.wait_for_line(f"instance {victim} .* ended with exit code {exit_codes.BROKEN}")
        wait_for(lambda: len(pids()) == len(victims), START)
        assert Asking(url, question(0), **SETTINGS).result().text == reference.text(question(0), **SETTINGS)
        wait_for(lambda: not any(pool.used for one in operator.status().instances for pool in one.load.pools), 5)
