"""Instances that prefill, and one that decodes, are killed and stopped while a request's KV is on its way."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import (
    DETECTION,
    HEARTBEAT,
    LEASE,
    SOON,
    SPLIT,
    WRITE,
    Asking,
    Cluster,
    Streaming,
    cluster,
    wait_for,
    whole_again,
)

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(make_checkpoint(tmp_path_factory.mktemp("split") / "tiny"), SPLIT) as started:
        yield started


@pytest.fixture
def whole(running: Cluster) -> Iterator[Cluster]:
    with whole_again(running, running.ask):
        yield running


def reach(running: Cluster, state: str) -> tuple[str, Asking]:
    """Asks for a picture. The prefill instance that works on it, once the transfer of its KV is in that state where it
    is to be decoded."""
    before = {name: running.has_been("bootstrapping", name) for name in ("p0", "p1")}
    been = running.has_been(state, "d")
    asking = running.ask_picture()
    wait_for(lambda: running.has_been(state, "d") > been, 5)

    def works() -> list[str]:
        return [name for name in before if running.has_been("bootstrapping", name) > before[name]]

    wait_for(works, 5)
    time.sleep(WRITE / 2 if state == "transferring" else 0)
    assert asking.under_way
    return works()[0], asking


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=slow)])
@pytest.mark.parametrize(
    "state", [*(pytest.param(one, marks=slow) for one in ("bootstrapping", "waiting for input")), "transferring"]
)
def test_a_lost_prefill_is_anothers_work(whole: Cluster, state: str, how: signal.Signals) -> None:
    victim, asking = reach(whole, state)
    if how is signal.SIGKILL:
        whole.kill(victim)
    else:
        whole.parts[victim].send(how)
    lost = time.monotonic()
    assert whole.is_right(asking), asking.answer
    assert asking.answer.ended - lost < LEASE + DETECTION + 20 * WRITE
    assert whole.is_right(whole.ask())


def test_a_prefill_that_is_lost_once_all_is_written_is_not_missed(whole: Cluster) -> None:
    been = whole.has_been("success", "d")
    works = {name: whole.has_been("bootstrapping", name) for name in ("p0", "p1")}
    asking = Streaming(whole.url, "Once upon a time", max_tokens=400)
    wait_for(lambda: whole.has_been("success", "d") > been, 10)
    (victim,) = [name for name in works if whole.has_been("bootstrapping", name) > works[name]]
    whole.kill(victim)
    assert asking.under_way
    assert whole.is_right(asking), asking.answer


@pytest.mark.slow
def test_without_a_prefill_instance_there_is_an_answer_too(whole: Cluster) -> None:
    _, asking = reach(whole, "transferring")
    for name in ("p0", "p1"):
        whole.kill(name)
    assert asking.result().code in {"unavailable", "instance_lost"}
    assert whole.ask().result().code == "unavailable"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=slow)])
@pytest.mark.parametrize("state", [pytest.param("waiting for input", marks=slow), "transferring"])
def test_a_lost_decode_instance_costs_its_requests_and_no_page(whole: Cluster, state: str, how: signal.Signals) -> None:
    _, asking = reach(whole, state)
    if how is signal.SIGKILL:
        whole.kill("d")
    else:
        whole.parts["d"].send(how)
    lost = time.monotonic()
    answer = asking.result()
    assert answer.code in {"instance_lost", "unavailable"}
    assert answer.ended - lost < LEASE + DETECTION
    wait_for(lambda: whole.has_its_pages("p0") and whole.has_its_pages("p1"), SOON + 2 * HEARTBEAT)
    if how is signal.SIGSTOP:
        whole.parts["d"].send(signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=slow)])
def test_a_stream_whose_decode_instance_is_lost_ends_in_an_error_with_a_name(
    whole: Cluster, how: signal.Signals
) -> None:
    """Where there is another that decodes it would go on: ``test_decoders.py``."""
    asking = Streaming(whole.url, "Tell me a story", max_tokens=600)
    wait_for(lambda: asking.num_chunks > 10, 10)
    lost = time.monotonic()
    if how is signal.SIGKILL:
        whole.kill("d")
    else:
        whole.parts["d"].send(how)
    answer = asking.result()
    assert (answer.status, answer.code) == (200, "instance_lost")
    assert answer.ended - lost < LEASE + DETECTION
    wait_for(lambda: whole.has_its_pages("p0") and whole.has_its_pages("p1"), SOON + 2 * HEARTBEAT)
    assert whole.ask().result().code == "unavailable"
