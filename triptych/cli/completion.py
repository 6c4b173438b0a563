"""``triptych completion``: prints a script by which a shell completes commands, flags and their values."""

import argparse
import shlex
from collections.abc import Iterator

from triptych.cli import flags

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_triptych() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words="" command="" each longer
    COMPREPLY=()
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        longer="${{command:+$command,}}$each"
        case " {commands} " in *" $longer "*) command="$longer" ;; *) break ;; esac
    done
    case "$command $before" in
{values}
    *) case "$command" in
{words}
    esac
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _triptych triptych
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> int:
    from triptych.cli import make_parser  # here, because that module imports all others

    parsers = dict(_walked(make_parser(), ()))
    if arguments.shell == "fish":
        print("\n".join(_fish(parsers)))
    else:
        zsh = "autoload -U +X bashcompinit && bashcompinit\n" if arguments.shell == "zsh" else ""
        print(zsh + _bash(parsers), end="")
    return 0


Parsers = dict[tuple[str, ...], argparse.ArgumentParser]
"""Each parser by the commands that lead to it."""


def _walked(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield path, parser
    for name, below in _commands(parser).items():
        yield from _walked(below, (*path, name))


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next((action.choices for action in found), {}))


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.Action, list[str]]]:
    """Yield each flag that ``--help`` lists, and the values that it has, if those are few."""
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield action, [*map(str, action.choices or flags.values_of(action))]


def _bash(parsers: Parsers) -> str:
    values, words = [], []
    for path, parser in parsers.items():
        for action, possible in _options(parser):
            if possible:
                cases = "|".join(f'"{",".join(path)} {option}"' for option in action.option_strings)
                values.append(f"    {cases}) words={shlex.quote(' '.join(possible))} ;;")
        known = [*_commands(parser), *(option for action, _ in _options(parser) for option in action.option_strings)]
        words.append(f'    "{",".join(path)}") words={shlex.quote(" ".join(known))} ;;')
    commands = " ".join(",".join(path) for path in parsers if path)
    return _BASH.format(commands=commands, values="\n".join(values), words="\n".join(words))


def _fish(parsers: Parsers) -> Iterator[str]:
    for path, parser in parsers.items():
        seen = " && ".join(f"__fish_seen_subcommand_from {name}" for name in path) or "__fish_use_subcommand"
        begin = f"complete -c triptych -n {shlex.quote(seen)}"
        for name, below in _commands(parser).items():
            yield f"{begin} -f -a {name} -d {shlex.quote(below.description or '')}"
        for action, possible in _options(parser):
            spelled = " ".join(
                f"-l {option[2:]}" if option.startswith("--") else f"-o {option[1:]}"
                for option in action.option_strings
            )
            takes = f" -x -a {shlex.quote(' '.join(possible))}" if possible else "" if action.nargs == 0 else " -r"
            meaning = ((action.help or "") % vars(action)).partition(" (default")[0].partition(";")[0]
            yield f"{begin} {spelled}{takes} -d {shlex.quote(meaning)}"
