"""Every example in the documents works as written, in a fresh environment outside the checkout."""

import subprocess
import venv
from pathlib import Path

import pytest

from tests.newcomer.conftest import Environment, checked, pip
from tests.support.commands import ROOT, running
from tests.support.doc_examples import DOCUMENTS, NOT_RUN, Reader, blocks, free_port


def test_help_and_version(installed: Environment, tmp_path: Path) -> None:
    """Of the program; ``tests/cli/test_worker_extra.py`` asks every command for help."""
    for words in (["triptych", "--help"], ["python", "-m", "triptych", "--help"], ["triptych", "--version"]):
        program = [str(installed.bin / words[0]), *words[1:]]
        done = subprocess.run(
            program, env=installed.variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout.startswith("usage: triptych" if words[-1] == "--help" else "triptych "), words


@pytest.mark.slow
def test_the_demo_beside_modules_of_the_users(installed: Environment, tmp_path: Path) -> None:
    """The working folder has modules with names that Python and Triptych use, too."""
    marker = tmp_path / "marker"
    folder = tmp_path / "project"
    (folder / "triptych").mkdir(parents=True)
    for name in ("random.py", "json.py", "triptych/__init__.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit(1)\n")
    demo = [str(installed.bin / "triptych"), "demo", "--questions", "1", "--port", "0"]
    with running(demo, folder, installed.variables) as command:
        assert command.end(120) == 0, command.text
        assert "1 of 1 answers are right" in command.text
    assert not marker.exists()


def test_the_readme_works(installed: Environment, tmp_path: Path) -> None:
    """All examples that are quick."""
    reader = Reader(installed, tmp_path, patient=False)
    for block in blocks("README.md"):
        reader.run(block)
    assert {"chat", "serve", "doctor", "status", "top"} <= {line.split()[1] for line in reader.ran}


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_document_works(document: str, installed: Environment, tmp_path: Path) -> None:
    reader = Reader(installed, tmp_path, patient=True)
    for block in blocks(document):
        reader.run(block)


def test_ports_of_examples_stay_reserved() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= free_port() <= last for _ in range(20))


def test_examples_that_are_not_run_still_exist() -> None:
    text = "\n".join((ROOT / document).read_text() for document in DOCUMENTS)
    for beginning in NOT_RUN:
        assert f"\n{beginning}" in text, f"no block begins with {beginning!r} any more"


@pytest.mark.slow
def test_an_environment_without_shared_packages(wheel: Path, tmp_path: Path) -> None:
    """Installs all dependencies, as for any user."""
    venv.create(tmp_path / "environment", with_pip=True)
    environment = Environment(tmp_path / "environment" / "bin")
    pip("--python", str(environment.bin / "python"), "install", "--quiet", str(wheel))
    checked(environment, tmp_path)
    demo = [str(environment.bin / "triptych"), "demo", "--port", "0"]
    (tmp_path / "empty").mkdir()
    with running(demo, tmp_path / "empty", environment.variables) as command:
        assert command.end(180) == 0, command.text
        assert "5 of 5 answers are right" in command.text
