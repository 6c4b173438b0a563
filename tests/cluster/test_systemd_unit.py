"""The unit file: what it says must be what the program does. systemd itself isn't run."""

import configparser
import shlex

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
