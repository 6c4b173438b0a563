"""Libraries that a worker imports when an item needs them. Not in ``child``, which as a program is another module than
for those that import it."""

import importlib
import resource
import signal
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from triptych.heap import gc_paused

LIBRARY_BYTES = 16 * 2**30
"""Address space for libraries that are imported later. PyTorch with CUDA's may take most of it; little becomes
memory."""
on_import: ContextVar[Callable[[], None]] = ContextVar("on_import", default=lambda: None)
"""Called before and after an import by ``import_library``."""


def import_library(name: str) -> ModuleType:
    """Import a library. In a worker, neither the limit of its memory nor that of an item's time counts the import. Most
    items need none, so workers start without it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if name in sys.modules or soft == resource.RLIM_INFINITY:
        return importlib.import_module(name)
    before, report = address_space(), on_import.get()
    report()
    signal.setitimer(signal.ITIMER_REAL, 0)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        with gc_paused():
            return importlib.import_module(name)
    finally:
        soft += address_space() - before
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        report()


def address_space() -> int:
    """Return the bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
