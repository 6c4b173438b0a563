"""The garbage collector, kept away from what stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """For as long as a process has what it works with. A full collection walks through all that is there, which takes
    tens of milliseconds, with PyTorch more, and nobody is answered meanwhile: within this it finds only what comes."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
