"""Mooncake Store's master as a process, which tests stop, kill and start again at the same port."""

import importlib.util
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.serving import wait_for
from triptych.clock import Clock, SystemClock
from triptych.config.pool import PoolAddress
from triptych.encode.pool_process import PoolProcess
from triptych.encode.pool_store import PoolStore
from triptych.executor import started_executor


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Master:
    """A master on this machine, and what lends its pool memory."""

    folder: Path
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None
    lender: PoolProcess | None = None

    @property
    def address(self) -> PoolAddress:
        return PoolAddress(f"127.0.0.1:{self.port}")

    def start(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        arguments = ["--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1"]
        self.process = subprocess.Popen(
            [binary, *arguments, f"--metrics_port={self.metrics_port}"],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self._is_reached, 20)

    def _is_reached(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def lend(self, num_bytes: int = 64 * 2**20) -> None:
        """Have a process lend the pool memory until it is ended."""
        self.lender = PoolProcess.start(PoolAddress(self.address.master, num_bytes), "127.0.0.1", SystemClock())
        self.lender.wait_until_ready(20)

    def hang(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def end_lender(self) -> None:
        if self.lender is not None:
            self.lender.close()
            self.lender = None

    @contextmanager
    def store(
        self, key: bytes | None = None, *, is_there: bool = True, clock: Clock | None = None
    ) -> Iterator[PoolStore]:
        """A store over this pool, once it is there."""
        clock = clock or SystemClock()
        store = PoolStore(lambda: PoolProcess.start(self.address, "127.0.0.1", clock), clock, started_executor, key=key)
        try:
            if is_there:
                wait_for(lambda: store.is_there, 20)
            yield store
        finally:
            store.close()


@contextmanager
def mooncake_master(*, lends: bool = True) -> Iterator[Master]:
    with TemporaryDirectory() as folder:
        master = Master(Path(folder))
        try:
            master.start()
            if lends:
                master.lend()
            yield master
        finally:
            master.end_lender()
            master.kill()
