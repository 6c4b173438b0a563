"""Shows a change of a service's processes while it goes on."""

import sys
from collections.abc import Iterable

from triptych.messages.operations import ChangeProgress, StartChange, StopService


def show(news: Iterable[ChangeProgress], change: type[StartChange] | type[StopService]) -> None:
    """Print each step of a change once."""
    before = ""
    try:
        for progress in news:
            counts = f"{progress.done} of {progress.total} {change.outcome}: " if progress.total else ""
            if (line := counts + progress.text) != before:
                before = line
                print(line, flush=True)
    except KeyboardInterrupt:
        if before:
            print(f"interrupted; the {change.kind} goes on: triptych status shows it", file=sys.stderr)
        raise
