"""A file that lines are appended to while a service runs, whatever becomes of the disk."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

from triptych.errors import StartError

log = logging.getLogger(__name__)

LOG_INTERVAL = 10.0
"""Seconds between log lines about lines that can't be written; there may be thousands of them."""


class LineFile:
    """Appends lines to a file, or writes them to standard output. Those that can't be written, because the disk is
    full, are dropped and counted."""

    def __init__(self, path: str, flag: str) -> None:
        """An empty ``path`` is standard output. ``flag`` names it in messages. Raises StartError for a file that can't
        be written."""
        self._flag = flag
        self._owns = bool(path)
        try:
            # without a buffer, which would keep what can't be written
            self._file: BinaryIO = open(path, "ab", buffering=0) if path else sys.stdout.buffer  # noqa: SIM115 - closed by close
        except OSError as error:
            raise StartError(f"{flag} {path}: {error.strerror}") from None
        self._is_torn = self._owns and _is_torn(path)
        self._num_dropped = 0
        self._report_at = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written to the file, by anyone."""
        return self._owns and self._file.tell() == 0

    def write(self, line: bytes) -> None:
        """Append a line, which ends as lines do."""
        try:
            self._write(line)
        except OSError as error:
            self._dropped(error)

    def close(self) -> None:
        if self._owns:
            self._file.close()

    def _write(self, line: bytes) -> None:
        """Write a line. Raises OSError if the disk is full, also in the middle of the line."""
        if self._is_torn:
            line = b"\n" + line
        written = self._file.write(line)
        self._file.flush()
        self._is_torn = written < len(line) and (written > 0 or self._is_torn)
        if written < len(line):
            raise OSError(0, "only a part of a line could be written")

    def _dropped(self, error: OSError) -> None:
        self._num_dropped += 1
        if (now := time.monotonic()) >= self._report_at:
            self._report_at = now + LOG_INTERVAL
            log.error("%d lines of %s couldn't be written: %s", self._num_dropped, self._flag, error.strerror)
            self._num_dropped = 0


def _is_torn(path: str) -> bool:
    """Return whether a file ends in the middle of a line, as one does whose writer was killed. One that can't be read
    doesn't."""
    try:
        if not Path(path).is_file():
            return False  # reading a pipe would wait
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
