"""Spawning of sandboxed processes: their environment and the socket that they answer on."""

import socket
import subprocess
from contextlib import ExitStack

import msgspec

from triptych import children
from triptych.observe.logs import for_child

_ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("CC", "XDG_CACHE_HOME"),  # where kernels are, and how they are compiled
)
"""Environment variables that sandboxed processes inherit: no keys, no settings."""


def spawn(module: str, spec: msgspec.Struct, name: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process that runs ``module``, and return it with the parent's end of its socket.

    ``name`` identifies the process in the log. Its arguments are ``spec`` as JSON, the descriptor of its end of the
    socket, and its log settings as JSON. It exits when the parent's end of the socket is closed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = children.command(module, msgspec.json.encode(spec).decode())
    environment = {name: value for name, value in children.environment().items() if name in _ENVIRONMENT}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with theirs, ExitStack() as closing:
        closing.callback(ours.close)
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), msgspec.json.encode(for_child(name, f"{name}: ")).decode()],
            stdin=subprocess.DEVNULL,
            env=environment | threads,
            cwd=children.FOLDER,
            pass_fds=[theirs.fileno()],
            process_group=0,  # the parent handles Ctrl-C in a terminal
        )
        closing.pop_all()
    return process, ours
