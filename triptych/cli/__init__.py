"""The ``triptych`` command: one file per subcommand."""

import argparse
import logging
import sys
from typing import NoReturn

from triptych import __version__
from triptych.cli import bench, demo, doctor, run, serve, status, trace
from triptych.cli.flags import known_names
from triptych.cli.sources import unknown_flags
from triptych.errors import StartError

COMMANDS = {
    "serve": serve, "run": run, "demo": demo, "doctor": doctor, "status": status, "trace": trace, "bench": bench,
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage of a command with all settings fills several screens."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """The parser of the whole command line. A subparser sets ``run``, the function of its command, and ``parser``."""
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
        command.set_defaults(run=module.run, parser=command)
        module.add_arguments(command)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parses, runs, exits. An error that the operator can mend is one line, not a traceback."""
    parser = make_parser()
    try:
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            parsed.parser.error(unknown_flags(unknown, known_names()))
        if parsed.run is None:
            parser.error(f"the COMMAND is missing: one of {', '.join(COMMANDS)}")
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request
        code = parsed.run(parsed)
    except StartError as error:
        print(f"triptych: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
