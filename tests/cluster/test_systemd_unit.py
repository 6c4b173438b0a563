"""The unit file: what it says must be what the program does, and what systemd knows. systemd itself isn't run."""

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from triptych import exit_codes
from triptych.cli import make_parser
from triptych.config import LeaseConfig

UNIT = ROOT / "deploy" / "systemd" / "triptych.service"


def test_the_unit_fits_the_program() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/triptych")
    parsed, unknown = make_parser().parse_known_args(arguments)
    assert (parsed.command, unknown) == ("serve", [])
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == exit_codes.PERMANENT
    assert float(service["TimeoutStopSec"]) == LeaseConfig().drain_timeout + 15
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")


MISTAKES = [
    ("Type=notify", "Type=notified", "Failed to parse service type"),
    ("WatchdogSec=30", "WatchdogSec=soon", "Failed to parse sec value"),
    ("RestartPreventExitStatus=", "RestartPreventedExitStatus=", "Unknown key"),
    ("WantedBy=", "WantedTo=", "Unknown key"),
]


def complaints(text: str, folder: Path) -> str:
    """What systemd says about a unit file, but for the program's place, which is this one's."""
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze: apt-get install systemd")
    unit = folder / UNIT.name
    unit.write_text(text.replace("/opt/triptych/bin/triptych", sys.executable))
    result = subprocess.run(
        [program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=30
    )
    return result.stdout + result.stderr


def test_systemd_knows_all_of_the_unit(tmp_path: Path) -> None:
    assert complaints(UNIT.read_text(), tmp_path) == ""


@pytest.mark.parametrize(("right", "wrong", "problem"), MISTAKES)
def test_systemd_finds_a_mistake(right: str, wrong: str, problem: str, tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert text.count(right) == 1
    assert problem in complaints(text.replace(right, wrong), tmp_path)
