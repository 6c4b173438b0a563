"""What an actor does with the instance that it is given, without Ray's cluster."""

import asyncio
import os
import stat
import threading
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")

import ray

import triptych
from triptych import exit_codes
from triptych.cluster.child import Child, ChildSpec, Print, SpawnedProcess
from triptych.cluster.launcher import LocalLauncher
from triptych.cluster.on_ray import actor
from triptych.cluster.on_ray.actor import KEPT_LINES, HostActor, HostedInstance, unfit_for
from triptych.cluster.on_ray.messages import News, PlacedInstance
from triptych.config import InstanceSpec
from triptych.messages.identity import ModelIdentity
from triptych.models.registry import identity_of
from triptych.topology import Role

NODE = "10.0.0.2"
SECRET = b"a secret of the cluster"


@dataclass
class ShellLauncher(LocalLauncher):
    """Starts a shell's script instead of an instance, and notes the secret's file as it was then."""

    script: str
    secrets: list[Path] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)

    async def start(self, spec: ChildSpec, incarnation: int, show: Print) -> Child:
        secret = Path(InstanceSpec.from_bytes(spec.written(incarnation)).cluster.cluster_secret_file)
        self.secrets.append(secret)
        self.modes += [stat.S_IMODE(os.stat(one).st_mode) for one in (secret, secret.parent)]
        self.contents.append(secret.read_bytes())
        process = await asyncio.create_subprocess_exec("sh", "-c", self.script, stdout=PIPE, process_group=0)
        assert process.stdout is not None
        return Child(spec, SpawnedProcess(process), process.stdout, show)


def placed(folder: Path, version: str = triptych.__version__, model: ModelIdentity | None = None) -> PlacedInstance:
    spec = InstanceSpec(model=str(folder), role=Role.PD, name="pd0", join="127.0.0.1:1", incarnation=7)
    return PlacedInstance(spec.to_bytes(), SECRET, version, model or identity_of(folder))


def run(task: PlacedInstance, launcher: LocalLauncher) -> HostedInstance:
    """Return an instance that has ended."""
    hosted = HostedInstance(task, NODE)
    asyncio.run(hosted.run(launcher))
    return hosted


def told(hosted: HostedInstance) -> tuple[list[str], News]:
    """Return all lines that a supervisor gets, without their times, and what it hears last."""
    lines: list[str] = []
    news = hosted.news(0, 0)
    while True:
        lines += [line.rpartition(" ")[2] for line in news.lines]
        if news.ended:
            return lines, news
        news = hosted.news(news.seen, news.pid)


def test_nothing_is_started_where_another_version_is_installed(folder: Path) -> None:
    launcher = ShellLauncher("true")
    _, news = told(run(placed(folder, version="0.0.1"), launcher))
    assert news.code == exit_codes.CONFIG
    assert f"Triptych {triptych.__version__} is installed, and the service has 0.0.1" in news.last_line
    assert NODE in news.last_line
    assert launcher.secrets == []


def test_the_secret_is_in_a_file_of_its_owner_alone_while_the_instance_runs(folder: Path) -> None:
    launcher = ShellLauncher("exit 3")
    _, news = told(run(placed(folder), launcher))
    assert news.code == 3
    assert launcher.modes == [0o600, 0o700]
    assert launcher.contents == [SECRET]
    assert not launcher.secrets[0].parent.exists()


def test_all_lines_arrive_also_equal_ones(folder: Path) -> None:
    lines, news = told(run(placed(folder), ShellLauncher("yes equal | head -n 1000; exit 1")))
    assert lines == ["equal"] * 1000
    assert (news.code, news.last_line) == (1, "equal")


def test_the_oldest_of_too_many_lines_are_dropped_for_a_supervisor_that_does_not_ask(folder: Path) -> None:
    number = KEPT_LINES + 1000
    lines, news = told(run(placed(folder), ShellLauncher(f"seq {number}")))
    assert lines == [str(one) for one in range(1001, number + 1)]
    assert news.seen == number


def test_an_actor_does_not_end_while_its_node_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing a checkpoint takes longer than an actor lives without a question."""
    ended, while_checked = threading.Event(), list[bool]()

    def check(*_: object) -> None:
        monkeypatch.setattr(actor, "REMEMBERED_SECONDS", 0.0)
        while_checked.append(ended.wait(0.2))

    def end(_: int) -> None:
        ended.set()
        threading.Event().wait()  # it doesn't return

    monkeypatch.setattr(actor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(actor, "_check", check)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(LocalLauncher, "prepare", lambda *_: None)  # nothing is started
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: NODE)
    assert HostActor(msgspec.msgpack.encode(placed(folder))).unfit() == ""
    assert while_checked == [False]
    assert ended.wait(10), "nothing asks for it"


def test_a_node_is_fit_only_with_the_version_and_the_model_of_the_service(folder: Path, other_folder: Path) -> None:
    assert unfit_for(placed(folder)) == ""
    assert unfit_for(placed(folder, version="0.0.1")) == (
        f"Triptych {triptych.__version__} is installed, and the service has 0.0.1"
    )
    other = unfit_for(placed(folder, model=identity_of(other_folder)))
    assert other.startswith(f"{folder} is another model than the service's: weights ")
    assert "no/such" in unfit_for(placed(folder / "no" / "such", model=ModelIdentity()))
