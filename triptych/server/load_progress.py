"""Progress of loading a model: a bar on a terminal, and a log line every few seconds elsewhere."""

import contextlib
import logging
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from triptych.clock import Clock

if TYPE_CHECKING:  # few instances have a terminal
    from rich.progress import Progress

log = logging.getLogger(__name__)

LINE_INTERVAL = 2.0
"""Seconds between two lines."""


class LoadProgress:
    """Progress of loading ``total`` bytes. A context manager, which removes the bar at its end."""

    def __init__(self, total: int, clock: Clock) -> None:
        self._total = total
        self._clock = clock
        self._loaded = 0
        self._next_line = self._clock.monotonic() + LINE_INTERVAL
        self._bar: Progress | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "LoadProgress":
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = progress.TextColumn("loading"), progress.BarColumn(), progress.DownloadColumn(True)
            speed = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
            bar = progress.Progress(*columns, *speed, console=Console(stderr=True), transient=True)
            self._bar = self._stack.enter_context(bar)
            self._bar.add_task("loading", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more, which are about to be loaded."""
        self._loaded += num_bytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._loaded)
        elif self._loaded < self._total and (now := self._clock.monotonic()) >= self._next_line:
            self._next_line = now + LINE_INTERVAL
            log.info("loading: %.0f %% of %.2f GiB", 100 * self._loaded / self._total, self._total / 2**30)
