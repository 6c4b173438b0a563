"""Starts and asks the process that speaks to a pool; every call has a deadline."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from triptych import children
from triptych.clock import Clock
from triptych.config.pool import PoolAddress
from triptych.encode.pool_protocol import Data, PoolReply, PoolRequest, receive, send
from triptych.errors import BadMessage, HelperFailed

NO_SPACE = -200
"""Mooncake's code for a pool without room."""
_QUIET = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3", "MC_FORCE_TCP": "1"}


@dataclass(eq=False)
class PoolProcess:
    """A process that is connected to a pool, or connects."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    clock: Clock

    @classmethod
    def start(cls, pool: PoolAddress, host: str, clock: Clock) -> "PoolProcess":
        """Start a process; ``host`` is the address at which others reach this machine. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    children.command(
                        "triptych.encode.pool_helper", str(theirs.fileno()), host, pool.master, str(pool.lent_bytes)
                    ),
                    cwd=children.FOLDER,
                    env=_QUIET | children.environment(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if "MC_LOG_LEVEL" in os.environ else subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        return cls(process, ours, clock)

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until it is connected. Raises HelperFailed if it isn't then."""
        reply, _ = self._receive(self.clock.now() + seconds)
        if reply.code:
            raise HelperFailed(f"it can't connect: Mooncake's error {reply.code}")

    def call(
        self, request: PoolRequest, seconds: float, values: Sequence[Data] = ()
    ) -> tuple[PoolReply, list[bytearray]]:
        """Return the answer to a request. Raises HelperFailed if there is none in time, or the pool doesn't answer."""
        deadline = self.clock.now() + seconds
        try:
            self.connection.settimeout(seconds)
            send(self.connection, request, values)
        except OSError as error:
            raise HelperFailed(f"it takes no request: {error or 'too slow'}") from None
        reply, found = self._receive(deadline)
        if reply.code not in (0, NO_SPACE):
            raise HelperFailed(f"Mooncake's error {reply.code}")
        return reply, found

    def _receive(self, deadline: float) -> tuple[PoolReply, list[bytearray]]:
        try:
            return receive(self.connection, PoolReply, lambda: deadline - self.clock.now())
        except (OSError, EOFError, BadMessage) as error:
            raise HelperFailed(str(error) or "no answer in time") from None

    def kill(self) -> None:
        """End it at once: what waits for it fails. May be called from any thread."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def close(self) -> None:
        """End it, and release what it has."""
        self.kill()
        self.connection.close()
        self.process.wait()
