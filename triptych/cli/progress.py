"""Shows a change of a service's processes while it goes on."""

import sys
from collections.abc import Iterable

from triptych.messages.operations import ChangeProgress


def show(news: Iterable[ChangeProgress], kind: str, done: str) -> None:
    """Print each step once. ``kind`` names the change, and ``done`` is what becomes of a process."""
    before = ""
    try:
        for progress in news:
            counts = f"{progress.done} of {progress.total} {done}: " if progress.total else ""
            if (line := counts + progress.text) != before:
                before = line
                print(line, flush=True)
    except KeyboardInterrupt:
        if before:
            print(f"interrupted; the {kind} goes on: triptych status shows it", file=sys.stderr)
        raise
