"""Instances and the frontend are killed and stopped while requests are under way: what is asked ends, in the right
answer or an error with a name; what is left keeps serving, and holds nothing more than before."""

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import (
    DETECTION,
    FAST,
    HEARTBEAT,
    LEASE,
    SOON,
    TIMEOUT,
    WRITE,
    Asking,
    Cluster,
    cluster,
    wait_for,
    whole_again,
)
from tests.support.commands import triptych
from triptych import exit_codes

LOSSES = ("instance_lost", "unavailable")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(make_checkpoint(tmp_path_factory.mktemp("chaos") / "tiny")) as started:
        yield started


@pytest.fixture
def whole(running: Cluster) -> Iterator[Cluster]:
    named = sorted(os.listdir("/dev/shm"))
    with whole_again(running, running.ask):
        yield running
    assert sorted(os.listdir("/dev/shm")) == named


def reach(running: Cluster, state: str) -> list[Asking]:
    """Requests for pictures of which the first is in that state."""

    def ask_until(state: str) -> Asking:
        before = running.has_been(state)
        asking = running.ask_picture()
        wait_for(lambda: running.has_been(state) > before, SOON)
        return asking

    if state == "bootstrapping":
        running.parts["e"].send(signal.SIGSTOP)  # so that nothing is offered
        asked = [ask_until(state)]
    else:
        asked = [ask_until("transferring")]
    if state == "waiting for input":
        asked.insert(0, ask_until(state))  # the one block that there is belongs to the other
    time.sleep(WRITE / 2)  # into the first of four writes
    assert all(asking.under_way for asking in asked)
    return asked


def lose(running: Cluster, victim: str, how: str) -> None:
    if how == "killed":
        running.kill(victim)
    else:
        running.parts[victim].send(signal.SIGSTOP)


STATES = ("bootstrapping", "waiting for input", "transferring")
BY_DEFAULT = {
    ("e", "killed", "transferring"),
    ("pd", "stopped", "waiting for input"),
}


@pytest.mark.parametrize(
    ("victim", "how", "state"),
    [
        pytest.param(*case, marks=[] if case in BY_DEFAULT else slow)
        for case in [(v, h, s) for v in ("e", "pd") for h in ("killed", "stopped") for s in STATES]
    ],
)
def test_losing_an_instance(whole: Cluster, victim: str, how: str, state: str) -> None:
    asked = reach(whole, state)
    lose(whole, victim, how)
    lost = time.monotonic()
    if state == "bootstrapping" and victim != "e":
        whole.parts["e"].send(signal.SIGCONT)
    for asking in asked:
        answer = asking.result()
        assert answer.code in LOSSES, answer
        detection = answer.ended - lost - LEASE
        print(f"{victim} {how} while {state}: answered {detection:+.2f} s after the lease")
        assert -HEARTBEAT - 0.3 < detection < DETECTION
        assert answer.seconds < TIMEOUT
    ended = time.monotonic()
    stopped = {victim: whole.parts.pop(victim)} if how == "stopped" else {}
    wait_for(whole.is_back, SOON - (time.monotonic() - ended))
    text = whole.ask()
    assert whole.is_right(text) if victim == "e" else text.result().code == "unavailable"
    whole.parts |= stopped


def test_standing_still_for_less_than_the_lease_costs_nothing(whole: Cluster) -> None:
    asked = reach(whole, "transferring")
    for name in ("e", "pd"):
        whole.parts[name].send(signal.SIGSTOP)
    time.sleep(LEASE / 3)
    for name in ("e", "pd"):
        whole.parts[name].send(signal.SIGCONT)
    assert all(whole.is_right(asking) for asking in asked)


def test_a_frontend_that_stands_still_for_longer_than_the_lease_serves_again(whole: Cluster) -> None:
    """Its instances have given up its work by then, and nothing holds its requests until they are back."""
    asked = [*reach(whole, "transferring"), whole.ask()]
    whole.parts["door"].send(signal.SIGSTOP)
    time.sleep(1.5 * LEASE)
    whole.parts["door"].send(signal.SIGCONT)
    for asking in asked:
        answer = asking.result()
        assert whole.is_right(asking) or answer.code in LOSSES, answer
    wait_for(whole.is_back, SOON)


def test_a_full_pool_makes_requests_wait_and_nothing_else(whole: Cluster) -> None:
    asked = [whole.ask_picture() for _ in range(3)]
    assert whole.is_right(whole.ask()), "text needs no block"
    assert all(asking.under_way for asking in asked)
    assert all(whole.is_right(asking) for asking in asked)


def test_instances_register_with_a_restarted_frontend(whole: Cluster) -> None:
    asked = reach(whole, "transferring")
    whole.kill("door")
    assert asked[0].result().status == 0
    began = time.monotonic()
    whole.start("door")
    whole.restore()
    print(f"a frontend was whole again after {time.monotonic() - began:.2f} s")


@slow
@pytest.mark.parametrize("order", ["e pd e", "pd pd e", "e e pd", "pd e pd e"])
def test_one_loss_after_the_other(whole: Cluster, order: str) -> None:
    """With requests under way all the time."""
    for victim in order.split():
        asked = [whole.ask_picture(), whole.ask(), whole.ask_picture()]
        time.sleep(0.2)
        whole.parts[victim].send(signal.SIGSTOP)
        for asking in asked:
            answer = asking.result()
            assert whole.is_right(asking) or answer.code in LOSSES, answer
        whole.restore()


@slow
def test_broken_writes_are_mended_or_named(whole: Cluster) -> None:
    """More than every second write is broken, in one way or another, and every row is checked."""
    broken = "drop=0.1,delay=0.1,duplicate=0.1,reorder=0.1,corrupt=0.1,half=0.1,seconds=0.05"
    small = {"receive_blocks": 2, "receive_block_rows": 16, "inject_faults": broken}
    with triptych("serve", whole.folder, *FAST, "--port", "0", internal=small) as command:
        url = command.wait_until_ready()
        asked = [whole.ask_picture(url) for _ in range(20)]
        mended = sum(asking.result().code == "" and whole.is_right(asking) for asking in asked)
        assert {asking.result().code for asking in asked} <= {"", "internal_error"}
        assert mended >= 16, "few pictures meet that many faults in a row"
        assert command.text.count("are corrupt") > 0
        assert "while idle" not in command.text


@slow
def test_an_instance_whose_rows_do_not_fit_is_refused(whole: Cluster) -> None:
    join = ("--role", "E", "--join", f"127.0.0.1:{whole.control}", "--name", "other")
    with triptych("serve", whole.folder, *FAST, *join, "--dtype", "bfloat16") as command:
        assert command.end(30) == exit_codes.CONFIG
        assert re.search(
            "rows of other don't fit those of (e|pd): weight_dtype bfloat16 here, float32 there", command.text
        )
