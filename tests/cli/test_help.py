"""What every command says of itself: --help at several widths, --version, and one line for what it can't parse."""

import argparse
import dataclasses
import re
import subprocess
import sys

import pytest

from tests.support.commands import actions, walked
from tests.support.exits import exit_code
from triptych import __version__
from triptych.cli import COMMANDS, make_parser
from triptych.cli.help_all import is_rare
from triptych.config import CONFIG_GROUPS, flag, public_fields

PRIVATE = re.compile(
    r"front.door|house|in hand|anew|so many|nobody|somebody|let in|\bkin\b|\b(in|the) line\b|signs of life|\btold?\b"
    r"|remember|they tell|says?\b",
    re.IGNORECASE,
)
"""Words of the code's own, which a reader of --help has never seen."""
UNITS = re.compile(
    r"seconds?|ms\b|days|MiB|GiB|10\^9|pixels|tokens|patches|sequences|requests|threads|processes|blocks|rows|port\b",
    re.ASCII,
)


PARSERS = list(walked(make_parser()))
EVERY_PARSER = pytest.mark.parametrize("parser", PARSERS, ids=[parser.prog for parser in PARSERS])


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What --help lists, but for itself and for commands."""
    listed = (one for one in actions(parser) if not isinstance(one, argparse._SubParsersAction))
    return [one for one in listed if one.help != argparse.SUPPRESS and one.dest not in ("help", "version")]


def test_the_walk_finds_every_command() -> None:
    found = {parser.prog for parser in PARSERS}
    assert {"triptych", *(f"triptych {name}" for name in COMMANDS)} < found
    assert {"triptych bench transfer", "triptych bench split"} < found


@EVERY_PARSER
@pytest.mark.parametrize("columns", [60, 200])
def test_help_is_rendered_at_any_width(
    parser: argparse.ArgumentParser, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert exit_code([*parser.prog.split()[1:], "--help-all" if any(map(is_rare, options(parser))) else "--help"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"usage: {parser.prog} ")
    assert max(map(len, said.out.splitlines())) <= columns
    flat = "".join(said.out.split())
    for one in options(parser):
        assert one.help
        assert "".join((one.help % vars(one)).split()) in flat


def test_help_of_serve_is_short_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for word in ("--help", "--help-all"):
        assert exit_code(["serve", word]) == 0
        seen.append(set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)))
    short, full = seen
    settings = {flag(item.name) for group in CONFIG_GROUPS for item in public_fields(group)}
    assert 15 <= len(short & settings) <= 25
    assert settings - full <= {"--ui"}, "listed with its opposite"
    assert {"--topology", "--port", "--max-model-len", "--help-all"} < short < full


@EVERY_PARSER
def test_help_is_in_plain_words(parser: argparse.ArgumentParser) -> None:
    groups = [group.title or "" for group in parser._action_groups]
    for text in (parser.description or "", *groups, *(one.help or "" for one in options(parser))):
        found = PRIVATE.search(text)
        assert found is None, f"{parser.prog}: {found and found[0]!r} in {text!r}"


@EVERY_PARSER
def test_help_names_defaults(parser: argparse.ArgumentParser) -> None:
    for one in options(parser):
        assert one.help, f"{parser.prog} {one.dest} has no help"
        takes_a_value = bool(one.option_strings) and one.nargs != 0 and not one.required
        if takes_a_value and "required for" not in one.help:
            assert "default" in one.help, f"{parser.prog} {one.option_strings[0]} doesn't say its default"


def test_numbers_have_units() -> None:
    settings = [item for config in CONFIG_GROUPS for item in dataclasses.fields(config)]
    numbers = [item for item in settings if type(item.default) in (int, float)]
    assert len(numbers) > 20
    for item in numbers:
        assert UNITS.search(item.metadata["help"]), f"{item.name}: {item.metadata['help']!r} has no unit"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "triptych: the COMMAND is missing: one of serve, chat, run"),
        (["fly"], "triptych: argument COMMAND: invalid choice: 'fly'"),
        (["ps"], "triptych: there is no command 'ps': use status --control HOST:PORT, or top"),
        (["--no-such-flag"], "triptych: there is no --no-such-flag"),
        (["run"], "triptych run: the following arguments are required: MODEL, FILE|QUESTION"),
        (["run", "demo"], "triptych run: the following arguments are required: FILE|QUESTION"),
        (["run", "demo", "Why?", "--max-tokens", "x"], "triptych run: argument --max-tokens: invalid int value: 'x'"),
        (["serve", "demo", "--port"], "triptych serve: argument --port: expected one argument"),
        (["serve", "demo", "-z"], "triptych serve: there is no -z "),
        (["serve", "demo", "--role", "E", "--topology", "1EPD"], "triptych serve: argument --topology: not allowed"),
        (["doctor"], "triptych doctor: the following arguments are required: MODEL"),
        (["status"], "triptych status: the following arguments are required: --control"),
        (["rollout"], "triptych rollout: the following arguments are required: --control"),
        (["rollout", "--control", "a:1", "--sett", "a=1"], "triptych rollout: there is no --sett; did you mean --set?"),
        (["trace"], "triptych trace: the following arguments are required: --log"),
        (["bench"], "triptych bench: the following arguments are required: BENCH"),
        (["bench", "fly"], "triptych bench: argument BENCH: invalid choice: 'fly'"),
        (["bench", "split"], "triptych bench split: the following arguments are required: MODEL, --report"),
        (["bench", "split", "demo"], "triptych bench split: the following arguments are required: --report"),
        (
            ["bench", "split", "demo", "--seconds", "x"],
            "triptych bench split: argument --seconds: invalid number value",
        ),
        (["bench", "transfer", "--fabric", "rdma"], "triptych bench transfer: argument --fabric: invalid choice"),
        (["chaos"], "triptych chaos: the following arguments are required: MODEL"),
        (["chaos", "demo", "--requests", "many"], "triptych chaos: argument --requests: invalid int value: 'many'"),
        (["bench", "transfer", "--quik"], "triptych bench transfer: there is no --quik; did you mean --quick?"),
    ],
)
def test_what_cannot_be_parsed_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert exit_code(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(says)
    assert line.endswith(" --help)")


def test_python_m_is_the_same_command() -> None:
    for arguments, expected in (
        (["--version"], f"triptych {__version__}\n"),
        (["status", "--help"], "usage: triptych status"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "triptych", *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(expected)
        assert done.stderr == ""


def test_a_command_loads_no_other() -> None:
    """The supervisor of a service starts with every service, and doesn't need the API."""
    program = "import sys; from triptych.cli import main; main(['serve', 'demo', '--role', 'x'])"
    check = "print(sorted({'fastapi', 'triptych.api', 'triptych.cli.bench', 'torch'} & set(sys.modules)))"
    code = f"import atexit, sys; atexit.register(lambda: {check}); {program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "--role x is not one of" in done.stderr
    assert done.stdout == "[]\n"
