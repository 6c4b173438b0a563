"""Messages arrive late, twice, in another order or never, and writes of rows are broken: every answer is right, nothing
hangs, and nothing is left over."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.commands import FAST, triptych
from tests.support.disorder import LossyChannel, disturb
from tests.support.questions import Questions
from tests.support.serving import Served, served, wait_for
from triptych.messages.channel import Channel

slow = pytest.mark.slow
START = 120.0
"""Seconds that a service may take to start."""
FAULTS = ("drop", "delay", "duplicate", "reorder", "corrupt", "half")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    return Questions.about(make_checkpoint(tmp_path_factory.mktemp("messages") / "tiny"))


@pytest.fixture(scope="module", params=["1E1P1D", pytest.param("2E2PD", marks=slow)])
def service(request: pytest.FixtureRequest, questions: Questions) -> Iterator[Served]:
    with served(questions.folder, request.param, request_timeout=60.0, restart_hold=30.0) as running:
        yield running


def channels_of(service: Served) -> list[Channel]:
    found = [service.running.frontend.channel, *(instance.channel for instance in service.running.instances)]
    return [channel for channel in found if isinstance(channel, Channel)]


@pytest.mark.parametrize(
    ("share", "number"), [(0.01, 64), pytest.param(0.01, 2000, marks=slow), pytest.param(0.05, 500, marks=slow)]
)
def test_no_answer_is_lost_or_wrong(service: Served, questions: Questions, share: float, number: int) -> None:
    disturbed = disturb(channels_of(service), delay=share, duplicate=share, reorder=share)
    try:
        wrong = questions.wrong_answers(service.url, number)
        counts = sum((one.counts for one in disturbed), Counter[str]())
        print(counts.total(), counts)
        assert not wrong, (len(wrong), wrong[:5])
        assert counts.total() > number / 4
    finally:
        for one in disturbed:
            one.restore()
    wait_for(service.everything_is_back, 5)


@pytest.mark.parametrize(
    ("share", "number"), [(0.002, 64), pytest.param(0.002, 2000, marks=slow), pytest.param(0.005, 500, marks=slow)]
)
def test_lost_messages_are_noticed_and_their_work_done_again(
    service: Served, questions: Questions, share: float, number: int
) -> None:
    lossy = [LossyChannel(channel, share, seed) for seed, channel in enumerate(channels_of(service))]
    try:
        wrong = questions.wrong_answers(service.url, number)
        lost = [one.num_lost for one in lossy]
        print(lost)
        assert not wrong, (len(wrong), wrong[:5])
        assert sum(lost) > number * share
    finally:
        for one in lossy:
            one.share = 0.0
    wait_for(service.everything_is_back, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "number"),
    [
        (0.05, 60),
        pytest.param(0.05, 200, marks=slow),
        pytest.param(0.2, 200, marks=slow),
        pytest.param(0.05, 10_000, marks=slow),
        pytest.param(0.2, 10_000, marks=slow),
    ],
)
def test_broken_writes_are_mended_or_named(questions: Questions, share: float, number: int) -> None:
    """Of all writes that share is broken, each in one of six ways. Errors are rare: a row must be broken four times."""
    broken = ",".join(f"{fault}={share / len(FAULTS):.4f}" for fault in FAULTS)
    flags = ("--topology", "1E1P1D", "--served-model-name", "tiny")
    faults = {"inject_faults": f"{broken},seconds=0.2"}
    with triptych("serve", questions.folder, *FAST, *flags, internal=faults) as command:
        command.wait_for_line("^ready: ", START)
        wrong = questions.wrong_answers(command.wait_until_ready(), number)
        print(f"{len(wrong)} of {number} failed; rows were corrupt {command.text.count('are corrupt')} times")
        assert all(isinstance(answer, str) and '"code":"internal_error"' in answer for answer in wrong), wrong[:3]
        assert len(wrong) <= number * share**2
        assert "while idle" not in command.text
