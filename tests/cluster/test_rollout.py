"""``triptych rollout`` replaces all processes of a service under load, and no request fails."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.commands import FAST, Command, one_line_error, picture_answer, stream_of, triptych, wait_for
from tests.support.steady_load import answers, control_of, incarnations, loaded, status, whole_status
from triptych import exit_codes


@contextmanager
def rollout(service: Command, *arguments: str) -> Iterator[Command]:
    with triptych("rollout", "--control", control_of(service), *arguments) as command:
        yield command


def error_of(command: Command, code: int) -> str:
    """The message of a rollout that failed."""
    command.process.wait(240)
    return one_line_error(command, code)


def roll(service: Command, *arguments: str) -> str:
    """What a rollout that succeeds says."""
    with rollout(service, *arguments) as command:
        assert command.end(240) == 0, command.text + "\n" + service.text
        return command.text


def test_all_processes_are_replaced_under_load(folder: Path) -> None:
    with triptych("serve", folder, *FAST) as service:
        url = service.wait_until_ready()
        right, before = answers(url), incarnations(service)
        with loaded(url, right):
            text = roll(service, "--set", "max-num-seqs=5")
        after = incarnations(service)
        assert before.keys() == after.keys() == {"frontend", "e0", "pd0"}
        assert all(after[name] > before[name] for name in before)
        assert "0 of 3 replaced: starting the new e0" in text
        assert text.splitlines()[-1] == "all processes were replaced"
        assert answers(url) == right
        assert not any(one.restarts for one in status(service).launched)
        assert "Traceback" not in service.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "arguments"),
    [("2E1P1D", ()), ("2E1P1D", ("--no-surge",)), ("1EPD", ()), ("2E2PD", ("--no-surge",)), ("1E1P2D", ())],
)
def test_topologies_under_load(folder: Path, topology: str, arguments: tuple[str, ...]) -> None:
    with triptych("serve", folder, *FAST, "--topology", topology) as service:
        url = service.wait_until_ready()
        right, before = answers(url), incarnations(service)
        with loaded(url, right), suppress(StopIteration), stream_of(url, "tiny", 1000) as lines:
            text = roll(service, *arguments)
            assert list(lines)[-1] == "data: [DONE]", "an answer that has begun is finished"
        after = incarnations(service)
        assert before.keys() == after.keys()
        assert all(after[name] > before[name] for name in before)
        assert "all processes were replaced" in text
        assert "Traceback" not in service.text


@pytest.mark.slow
def test_two_frontends_are_replaced_one_after_the_other(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1EPD", "--frontends", "2") as service:
        url = service.wait_until_ready()
        right, before = answers(url), incarnations(service)
        with loaded(url, right):
            text = roll(service)
        after = incarnations(service)
        assert before.keys() == after.keys() == {"frontend0", "frontend1", "epd0"}
        assert all(after[name] > before[name] for name in before)
        assert text.index("1 of 3 replaced: draining the old frontend0") < text.index("2 of 3 replaced: ")
        assert "2 of 3 replaced: draining the old frontend1" in text
        assert answers(url) == right
        assert "Traceback" not in service.text


@pytest.mark.slow
def test_every_answer_is_of_one_revision(folder: Path, other_folder: Path) -> None:
    with triptych("serve", other_folder, *FAST, "--topology", "1EPD") as alone:
        new = answers(alone.wait_until_ready())
    with triptych("serve", folder, *FAST, "--topology", "1EPD") as service:
        url = service.wait_until_ready()
        old, before = answers(url), status(service)
        assert set(old).isdisjoint(new)
        with loaded(url, old, new):
            roll(service, "--model", str(other_folder))
        assert answers(url) == new
        after = whole_status(service)  # the new frontend is at the control address that the operator knows
        assert after.model != before.model
        assert {one.pid for one in after.instances}.isdisjoint(one.pid for one in before.instances)
        assert "Traceback" not in service.text


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "arguments"), [("1E1PD", ()), ("2E1P1D", ("--no-surge",))])
def test_revisions_there_and_back(folder: Path, other_folder: Path, topology: str, arguments: tuple[str, ...]) -> None:
    with triptych("serve", other_folder, *FAST, "--topology", topology) as alone:
        new = answers(alone.wait_until_ready())
    with triptych("serve", folder, *FAST, "--topology", topology) as service:
        url = service.wait_until_ready()
        old = answers(url)
        with loaded(url, old, new):
            roll(service, "--model", str(other_folder), *arguments)
        model = whole_status(service).model
        with loaded(url, new):
            roll(service, "--set", "max-num-seqs=6")
        assert whole_status(service).model == model
        with loaded(url, old, new):
            roll(service, "--model", str(folder), *arguments)
        assert answers(url) == old
        assert "Traceback" not in service.text


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
@pytest.mark.parametrize("to", ["same", "other", "back"])
def test_what_an_old_frontend_finishes_gets_instances_that_start_meanwhile(
    folder: Path, other_folder: Path, topology: str, to: str
) -> None:
    with triptych("serve", folder, *FAST, "--topology", topology) as service:
        url = service.wait_until_ready()
        if to == "back":  # the control address of the instances is no longer the operators'
            roll(service, "--model", str(other_folder))
        arguments = () if to == "same" else ("--model", str(other_folder if to == "other" else folder))
        with rollout(service, *arguments) as command:
            command.wait_for_line("starting the new frontend")
            instances = {one.name: one.pid for one in status(service).instances}
            with stream_of(url, "tiny", 3000) as lines:
                if to == "same":
                    command.wait_for_line("draining the old frontend")
                else:
                    command.wait_for_line("frontend takes over")
                for pid in instances.values():
                    os.kill(pid, signal.SIGKILL)
                assert list(lines)[-1] == "data: [DONE]"
            assert command.end(240) == 0, command.text + "\n" + service.text
        whole_status(service)
        assert "Traceback" not in service.text


def test_a_model_of_another_architecture_is_refused(service: Command, tmp_path: Path) -> None:
    before = incarnations(service)
    other = make_checkpoint(tmp_path / "other", moe=True)
    with rollout(service, "--model", str(other)) as command:
        assert "has the architecture" in error_of(command, exit_codes.CONFIG)
    assert incarnations(service) == before


@pytest.mark.slow
def test_a_revision_that_cannot_start_changes_nothing(service: Command, other_folder: Path) -> None:
    before, model = incarnations(service), status(service).model
    with rollout(service, "--model", str(other_folder), "--set", "tensor-parallel-size=3") as command:
        error = error_of(command, exit_codes.FAILED)
    assert "0 of 3 replaced: pd0: the new process ended too early: " in error
    assert error.endswith("; frontend, e0, pd0 stay as they were")
    assert incarnations(service) == before
    assert status(service).model == model
    assert picture_answer(service.wait_until_ready(), "tiny")


@pytest.mark.slow
def test_files_that_were_replaced_are_not_mixed_with_the_old_ones(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    """Without ``--model`` the new processes read the same folder, which now has another revision: downloaded files are
    renamed to the old ones' names. To write into a file that is mapped would change the model that runs."""
    served = Path(shutil.copytree(folder, tmp_path / "tiny"))
    with triptych("serve", served, *FAST, "--topology", "1EPD") as service:
        url = service.wait_until_ready()
        right, before = answers(url), incarnations(service)
        shutil.copyfile(other_folder / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").rename(served / "model.safetensors")
        with rollout(service) as command:
            error = error_of(command, exit_codes.FAILED)
        assert "0 of 2 replaced: epd0: the new process ended too early: " in error
        assert "it serves another model than this frontend: weights " in error
        assert error.endswith("; epd0 stays as it was")
        assert incarnations(service) == before
        assert answers(url) == right
        assert "Traceback" not in service.text


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Command]:
    with triptych("serve", folder, *FAST) as command:
        command.wait_until_ready()
        yield command
        assert "Traceback" not in command.text


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), pytest.param(("--no-surge",), marks=pytest.mark.slow)])
def test_a_replacement_that_cannot_start_leaves_the_old_one(service: Command, arguments: tuple[str, ...]) -> None:
    before = incarnations(service)
    # the heads can't be divided by three, which only the new process finds out
    with rollout(service, "--set", "tensor-parallel-size=3", *arguments) as command:
        error = error_of(command, exit_codes.FAILED)
    found = re.fullmatch(
        r"triptych: 1 of 3 replaced: pd0: the new process ended too early: instance pd0 \(process \d+\) ended with "
        r"exit code \d+: .+; pd0 stays as it was",
        error,
    )
    assert found, error
    after = incarnations(service)
    assert after["e0"] > before["e0"]
    assert after["frontend"] == before["frontend"]
    assert (after["pd0"] == before["pd0"]) is (not arguments)
    assert picture_answer(service.wait_until_ready(), "tiny")
    assert status(service).change == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "dtype=float16"), "--dtype can't change in a rollout: old and new instances couldn't exchange rows"),
        (("--set", "port=1"), "--port is no setting of instances"),
        (("--set", "max-num-seqs=0"), "--max-num-seqs 0 is too small"),
        (("--set", "tensor-parallel-size=P=2"), "names P, but the topology has E, PD"),
    ],
)
def test_what_is_refused_touches_nothing(service: Command, arguments: tuple[str, ...], says: str) -> None:
    before = incarnations(service)
    with rollout(service, *arguments) as command:
        error = error_of(command, exit_codes.CONFIG)
    assert error.startswith("triptych: the rollout is refused: ")
    assert says in error
    assert incarnations(service) == before


def test_one_rollout_at_a_time_and_status_shows_it(service: Command) -> None:
    with rollout(service) as first:
        first.wait_for_line("starting the new e0")
        with rollout(service) as second:
            assert "refused: a rollout is in progress: " in error_of(second, exit_codes.CONFIG)
        with triptych("status", "--control", control_of(service)) as shown:
            shown.wait_for_line("rollout in progress: ")
        assert first.end(240) == 0, first.text
    whole_status(service)


@pytest.mark.slow
def test_a_rollout_goes_on_without_its_operator(service: Command) -> None:
    before, seen = incarnations(service), len(service.lines)
    with rollout(service) as command:
        command.wait_for_line("starting the new e0")
        command.process.kill()
    wait_for(lambda: "the rollout has ended" in "\n".join(service.lines[seen:]), 240, service)
    assert "the rollout has ended: 3 of 3 replaced" in "\n".join(service.lines[seen:])
    assert all(incarnation > before[name] for name, incarnation in incarnations(service).items())


@pytest.mark.slow
def test_a_service_that_ends_during_a_rollout_ends_all_processes(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1EPD") as service:
        service.wait_until_ready()
        with rollout(service) as command:
            command.wait_for_line("the new epd0 is starting")
            time.sleep(0.5)
            service.wait_until_ready()
            service.send(signal.SIGTERM)
            assert service.end(30) == 0, service.text
            assert "the service is ending" in error_of(command, exit_codes.FAILED)
        assert "Traceback" not in service.text


@pytest.mark.slow
def test_instances_that_joined_by_themselves_are_not_rolled(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--role", "frontend") as frontend:
        frontend.wait_until_ready()
        with rollout(frontend) as command:
            assert "0 report to this frontend" in error_of(command, exit_codes.CONFIG)
