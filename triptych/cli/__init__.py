"""The ``triptych`` command: one file per subcommand."""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Collection

from triptych import __version__, exit_codes
from triptych.cli import flags
from triptych.cli.other_projects import COMMANDS_INSTEAD
from triptych.cli.parser import Parser
from triptych.config import LOG_FORMATS, ObserveConfig
from triptych.errors import StartError
from triptych.observe import logs

COMMANDS = {
    "serve": "serve a model: all processes of a topology, or one instance that joins a frontend",
    "chat": "talk to a model in turns, about pictures, videos and audio, too",
    "run": "ask one question about pictures, videos and audio, on the terminal",
    "pull": "download a model from the Hugging Face Hub, to serve it later",
    "demo": "serve the bundled model and ask it about the bundled pictures",
    "doctor": "check machine, model, fabrics and ports, and show what each role would load, without loading it",
    "top": "show a running service at work: stages, instances, queues, requests and what binds",
    "status": "show the instances of a running service, or change the role of one",
    "rollout": "replace all processes of a running service: new code, other settings or another revision of the model",
    "scale": "add instances to a running service, or drain and end some",
    "stop": "drain a running service, and end all its processes",
    "trace": "turn a request, or a window of time, of a request log into a file for ui.perfetto.dev",
    "quantize": "write a copy of a model with the decoder's weights in few bits, as a folder or in GGUF",
    "plan": "simulate topologies with a profile and a workload, and name the one to start",
    "bench": "measure transfers between processes, or one process beside split ones, on this machine",
    "profile": "measure what a model's work costs on this machine, for plans and simulations",
    "completion": "print a script by which a shell completes commands and flags",
    "chaos": "end, stop and drain processes of a service under load, and report what its clients saw",
}
"""Each command's summary. Its file is imported only when the command is given, because together they take long."""


def make_parser(complete: Collection[str] = tuple(COMMANDS)) -> Parser:
    """Return the parser of the whole command line, whose subparsers know the arguments of the commands in ``complete``.
    A complete subparser sets ``run``, its command's function, and ``parser``."""
    parser = Parser(
        prog="triptych",
        description="Serves multimodal language models as encode, prefill and decode processes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triptych {__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in complete:
            module = importlib.import_module(f"{__name__}.{name}")
            command.set_defaults(run=module.run, parser=command, command=name)
            module.add_arguments(command)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments, run the command and exit. An error that the operator can fix is one line."""
    _open_closed_streams()
    words = sys.argv[1:] if arguments is None else arguments
    # no flag before the command takes a value, so that the first of these words is the command
    parser = make_parser([word for word in words if word in COMMANDS][:1])
    if words and words[0] in COMMANDS_INSTEAD:
        parser.error(f"there is no command {words[0]!r}: {COMMANDS_INSTEAD[words[0]]}")
    try:
        parsed, unknown = parser.parse_known_args(words)
        if unknown:
            parsed.parser.error(f"unexpected argument {unknown[0]!r}")
        if parsed.run is None:
            parser.error(f"the COMMAND is missing: one of {', '.join(COMMANDS)}")
        parsed.words = words[1:]
        _set_up_logs(parsed)
        code = parsed.run(parsed)
    except StartError as error:
        logs.fatal(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open the null device as each standard stream that the caller has closed. Else Python has None in its place, and
    the next socket or file gets its number: what child processes and libraries write as errors would go there."""
    # as Python's own, standard error takes any text, such as the name of a file that isn't in UTF-8
    streams = ((0, "stdin", "r", "strict"), (1, "stdout", "w", "strict"), (2, "stderr", "w", "backslashreplace"))
    for number, name, mode, errors in streams:
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            stream = open(number, mode, encoding="utf-8", errors=errors)  # noqa: SIM115 - open until the process ends
            setattr(sys, name, stream)


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
