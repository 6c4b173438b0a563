"""A request that ends each instance that works on it: it is given up, and all others are answered."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Asking, free_port, wait_for
from tests.support.commands import FAST, triptych
from tests.support.serving import served
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig

PLACEMENTS = 3
LARGE = 1500
"""Outstanding tokens of an instance by which one sees that it has the poison: the others are short."""
START = 120.0


@pytest.mark.slow
def test_a_poison_request_is_given_up_after_three_placements_and_others_are_unharmed(tmp_path: Path) -> None:
    """The test kills each instance that has been given it."""
    folder, control = make_checkpoint(tmp_path / "tiny"), free_port()
    # so that the poison is killed before its first token: one that has answered isn't suspected alone
    small_steps = ("--max-num-batched-tokens", "16")
    flags = (*FAST, *small_steps, "--topology", "2PD", "--served-model-name", "tiny", "--control-port", str(control))
    with triptych("serve", folder, *flags) as command, served(folder, "1PD") as reference:
        command.wait_for_line("^ready: ", START)
        url = command.wait_until_ready()
        poison = Asking(url, "word " * 400, max_tokens=1000)
        others = [Asking(url, f"Question {number}", max_tokens=24) for number in range(12)]
        killed: set[int] = set()
        deadline = time.monotonic() + 3 * START
        with ControlClient(f"127.0.0.1:{control}", ClusterConfig()) as operator:
            while poison.under_way and time.monotonic() < deadline:
                for one in operator.status().instances:
                    if one.outstanding > LARGE and one.pid not in killed:
                        os.kill(one.pid, signal.SIGKILL)
                        killed.add(one.pid)
            answer = poison.result(1)
            assert (answer.status, answer.code) == (503, "instance_lost"), answer
            assert len(killed) == PLACEMENTS
            right = [reference.text(f"Question {number}", max_tokens=24) for number in range(12)]
            assert [(one.result(START).status, one.answer.text) for one in others] == [(200, text) for text in right]
            wait_for(lambda: len(operator.status().instances) == 2, START)
            assert Asking(url, "Hello").result().status == 200
            wait_for(lambda: not any(p.used for one in operator.status().instances for p in one.load.pools), 5)
