"""The ``triptych`` command: one file per subcommand."""

import argparse
import logging
import os
import sys
from typing import NoReturn

from triptych import __version__, exit_codes
from triptych.cli import bench, chaos, demo, doctor, flags, quantize, rollout, run, serve, status, trace
from triptych.cli.sources import unknown_flags
from triptych.config import LOG_FORMATS, ObserveConfig
from triptych.errors import StartError
from triptych.observe import logs

COMMANDS = {
    "serve": serve, "run": run, "demo": demo, "doctor": doctor, "status": status, "rollout": rollout,
    "trace": trace, "quantize": quantize, "bench": bench,
    "chaos": chaos,
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line: the usage of a command with all settings fills several screens."""

    def error(self, message: str) -> NoReturn:
        self.exit(exit_codes.USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """Return the parser of the whole command line. A subparser sets ``run``, its command's function, and ``parser``."""
    parser = Parser(
        prog="triptych",
        description="Serves multimodal language models as encode, prefill and decode processes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triptych {__version__}")
    parser.set_defaults(run=None, parser=parser)
    # not required, so that an unknown flag is named before a missing command is
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        command.set_defaults(run=module.run, parser=command, command=name)
        module.add_arguments(command)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments, run the command and exit. An error that the operator can fix is one line."""
    parser = make_parser()
    try:
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            parsed.parser.error(unknown_flags(unknown, flags.known_names()))
        if parsed.run is None:
            parser.error(f"the COMMAND is missing: one of {', '.join(COMMANDS)}")
        _set_up_logs(parsed)
        code = parsed.run(parsed)
    except StartError as error:
        logs.fatal(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    sys.exit(code)


def _set_up_logs(parsed: argparse.Namespace) -> None:
    """Set up logs by the command's settings, if it has any. Raises ConfigError."""
    name = parsed.command
    if not hasattr(parsed, "log_format"):
        logs.set_up(logs.LogSettings(process=name))
        return
    # errors in the settings themselves should have the right format, too
    given = parsed.log_format or os.environ.get("TRIPTYCH_LOG_FORMAT", "")
    logs.set_up(logs.LogSettings(given if given in LOG_FORMATS else "text", process=name))
    observe = flags.settings(ObserveConfig, parsed)
    logs.set_up(logs.LogSettings(observe.log_format, logging.getLevelName(observe.log_level.upper()), name))
