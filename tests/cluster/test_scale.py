"""``triptych scale`` adds and removes instances of a service under load, and no request fails."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.commands import FAST, Command, one_line_error, picture_answer, stream_of, triptych
from tests.support.scraping import scrape
from tests.support.steady_load import answers, control_of, incarnations, loaded, whole_status
from triptych import exit_codes
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import ConfigError
from triptych.topology import Role


def scale(service: Command, *counts: str) -> list[str]:
    """The lines of a scale operation that is complete."""
    with triptych("scale", "--control", control_of(service), *counts) as command:
        assert command.end(240) == 0, command.text + "\n" + service.text
        return command.text.splitlines()


def refusal(service: Command, code: int, *counts: str) -> str:
    with triptych("scale", "--control", control_of(service), *counts) as command:
        command.process.wait(240)
        return one_line_error(command, code).removeprefix("triptych: ")


def names(service: Command) -> set[str]:
    """The processes that are kept running, once all are ready."""
    found = whole_status(service)
    launched = {one.name for one in found.launched}
    assert {one.name for one in found.instances} == {name for name in launched if "frontend" not in name}
    return launched


def serving(url: str) -> dict[str, float]:
    with httpx.Client(base_url=url, trust_env=False) as client:
        found = scrape(client)
    roles = found.labels("num_instances", "role")
    return {role: found.total("num_instances", role=role, state="serving") for role in roles}


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own, whose files may be moved."""
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("scale") / "tiny"))


@pytest.fixture(scope="module")
def service(served: Path) -> Iterator[Command]:
    with triptych("serve", served, *FAST) as command:
        command.wait_until_ready()
        yield command
        assert "Traceback" not in command.text


def test_one_more_encode_instance_and_back_under_load(service: Command) -> None:
    url = service.wait_until_ready()
    right, before = answers(url), incarnations(service)
    with loaded(url, right, workers=0):
        up = scale(service, "E=2")
        assert names(service) == {"frontend", "e0", "e1", "pd0"}
        assert serving(url) == {"E": 2, "PD": 1}
        down = scale(service, "e=1")
    assert "0 of 1 added or removed: starting e1" in up
    assert "0 of 1 added or removed: draining e1" in down
    assert (up[-1], down[-1]) == ("now E=2", "now E=1")
    assert incarnations(service) == before, "the others are the same processes"
    assert serving(url) == {"E": 1, "PD": 1}


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (
            {Role.E: 0},
            "no instance would encode, and requests with media could not be answered: 1E1PD would become 1PD",
        ),
        ({Role.P: 1}, "topology '1E1PD1P' has no decode instance for its prefill instances"),
    ],
)
def test_what_is_refused_touches_nothing(service: Command, counts: dict[Role, int], says: str) -> None:
    before = incarnations(service)
    with (
        ControlClient(control_of(service), ClusterConfig()) as client,
        pytest.raises(ConfigError, match=r"^the scale operation is refused: ") as refused,
    ):
        list(client.scale(counts))
    assert says in str(refused.value)
    assert incarnations(service) == before


def test_an_instance_that_cannot_start_leaves_all_as_it_was(service: Command, served: Path) -> None:
    url, before = service.wait_until_ready(), incarnations(service)
    weights = served / "model.safetensors"
    weights.rename(served / "away")  # the processes that run have it mapped
    try:
        message = refusal(service, exit_codes.FAILED, "E=3")
    finally:
        (served / "away").rename(weights)
    found = re.fullmatch(
        r"0 of 2 added or removed: e1: it ended too early: instance e1 \(process \d+\) ended with exit code \d+: .+",
        message,
    )
    assert found, message
    assert incarnations(service) == before
    assert picture_answer(url, "tiny")


@pytest.mark.slow
def test_encode_from_one_to_three_and_back_with_a_rollout_between(folder: Path) -> None:
    with triptych("serve", folder, *FAST) as service:
        url = service.wait_until_ready()
        right = answers(url)
        with loaded(url, right):
            scale(service, "E=3", "PD=2")
            before = incarnations(service)
            assert before.keys() == {"frontend", "e0", "e1", "e2", "pd0", "pd1"}
            with triptych("rollout", "--control", control_of(service)) as rollout:
                rollout.wait_for_line("starting the new e0")
                assert "a rollout is in progress: " in refusal(service, exit_codes.CONFIG, "E=1")
                assert rollout.end(240) == 0, rollout.text
            after = incarnations(service)
            assert after.keys() == before.keys()
            assert all(after[name] > before[name] for name in before)
            # a client that reads nothing meanwhile would be taken for one that has gone
            with stream_of(url, "tiny", 1500) as lines, ThreadPoolExecutor(1) as pool:
                reading = pool.submit(list, lines)
                text = scale(service, "E=1", "PD=1")
                assert reading.result(60)[-1] == "data: [DONE]", "an answer that has begun is finished"
        assert text[-1] == "now E=1 PD=1"
        assert names(service) == {"frontend", "e0", "pd0"}
        assert answers(url) == right
        assert "Traceback" not in service.text


@pytest.mark.slow
def test_from_whole_instances_to_split_ones_and_back_under_load(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1EPD") as service:
        url = service.wait_until_ready()
        right = answers(url)
        with loaded(url, right):
            scale(service, "E=1", "P=1", "D=1", "EPD=0")
            assert names(service) == {"frontend", "e0", "p0", "d0"}
            scale(service, "EPD=1", "E=0", "P=0", "D=0")
        assert names(service) == {"frontend", "epd0"}
        assert answers(url) == right
        assert "Traceback" not in service.text
