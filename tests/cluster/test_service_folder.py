"""The folder of a service whose instances outlive their supervisor, and what commands say of services in it."""

import stat
from pathlib import Path

import pytest

from triptych import exit_codes
from triptych.cli import main
from triptych.cluster.service_folder import RayPlace, ServiceFolder, ServiceState
from triptych.config import ServeConfig
from triptych.errors import ConfigError
from triptych.topology import Role, Topology

PLACE = RayPlace("10.0.0.1:6379", {Role.E: {"encoder": 1.0}})


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def state(topology: str = "2E1PD") -> ServiceState:
    config = ServeConfig(model=Path("/models/tiny")).having({"restart": "always", "max_num_seqs": 7, "port": 8123})
    return ServiceState(config, Topology.parse(topology), ("10.0.0.1:8001",), ("10.0.0.1:9001",))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == exit_codes.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_another_supervisor_finds_the_last_state() -> None:
    with ServiceFolder("tiny") as folder:
        folder.create(PLACE)
        secret = folder.secret_file.read_text()
        assert len(secret) == 64
        folder.save(state())
        folder.save(state("3E1PD"))
    with ServiceFolder("tiny") as folder:
        record = folder.open()
        assert (record.state, record.place) == (state("3E1PD"), PLACE)
        assert folder.secret_file.read_text() == secret


def test_only_the_owner_reads_it(state_home: Path) -> None:
    with ServiceFolder("tiny") as folder:
        folder.create(PLACE)
        folder.save(state())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder.path, *folder.path.iterdir()]}
        modes["secret"] = stat.S_IMODE(folder.secret_file.stat().st_mode)
    assert modes == {"tiny": 0o700, "record": 0o600, "lock": 0o600, "secret": 0o600}
    (state_home / "triptych/services/tiny/record").chmod(0o644)
    with ServiceFolder("tiny") as folder, pytest.raises(ConfigError, match="others can use it"):
        folder.open()


def test_one_supervisor_at_a_time() -> None:
    with ServiceFolder("tiny") as first, ServiceFolder("tiny") as second:
        first.create(PLACE)
        first.save(state())
        with pytest.raises(ConfigError, match=r"^the service tiny has a supervisor already: process \d+$"):
            second.open()
        assert not second.hold()
        first.release()
        assert second.open().state == state()


def test_a_name_is_given_once_until_the_service_has_ended() -> None:
    with ServiceFolder("tiny") as folder:
        folder.create(PLACE)
        folder.save(state())
    with ServiceFolder("tiny") as again:
        with pytest.raises(ConfigError, match="the service tiny exists: --attach tiny goes on with it"):
            again.create(PLACE)
        again.open()
        again.forget()
    assert not again.path.exists()
    with ServiceFolder("tiny") as third:
        third.create(PLACE)


@pytest.mark.parametrize("name", ["", "..", "../tiny", "a/b", ".hidden", "ä", "x" * 64, "a b"])
def test_names_that_would_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a service"):
        ServiceFolder(name)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x90", b"x" * 2**21])
def test_a_damaged_record_is_named(content: bytes) -> None:
    with ServiceFolder("tiny") as folder:
        folder.create(PLACE)
        folder.save(state())
        (folder.path / "record").write_bytes(content)
        with pytest.raises(ConfigError, match=r"record can't be read: "):
            folder.read()


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with ServiceFolder("other") as folder:
        folder.create(PLACE)
        folder.save(state())
        says = "no service tiny was started by this user on this machine with --detach; there are: other"
        assert says in refused(capsys, "serve", "--attach", "tiny")
        assert says in refused(capsys, "stop", "--name", "tiny")
        assert "the service other has a supervisor already" in refused(capsys, "serve", "--attach", "other")
    for words, named in (
        (["demo"], "MODEL"),
        (["--topology", "1EPD"], "--topology"),
        (["--max-num-seqs", "4"], "--max-num-seqs"),
    ):
        assert f"{named} is not for it" in refused(capsys, "serve", "--attach", "other", *words)
    assert "the service other is on the cluster 10.0.0.1:6379" in refused(
        capsys, "serve", "--attach", "other", "--on", "ray"
    )
    assert "--detach is for --on ray" in refused(capsys, "serve", "demo", "--detach")
    assert "--device cuda:1 names a GPU" in refused(capsys, "serve", "demo", "--on", "ray", "--device", "cuda:1")
