"""``triptych scale`` and ``triptych rollout`` on the nodes of a Ray cluster."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import FAST, Command, one_line_error, picture_answer, triptych, wait_for
from tests.support.on_ray import NODE, control_flags, is_whole, pid_of, status
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.steady_load import answers, loaded
from triptych import exit_codes

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")

IMPATIENT = ("--start-timeout", "60", "--drain-timeout", "2")
"""So that what can't be placed is given up soon."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster([NODE] * 4) as cluster:
        yield cluster


def change(service: Command, *words: str) -> list[str]:
    with triptych(words[0], *control_flags(service), *words[1:]) as command:
        assert command.end(240) == 0, command.text + "\n" + service.text
        return command.text.splitlines()


def incarnations(service: Command) -> dict[str, int]:
    wait_for(lambda: is_whole(service), 60, service)
    return {one.name: one.incarnation for one in status(service).launched}


@pytest.mark.slow
def test_instances_are_added_replaced_and_removed_under_load(cluster: RayCluster, folder: Path) -> None:
    with triptych("serve", folder, "--on", f"ray://{cluster.address}", *FAST) as service:
        url = service.wait_until_ready()
        right = answers(url)
        with loaded(url, right, workers=1):
            assert change(service, "scale", "E=2")[-1] == "now E=2"
            before = incarnations(service)
            assert before.keys() == {"frontend", "e0", "e1", "pd0"}
            assert len({cluster.raylet_of(pid_of(service, name)) for name in ("e0", "e1", "pd0")}) == 3
            change(service, "rollout")
            after = incarnations(service)
            assert after.keys() == before.keys()
            assert all(after[name] > before[name] for name in before)
            assert change(service, "scale", "E=1")[-1] == "now E=1"
        assert answers(url) == right
        with triptych("stop", *control_flags(service)) as stop:
            assert stop.end(60) == 0, stop.text
        assert service.end() == 0, service.text
        assert "Traceback" not in service.text


@pytest.mark.slow
def test_what_has_no_room_is_named_and_given_up(cluster: RayCluster, folder: Path) -> None:
    with triptych("serve", folder, "--on", f"ray://{cluster.address}", *FAST, *IMPATIENT) as service:
        url = service.wait_until_ready()
        before = incarnations(service)
        with triptych("scale", *control_flags(service), "E=4") as scale:
            scale.wait_for_line(
                "2 of 3 added or removed: e3 is starting: it asks for 1 CPU; free on all nodes: nothing"
            )
            wait_for(
                lambda: status(service).launched[-1].pending == "it asks for 1 CPU; free on all nodes: nothing",
                10,
                scale,
            )
            scale.process.wait(240)
            message = one_line_error(scale, exit_codes.FAILED)
        assert "2 of 3 added or removed: e3: not within" in message
        assert "it asks for 1 CPU; free on all nodes: nothing" in message
        assert incarnations(service).keys() == before.keys() | {"e1", "e2"}
        assert picture_answer(url, "tiny")
        with triptych("stop", *control_flags(service)) as stop:  # or its actors keep the nodes for a while
            assert stop.end(60) == 0, stop.text
        assert service.end() == 0, service.text


@pytest.mark.slow
def test_another_revision_of_the_model_is_rolled_out_under_load(
    cluster: RayCluster, folder: Path, other_folder: Path
) -> None:
    with triptych("serve", other_folder, *FAST, "--topology", "1EPD") as alone:
        new = answers(alone.wait_until_ready())
    with triptych("serve", folder, "--on", f"ray://{cluster.address}", *FAST) as service:
        url = service.wait_until_ready()
        old, before = answers(url), status(service).model
        assert set(old).isdisjoint(new)
        with loaded(url, old, new, workers=1):
            change(service, "rollout", "--model", str(other_folder))
        assert answers(url) == new
        wait_for(lambda: is_whole(service), 60, service)
        assert status(service).model != before
        killed = pid_of(service, "e0")
        psutil.Process(killed).kill()
        service.wait_for_line(rf"instance e0 \(process {killed} on \S+\) was killed by SIGKILL; starting again")
        wait_for(lambda: is_whole(service), 60, service)
        assert answers(url) == new
        assert "Traceback" not in service.text
