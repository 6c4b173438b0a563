"""The ``triptych`` command: one file per subcommand."""

import argparse
import logging
import sys

from triptych import __version__
from triptych.cli import bench, demo, doctor, run, serve, status, trace
from triptych.cli.flags import known_names
from triptych.cli.sources import unknown_flags
from triptych.errors import StartError

COMMANDS = {
    "serve": serve, "run": run, "demo": demo, "doctor": doctor, "status": status, "trace": trace, "bench": bench,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Parses, runs, exits. An error that the operator can mend is one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="triptych", description="Serves multimodal language models as encode, prefill and decode."
    )
    parser.add_argument("--version", action="version", version=f"triptych {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    try:
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.error(unknown_flags(unknown, known_names()))
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request
        code = parsed.run(parsed)
    except StartError as error:
        print(f"triptych: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
