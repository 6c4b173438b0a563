"""``triptych doctor`` finds what would keep a service from starting."""

import socket
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from triptych.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("doctor") / "tiny")


def examined(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, str]]:
    """The exit code, and each check's line."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]
    checks: dict[str, str] = {}
    last = ""
    for row in (row for row in rows if len(row) == 3):
        last = row[1] or last
        checks[last] = " ".join([checks.get(last, ""), row[0], row[2]]).strip()
    return int(str(ended.value.code)), checks


def test_a_machine_that_can_serve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = examined(capsys, folder, "--device", "cpu", "--port", "0")
    assert code == 0, checks
    assert {"cores", "memory", "device", "fabric shm", "--port", "--control-port", "open files"} <= checks.keys()
    assert all(line.startswith("ok") for line in checks.values())


def test_a_port_that_somebody_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, checks = examined(capsys, folder, "--port", str(port), "--device", "cpu")
    assert code == 1
    assert checks["--port"].startswith("wrong")
    assert checks["--control-port"].startswith("ok")


def test_a_device_and_a_secret_that_are_not_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = examined(
        capsys, folder, "--port", "0", "--device", "cuda:999", "--cluster-secret-file", str(tmp_path / "none")
    )
    assert code == 1
    assert checks["device"].startswith("wrong")
    assert "can't be read" in checks["cluster secret"]


def test_a_fabric_that_is_asked_for_must_be_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    arguments = (folder, "--port", "0", "--device", "cpu")
    assert examined(capsys, *arguments)[0] == 0, "auto does without"
    code, checks = examined(capsys, *arguments, "--fabric", "mooncake")
    assert code == 1
    assert checks["fabric mooncake"].startswith("wrong")
