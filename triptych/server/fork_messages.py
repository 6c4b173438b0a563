"""Messages between a supervisor and the process that forks its instances, in MessagePack."""

import msgspec

MAX_MESSAGE = 2**16
"""Bytes of the longest message."""


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Request to import what instances of a model do, before one is asked for. It has no answer."""

    model: str
    """Folder of the checkpoint."""


class ForkInstance(msgspec.Struct, frozen=True, tag=True):
    """Request for an instance. Its standard input and output come with the message, in this order."""

    name: str
    model: str
    """Folder of the checkpoint, whose family's code is imported first, unless it has been."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Answer to a ``ForkInstance``, in their order. A file descriptor of the process (pidfd_open(2)) comes with it."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """Answer to a ``ForkInstance`` for which the kernel has no process left."""

    errno: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """End of a process."""

    pid: int
    code: int
    """Negative for a signal."""


ToForkServer = Preload | ForkInstance
FromForkServer = Forked | NotForked | Exited
