"""What tests ask about processes that aren't theirs."""

import time
from pathlib import Path


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process has ended, reaped or not; waits for it."""
    end = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
