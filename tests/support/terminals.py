"""A terminal on which a command runs, and what it shows there."""

import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.commands import KEPT, ROOT

HOME = b"\x1b[H"
"""Begins each drawing."""
ALTERNATE, BACK = b"\x1b[?1049h", b"\x1b[?1049l"
"""Switch to a screen of the command's own, and back."""
SHELL = """
import fcntl, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
job = subprocess.Popen(sys.argv[1:], process_group=0)
signal.signal(signal.SIGTERM, lambda *_: job.terminate())
sys.exit(job.wait())
"""
"""Runs a command in the background of its terminal, as a shell does; SIGTERM ends the command."""


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    descriptor: int
    written: bytearray = field(default_factory=bytearray)

    @property
    def screen(self) -> str:
        """The last complete drawing."""
        drawings = bytes(self.written).split(HOME)
        return drawings[-2].decode(errors="replace") if len(drawings) > 2 else ""

    def wait_for(self, condition: Callable[[str], bool], seconds: float = 30.0) -> None:
        """Waits until a drawing meets the condition."""
        deadline = time.monotonic() + seconds
        while not condition(self.screen):
            assert self.process.poll() is None, bytes(self.written)
            assert time.monotonic() < deadline, bytes(self.written)
            time.sleep(0.02)

    def press(self, key: str) -> None:
        os.write(self.descriptor, key.encode())


def closing(closed: str, *words: str) -> list[str]:
    """A command that runs ``words`` with some standard streams closed, such as ``<&- 2>&-``."""
    return ["bash", "-c", f'exec "$@" {closed}', "bash", *words]


@contextmanager
def on_a_terminal(
    *arguments: str, columns: int = 80, lines: int = 24, background: bool = False, closed: str = ""
) -> Iterator[Terminal]:
    """Runs ``triptych`` with these arguments on a terminal of its own, or in the background of one, with some standard
    streams ``closed``. In the end the terminal must be as before."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (lines, columns))
    before = termios.tcgetattr(theirs)
    words = closing(closed, sys.executable, "-m", "triptych", *arguments)
    process = subprocess.Popen(
        [sys.executable, "-c", SHELL, *words] if background else words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        start_new_session=background,
        env={"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "LANG": "C.UTF-8"} | KEPT,
    )
    terminal = Terminal(process, ours)

    def collect() -> None:
        while True:
            try:
                terminal.written += os.read(ours, 65536)
            except OSError:  # the other end is closed everywhere
                return

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    try:
        yield terminal
        process.wait(20)
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait(10)
        os.close(theirs)
        reader.join(10)
        os.close(ours)
    assert terminal.written.count(ALTERNATE) == terminal.written.count(BACK)
