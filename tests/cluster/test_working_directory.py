"""A working directory with modules of its own: they are never run, and relative paths go on meaning what they did."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.commands import FAST, ROOT, picture_answer, triptych
from triptych import children

MARK = "import os\nos.close(os.open({marker!r}, os.O_CREAT | os.O_WRONLY))\nraise SystemExit('{name} was run')\n"
MODULES = (
    *("json.py", "logging.py", "pickle.py", "random.py", "sitecustomize.py", "socket.py", "torch.py"),
    *("triptych/__init__.py", "triptych/__main__.py"),
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules that would leave a file ``marker`` beside it."""
    folder = tmp_path / "hostile"
    for name in MODULES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MARK.format(marker=str(tmp_path / "marker"), name=name))
    return folder


def untouched(hostile: Path) -> bool:
    return not (hostile.parent / "marker").exists()


def test_no_process_of_a_service_runs_what_lies_there(folder: Path, hostile: Path) -> None:
    """Instances, a second rank, and both kinds of sandboxed workers; with paths relative to the working directory."""
    (hostile / "secret").write_text(secrets.token_hex())
    (hostile / "secret").chmod(0o600)
    (hostile / "settings.toml").write_text("request-log-file = 'requests.jsonl'\nenable-log-requests = true\n")
    model = os.path.relpath(folder, hostile)
    arguments = ("serve", model, *FAST, "--config", "settings.toml", "--cluster-secret-file", "secret")
    with triptych(*arguments, "--tensor-parallel-size", "2", folder=hostile) as command:
        url = command.wait_until_ready()
        assert picture_answer(url, "tiny")
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).status_code == 200
        processes = psutil.Process(command.process.pid).children(recursive=True)
        run = {module for process in processes for module in process.cmdline() if module.startswith("triptych")}
        assert {"triptych.server.instance_main", "triptych.server.rank_main", "triptych.sandbox.child"} <= run
        assert {process.cwd() for process in processes} == {children.FOLDER}
    assert untouched(hostile)
    assert len((hostile / "requests.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_nor_does_the_demo(hostile: Path) -> None:
    with triptych("demo", "--questions", "1", "--port", "0", "--threads", "1", folder=hostile) as command:
        assert command.end(60) == 0, command.text
        assert "1 of 1 answers are right" in command.text
    assert untouched(hostile)


@pytest.mark.slow
def test_nor_do_processes_that_measure(hostile: Path, tmp_path: Path) -> None:
    """Started by a script, as ``triptych bench`` is: its own folder comes first on the path, not the working one."""
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "if __name__ == '__main__':\n    from triptych.measure.transfer.ends import Pair\n    Pair('shm').close()\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, script], cwd=hostile, env=environment, check=True, timeout=60)
    assert untouched(hostile)


def test_children_are_given_the_same_package_and_the_users_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "found.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "mine", str(ROOT)]))
    assert children.environment()["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "mine"), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", ":mine:")
    assert children.environment()["PYTHONPATH"] == os.pathsep.join([str(ROOT), str(tmp_path / "mine")])
    done = subprocess.run(
        children.command("found"), env=children.environment(), cwd=children.FOLDER, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
