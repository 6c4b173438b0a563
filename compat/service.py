"""A Triptych service of its own process, for clients and suites."""

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_SECONDS = 600


@contextmanager
def serve(python: str, checkpoint: Path, log: Path, *flags: str) -> Iterator[str]:
    """Serve ``checkpoint`` with the interpreter ``python``. Yields the URL. Raises RuntimeError with the log."""
    command = [python, "-m", "triptych", "serve", str(checkpoint), "--topology", "1EPD", "--port", "0", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        yield _address(log, process)
    finally:
        process.terminate()
        process.wait(60)


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    """Wait until the service is ready; return its URL."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace")):
            try:
                with urllib.request.urlopen(f"{found[0]}/ready", timeout=5):
                    return found[0]
            except OSError:
                pass
        time.sleep(0.2)
    raise RuntimeError(f"the service isn't ready:\n{log.read_text(errors='replace')[-2000:]}")
