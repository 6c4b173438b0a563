"""The garbage collector, kept away from what stays."""

import gc


def settle() -> None:
    """Called once a process has what it works with. A full collection walks through all that is there, which takes tens
    of milliseconds, with PyTorch more, and nobody is answered meanwhile: from now on it finds only what comes."""
    gc.collect()
    gc.freeze()
