"""How this program starts Python processes of its own: with the same ``triptych``, whatever the working directory has.

``python -m`` looks for modules in the working directory first. A ``random.py`` or a folder ``triptych`` there would be
imported, and run, by a process that was never meant to know them.
"""

import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "/"
"""Where child processes run. Paths that they are given are absolute."""
_ROOT = str(Path(__file__).resolve().parents[1])


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module, as ``python -m`` does, without the working directory on its path. Run it in
    ``FOLDER``, with ``environment()``."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, with a PYTHONPATH for its children: what the user gave, as absolute paths, and where
    ``triptych`` was imported from, unless it is installed. Empty entries, which stand for the working directory, are
    left out."""
    given = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    installed = _ROOT in (*site.getsitepackages(), site.getusersitepackages())
    path = given if installed or _ROOT in given else [_ROOT, *given]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


@contextmanager
def inherited() -> Iterator[None]:
    """Within it, processes that a library starts (``multiprocessing``) don't search the working directory either."""
    before = dict(os.environ)
    os.environ.update(environment(), PYTHONSAFEPATH="1")
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
