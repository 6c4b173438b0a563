"""The processes of an instance that has several ranks: they live and die together."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import MISSING_KEY
from tests.support.commands import FAST, Command, one_line_error, picture_answer, stream_of, triptych, worker
from triptych import exit_codes

TWO_RANKS = (*FAST, "--topology", "1EPD", "--restart", "never", "--tensor-parallel-size", "2")


def ranks(command: Command) -> list[psutil.Process]:
    """All instances' processes; beside them are the frontend, what forks them, and those that decode media."""
    others = {"triptych.sandbox.child", "triptych.server.frontend_main", "triptych.server.fork_server"}
    return [child for child in command.descendants if not others & set(child.cmdline())]


def test_a_rank_that_is_killed_ends_the_service(folder: Path) -> None:
    with triptych("serve", folder, *TWO_RANKS) as command:
        url = command.wait_until_ready()
        assert picture_answer(url, "tiny")
        assert len(ranks(command)) == 2
        with stream_of(url, "tiny", 4000) as lines:
            killed = worker(command)
            killed.kill()
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_lost"
        assert command.end() == 1
        why = f"triptych: tensor-parallel rank 1 of 2 (process {killed.pid}) was killed by SIGKILL"
        assert any(line.startswith("[epd0] ") and line.endswith(f" {why}") for line in command.lines)
        assert any(line.endswith(f"ended with exit code 1: {why}; stopping the others") for line in command.errors)
        assert "Traceback" not in command.text


@pytest.mark.slow
def test_each_role_has_its_own_number_of_ranks(folder: Path) -> None:
    arguments = (*FAST, "--topology", "1EP1D", "--tensor-parallel-size", "EP=1,D=2")
    with triptych("serve", folder, *arguments) as command:
        url = command.wait_until_ready()
        assert picture_answer(url, "tiny")
        assert len(ranks(command)) == 3
        assert worker(command).parent() == command.child("d0")


@pytest.mark.slow
def test_an_idle_group_notices_a_rank_that_dies(folder: Path) -> None:
    with triptych("serve", folder, *TWO_RANKS) as command:
        command.wait_until_ready()
        worker(command).kill()
        began = time.monotonic()
        assert command.end() == 1
        assert time.monotonic() - began < 5
        assert any("was killed by SIGKILL; stopping the others" in line for line in command.errors)
        assert "Traceback" not in command.text


@pytest.mark.slow
def test_ranks_end_with_rank_0_and_leave_signals_to_it(folder: Path) -> None:
    """Rank 0 alone is killed; its supervisor says so, and the kernel ends the other rank."""
    with triptych("serve", folder, *TWO_RANKS) as command:
        command.wait_until_ready()
        other = worker(command)
        for number in (signal.SIGTERM, signal.SIGINT):
            other.send_signal(number)
        time.sleep(0.2)
        assert other.is_running()
        rank_0 = command.child("epd0")
        with stream_of(command.wait_until_ready(), "tiny", 4000) as lines:
            rank_0.kill()
            assert "instance_lost" in list(lines)[-1]
        assert command.end() == 1, "and no process is left"
        assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        why = f"instance epd0 (process {rank_0.pid}) was killed by SIGKILL; stopping the others"
        assert any(why in line for line in command.errors)
        assert "Traceback" not in command.text


@pytest.mark.slow
@pytest.mark.parametrize("when", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_all_ranks(folder: Path, when: signal.Signals) -> None:
    with triptych("serve", folder, *TWO_RANKS) as command:
        url = command.wait_until_ready()
        with stream_of(url, "tiny", 30 if when == signal.SIGTERM else 4000) as lines:
            command.send(when)
            assert list(lines)[-1] == "data: [DONE]" or when == signal.SIGINT
            assert command.end() == 0, command.text
        assert "Traceback" not in command.text


@pytest.mark.slow
def test_a_rank_that_is_killed_during_the_start(folder: Path) -> None:
    with triptych("serve", folder, *TWO_RANKS) as command:
        killed = worker(command)
        command.descendants = psutil.Process(command.process.pid).children(recursive=True)
        killed.kill()
        assert f"rank 1 of 2 (process {killed.pid}) was killed by SIGKILL" in one_line_error(command)


@pytest.mark.slow
def test_a_size_that_does_not_divide(folder: Path) -> None:
    with triptych("serve", folder, *TWO_RANKS[:-1], "3") as command:
        message = one_line_error(command, exit_codes.CONFIG)
        assert message.endswith("--tensor-parallel-size 3 doesn't divide the model's query heads, of which there are 4")


@pytest.mark.slow
def test_a_missing_key_is_one_line(folder_without_a_key: Path) -> None:
    with triptych("serve", folder_without_a_key, *TWO_RANKS) as command:
        assert MISSING_KEY in one_line_error(command, exit_codes.CONFIG)
