"""``--help`` of a command with many settings lists those that most users need, and ``--help-all`` the others, too."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HINT = "--help-all shows all settings."


class HelpAll(argparse.Action):
    """Prints the help of all flags, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_full_help(), end="")
        parser.exit()


def make_rare(action: argparse.Action) -> None:
    """Let only ``--help-all`` list a flag."""
    action.is_rare = True  # type: ignore[attr-defined]  # argparse has no place for it


def is_rare(action: argparse.Action) -> bool:
    """Return whether only ``--help-all`` lists a flag."""
    return getattr(action, "is_rare", False)


@contextmanager
def hidden(actions: Iterable[argparse.Action]) -> Iterator[None]:
    """Hide flags from what argparse lists."""
    texts = [(action, action.help) for action in actions]
    for action, _ in texts:
        action.help = argparse.SUPPRESS
    try:
        yield
    finally:
        for action, text in texts:
            action.help = text
