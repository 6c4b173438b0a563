"""How a sandboxed process is started: what it sees, and the socket that it answers on."""

import socket
import subprocess

import msgspec

from triptych import children
from triptych.observe.logs import for_child

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that sandboxed processes see: no keys, no settings."""


def start(module: str, spec: msgspec.Struct, name: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A process that runs ``module``, called ``name`` in the log, and the socket to it. Its arguments are ``spec`` and
    how it logs, as JSON, with the descriptor of its end of the socket in between. It ends when this end is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = children.command(module, msgspec.json.encode(spec).decode())
    environment = {name: value for name, value in children.environment().items() if name in _KEPT}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), msgspec.json.encode(for_child(name, f"{name}: ")).decode()],
            stdin=subprocess.DEVNULL,
            env=environment | threads,
            cwd=children.FOLDER,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C in a terminal is its parent's affair
        )
    return process, ours
