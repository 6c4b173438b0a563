"""Command line and environment for Python child processes, so that they import this ``triptych`` and nothing else.

``python -m`` searches the working directory first. A ``random.py`` or a folder ``triptych`` there would be imported and
run by the child process.
"""

import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "/"
"""Working directory of child processes. Paths passed to them are absolute."""
_ROOT = str(Path(__file__).resolve().parents[1])


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module, as ``python -m`` does, without the working directory on its path. Run
    it in ``FOLDER``, with ``environment()``."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment with a PYTHONPATH for child processes. It has the user's entries as absolute
    paths and, unless ``triptych`` is installed, the folder it was imported from. Empty entries, which mean the working
    directory, are dropped."""
    given = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    installed = _ROOT in (*site.getsitepackages(), site.getusersitepackages())
    path = given if installed or _ROOT in given else [_ROOT, *given]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


@contextmanager
def inherited() -> Iterator[None]:
    """Apply ``environment()`` to processes that a library starts (``multiprocessing``), which then don't search the
    working directory either."""
    before = dict(os.environ)
    os.environ.update(environment(), PYTHONSAFEPATH="1")
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
