"""A rank of an instance that prefills, or of one that decodes, is killed while a request's KV is on its way between
instances of different sizes."""

import time
from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import (
    DETECTION,
    SOON,
    SPLIT,
    WRITE,
    Asking,
    Cluster,
    cluster,
    wait_for,
    whole_again,
)

RANKS = {"p0": 2, "d": 2}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(make_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny"), SPLIT, RANKS) as started:
        yield started


@pytest.fixture
def whole(running: Cluster) -> Iterator[Cluster]:
    with whole_again(running, running.ask):
        running.parts["p0"].wait_for_line("ready$")  # the service is ready with the other prefill instance alone
        yield running


def reach_p0(running: Cluster) -> list[Asking]:
    """A request for each prefill instance, once that of two ranks has begun to write its KV."""
    before = num_sent(running)
    asked = [running.ask_picture() for _ in range(2)]
    wait_for(lambda: num_sent(running) > before, 5)
    time.sleep(WRITE / 2)
    assert all(asking.under_way for asking in asked)
    return asked


def num_sent(running: Cluster) -> int:
    """Transfers of KV, which are named after who decodes, that p0 has begun to write."""
    return sum(" d-" in line and line.endswith(": transferring") for line in list(running.parts["p0"].lines))


@pytest.mark.slow
def test_a_prefill_instance_that_loses_a_rank(whole: Cluster) -> None:
    """It ends, and its requests are prefilled by another, of another size."""
    asked = reach_p0(whole)
    whole.kill_rank("p0")
    lost = time.monotonic()
    assert all(whole.is_right(asking) for asking in asked), [asking.answer for asking in asked]
    assert max(asking.answer.ended for asking in asked) - lost < DETECTION + 20 * WRITE
    assert "tensor-parallel rank 1 of 2" in whole.ended[-1].lines[-1]


@pytest.mark.slow
def test_a_decode_instance_that_loses_a_rank(whole: Cluster) -> None:
    """It ends, and so do its requests; the prefill instances hold nothing of them."""
    asked = reach_p0(whole)
    whole.kill_rank("d")
    lost = time.monotonic()
    assert {asking.result().code for asking in asked} == {"instance_lost"}
    assert max(asking.answer.ended for asking in asked) - lost < DETECTION
    wait_for(whole.is_back, SOON)
