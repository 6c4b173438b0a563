"""Lower bound on the cost of a write over NIXL or Mooncake: two processes that use only the library's own API.

Before the clock starts, memory is registered, the peer is known and the request is created. The writer polls for
completion either without pause or at the interval of Triptych's sender. On few cores, polling without pause takes a
core from the library's threads; which way is faster depends on library and size.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from triptych import children
from triptych.errors import StartError
from triptych.transfer.memory import Bytes, SharedMemory

HOST = "127.0.0.1"
START_TIMEOUT = 60.0

Write = Callable[[float], None]
"""Writes once and polls for completion, pausing that many seconds between polls."""


class _Nixl:
    """Uses the same progress threads as the fabric. Those of NIXL's Python wrapper never sleep, which on few cores
    takes a core from the writer."""

    def __init__(self) -> None:
        from triptych.transfer.fabrics import nixl

        self._nixl = nixl.load()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = nixl.PROGRESS_MICROSECONDS
        self._agent = self._nixl.nixlAgent(f"bare-{os.getpid()}", config)
        self._agent.createBackend("UCX", {"engine_config": "NET_DEVICES=lo"})

    def register(self, memory: Bytes) -> tuple[Any, int]:
        ranges = [(memory.ctypes.data, memory.nbytes, 0, "")]
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, ranges), [])
        return self._agent.getLocalMD(), memory.ctypes.data

    def prepare(self, peer: tuple[Any, int], source: Bytes) -> Write:
        self.register(source)
        metadata, start = peer
        name = self._agent.loadRemoteMD(metadata).decode()
        here, there = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, np.array([(address, source.nbytes, 0)], dtype=np.uint64))
            for address in (source.ctypes.data, start)
        )
        request = self._agent.createXferReq(self._nixl.NIXL_WRITE, here, there, name, "", [])

        def write(pause: float) -> None:
            status = self._agent.postXferReq(request, "")
            while status == self._nixl.NIXL_IN_PROG:
                _wait(pause)
                status = self._agent.getXferStatus(request)

        return write


class _Mooncake:
    def __init__(self) -> None:
        from triptych.transfer.fabrics import mooncake

        self._engine = mooncake.load()
        os.environ["MC_FORCE_TCP"] = "1"
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise StartError("Mooncake can't start")

    def register(self, memory: Bytes) -> tuple[Any, int]:
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
            raise StartError("Mooncake can't register memory")
        return f"{HOST}:{self._engine.get_rpc_port()}", memory.ctypes.data

    def prepare(self, peer: tuple[Any, int], source: Bytes) -> Write:
        name, start = peer  # a source needs no registration over TCP

        def write(pause: float) -> None:
            batch = self._engine.transfer_submit_write(name, source.ctypes.data, start, source.nbytes)
            while (status := self._engine.transfer_check_status(batch)) == 0:
                _wait(pause)
            if status != 1:
                raise StartError("a write with Mooncake's own API failed")

        return write


_LIBRARIES: dict[str, Callable[[], Any]] = {"nixl": _Nixl, "mooncake": _Mooncake}


def has_bare_loop(fabric: str) -> bool:
    return fabric in _LIBRARIES


def _own(fabric: str, num_bytes: int, pipe: Connection) -> None:
    """Main function of the process that owns the memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    library, memory = _LIBRARIES[fabric](), SharedMemory(num_bytes)  # like the receive buffer
    pipe.send(library.register(memory.bytes))
    _until_closed(pipe)


def _write(fabric: str, num_bytes: int, peer: tuple[Any, int], pipe: Connection) -> None:
    """Main function of the writing process: one write for each pause that it receives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    library, source = _LIBRARIES[fabric](), np.ones(num_bytes, dtype=np.uint8)
    write = library.prepare(peer, source)
    pipe.send(None)
    while (pause := _next(pipe)) is not None:
        began = time.monotonic()
        write(pause)
        pipe.send(time.monotonic() - began)


def _wait(pause: float) -> None:
    if pause:
        time.sleep(pause)


def _until_closed(pipe: Connection) -> None:
    while _next(pipe) is not None:
        pass


def _next(pipe: Connection) -> float | None:
    try:
        pause: float = pipe.recv()
    except (EOFError, OSError):
        return None
    return pause


class BarePair:
    """The two processes, for one size."""

    def __init__(self, fabric: str, num_bytes: int) -> None:
        """Start both. Raises StartError when one can't start."""
        self._context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            peer = self._start(_own, fabric, num_bytes)
            self._start(_write, fabric, num_bytes, peer)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "BarePair":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, pause: float) -> float:
        """Return the seconds that one write takes with ``pause`` seconds between polls."""
        self._pipes[-1].send(pause)
        return float(self._answer(self._pipes[-1]))

    def close(self) -> None:
        for pipe in reversed(self._pipes):
            pipe.close()
        for process in reversed(self._processes):
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, theirs), daemon=True)
        with children.inherited():
            process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)
        return self._answer(ours)

    def _answer(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(START_TIMEOUT):
                return pipe.recv()
        except EOFError:
            pass
        raise StartError("a process of the bare loop has exited or doesn't respond")
