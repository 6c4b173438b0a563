"""Small disks that this process and the ones it starts see, and no other."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

SMALL_DISK = 2**25
"""Its size in bytes."""
_NEW_NAMESPACE = 0x20000
_RECURSIVE, _PRIVATE = 0x4000, 0x40000
_DETACH = 2


@contextlib.contextmanager
def small_disks(*folders: Path) -> Iterator[str]:
    """Put an empty disk over each of these folders, for this process and those that it starts. Must be entered by the
    thread that starts them, before it has started any other. Yields why it can't be done; empty if it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid():
        yield "only root can mount"
        return
    if libc.unshare(_NEW_NAMESPACE) or libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None):
        yield f"a namespace of mounts: {os.strerror(ctypes.get_errno())}"
        return
    mounted: list[Path] = []
    try:
        for folder in folders:
            if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={SMALL_DISK}".encode()):
                yield f"a small disk at {folder}: {os.strerror(ctypes.get_errno())}"
                return
            mounted.append(folder)
        yield ""
    finally:
        for folder in mounted:
            libc.umount2(os.fsencode(folder), _DETACH)
