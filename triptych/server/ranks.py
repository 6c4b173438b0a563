"""The tensor-parallel ranks of an instance, as rank 0 sees them: starts, watches and ends the other ranks.

They are child processes that run ``server/rank_main.py``: the same steps as rank 0, each on its own shard. They have no
socket of the service and hold no state that needs cleaning up, so they can be killed at any time.
"""

import contextlib
import logging
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from triptych import children
from triptych.config import EngineConfig
from triptych.engine.runner import Forward
from triptych.engine.step_broadcast import send_step
from triptych.errors import ChildFailed, StartError
from triptych.exit_codes import FAILED, PERMANENT
from triptych.layers.attention.base import KVTensors
from triptych.layers.decoder import AfterLayer, ForwardBatch
from triptych.layers.parallel import SINGLE_RANK, Group, ProcessGroup, ready_key, rendezvous
from triptych.observe.logs import LogSettings, for_child
from triptych.observe.machine import describe_exit

log = logging.getLogger(__name__)

CHECK_INTERVAL = 0.02
"""Seconds between two checks of whether the ranks have started."""
EXIT_DELAY = 2.0
"""Maximum seconds between the closing of a process's sockets and its detected exit."""


class RankSpec(msgspec.Struct, frozen=True):
    """All that the process of a rank other than 0 needs; rank 0 writes it to its standard input."""

    model: str
    """The checkpoint folder."""
    engine: EngineConfig
    rank: int
    num_ranks: int
    parent: int
    """Process id of rank 0."""
    threads: int
    rendezvous: str
    """Path of a file, which only processes of this user can open, through which the ranks find each other."""
    cache: str
    """Path of a file, which only processes of this user can open, for a KV cache that the ranks share."""
    logs: LogSettings


class Ranks(Protocol):
    """The other ranks of an instance."""

    cache: str
    """Path of the file for a KV cache that all ranks share."""

    def connect(self, device: torch.device) -> Group:
        """Wait until all ranks run, and return rank 0's process group. Raises StartError when a rank exits before
        that."""

    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for collective operations of all ranks. If one fails anywhere, the ranks are out of step and
        the instance has to end: raises StartError with the cause."""

    def broadcasting(self, forward: Forward, group: Group, embedding_dtype: torch.dtype) -> Forward:
        """Return rank 0's ``forward`` for its runner, which broadcasts each step, with embeddings in
        ``embedding_dtype``, before it computes its own part.

        The other ranks wait for the step, so they see what was copied into a shared cache before it. When it returns on
        rank 0, no rank reads or writes the cache any more."""

    def close(self) -> None:
        """End all of them."""


class NoChildRanks:
    """The ranks of an instance that is a single process: there are no others."""

    cache = ""

    def connect(self, device: torch.device) -> Group:
        return SINGLE_RANK

    def collective(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def broadcasting(self, forward: Forward, group: Group, embedding_dtype: torch.dtype) -> Forward:
        return forward

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class ChildRanks:
    """Ranks 1, 2, … as child processes."""

    def __init__(self, model: str, engine: EngineConfig, size: int, on_failure: Callable[[StartError], None]) -> None:
        """Start them, so that with this process there are ``size`` ranks. ``on_failure`` is called once, from any
        thread, with the reason why the group can't continue. Call this on the main thread: the kernel ends child
        processes when the thread that started them ends."""
        self._size = size
        self._on_failure = on_failure
        self._failure: StartError | None = None
        self._lock = threading.Lock()
        self._noticed = threading.Event()
        self._closing = False
        self._group: ProcessGroup | None = None
        # Files without a name in a file system, so that nothing is left behind however this process ends. The first is
        # never closed: the store opens it again when it is destroyed, and would retry for minutes.
        path = _path(os.memfd_create("triptych-ranks"))
        cache = os.memfd_create("triptych-kv", os.MFD_CLOEXEC)
        self.cache = _path(cache)
        self._close_cache = weakref.finalize(self, os.close, cache)  # mappings of it stay valid
        threads = torch.get_num_threads()
        self._store = rendezvous(path, self._size)
        self.processes = [
            _start(
                RankSpec(
                    model=model,
                    engine=engine,
                    rank=rank,
                    num_ranks=size,
                    parent=os.getpid(),
                    threads=threads,
                    rendezvous=path,
                    cache=self.cache,
                    logs=for_child(f"rank{rank}", f"rank {rank}: "),
                )
            )
            for rank in range(1, size)
        ]
        for rank, process in enumerate(self.processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"watch-rank-{rank}", daemon=True).start()

    def connect(self, device: torch.device) -> Group:
        self._store.set(ready_key(0), "")
        while not self._store.check([ready_key(rank) for rank in range(1, self._size)]):
            self._noticed.wait(CHECK_INTERVAL)
            if self._failure is not None:
                raise self._failure
        with self.collective():
            self._group = ProcessGroup(self._store, 0, self._size, device)
        return self._group

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        try:
            yield
        except StartError:
            raise
        except Exception as error:
            if not self._noticed.wait(EXIT_DELAY):
                log.error("a collective operation of all ranks failed here", exc_info=error)
            self._fail(StartError(f"tensor-parallel rank 0 of {self._size} failed: {error}"))
            raise self._failure or error from error

    def broadcasting(self, forward: Forward, group: Group, embedding_dtype: torch.dtype) -> Forward:
        def broadcast_forward(batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None = None) -> Tensor:
            with self.collective():
                send_step(batch, group, embedding_dtype)
                return forward(batch, cache, after_layer)

        return broadcast_forward

    def close(self) -> None:
        self._closing = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self._close_cache()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._closing:
            who = f"tensor-parallel rank {rank} of {self._size} (process {process.pid})"
            exit_code = code if code in PERMANENT else FAILED
            self._fail(ChildFailed(f"{who} {describe_exit(code)}", exit_code))

    def _fail(self, failure: StartError) -> None:
        """Report the first failure; later ones follow from it. Threads that wait for a failure continue after the
        report."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
                self._on_failure(failure)
                self._noticed.set()
                if self._group is not None:
                    self._group.abort()


def _path(file: int) -> str:
    """Return a path by which other processes of this user can open a file that this process has open."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _start(spec: RankSpec) -> "subprocess.Popen[bytes]":
    command = children.command("triptych.server.rank_main", "--rank", str(spec.rank))
    environment = children.environment() | {"OMP_NUM_THREADS": str(spec.threads)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=children.FOLDER)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # a process that has ended is noticed by its watcher
        process.stdin.write(msgspec.json.encode(spec))
    return process
