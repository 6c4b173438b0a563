"""The parser of command lines, whose errors are short and say what to do."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from triptych import exit_codes
from triptych.cli.flags import fits
from triptych.cli.help_all import HINT, hidden, is_rare
from triptych.cli.sources import as_flag
from triptych.cli.spelling import instead

_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)", re.ASCII)


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line: the usage of a command with all settings fills several screens.

    Unknown flags are named first, all of them, with what to do instead. ``--max_num_seqs`` is ``--max-num-seqs``."""

    def format_help(self) -> str:
        """Return the help of the flags that most users need, and say how to see the others."""
        if not any(map(is_rare, self._actions)):
            return super().format_help()
        with hidden(filter(is_rare, self._actions)):
            return f"{super().format_help()}\n{HINT}\n"

    def format_full_help(self) -> str:
        """Return the help of all flags."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(exit_codes.USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]  # argparse's overloads are for other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = [_with_hyphens(word) for word in (sys.argv[1:] if args is None else args)]
        if wrong := list(self._unknown(words)):
            self.error("; ".join(wrong))
        return super().parse_known_args(words, namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return no flag that a word may be the beginning of: ``-t4`` and ``-hf`` aren't ``-t`` and ``-h``."""
        return []

    def _unknown(self, words: Sequence[str]) -> Iterator[str]:
        """Yield an error message for each flag that this parser doesn't have. A command has its own."""
        options = self._option_string_actions
        for word, following in zip(words, [*words[1:], "--"], strict=False):
            if word == "--" or (self._subparsers and not word.startswith("-")):
                return
            given, is_joined, joined = word.partition("=")
            if not _is_flag(word) or given in options:
                continue
            value = joined if is_joined else None if _is_flag(following) else following
            known = {
                _name(option): fits(action) for option, action in options.items() if action.nargs != 0 or not is_joined
            }
            yield f"there is no {given}{instead(_name(given), value, known, as_flag)}"


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _is_flag(word: str) -> bool:
    """Return whether argparse takes a word for a flag: not a text with spaces, nor a negative number."""
    return word.startswith("-") and word != "-" and " " not in word and not _NUMBER.fullmatch(word)


def _with_hyphens(word: str) -> str:
    name, is_joined, value = word.partition("=")
    return name.replace("_", "-") + is_joined + value if word.startswith("--") and _is_flag(word) else word
