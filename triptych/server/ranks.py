"""Tensor parallelism as rank 0, the instance, sees it: starts the other ranks, watches them and ends them.

They are child processes that run ``roles/worker.py``: the same steps as rank 0, each on its own shard. They have no
socket towards the service, and hold nothing that would have to be put in order before they end.
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
from triptych.errors import StartError
from triptych.layers.attention.base import KVTensors
from triptych.layers.decoder import AfterLayer, ForwardBatch
from triptych.layers.parallel import SINGLE_RANK, Group, ProcessGroup, ready_key, rendezvous
from triptych.observe.logs import LogSettings, for_child
from triptych.observe.machine import describe_exit

log = logging.getLogger(__name__)

CHECK_INTERVAL = 0.02
"""Seconds between two looks at whether the ranks have started."""
NOTICE_WITHIN = 2.0
"""Seconds that the death of a process may be noticed later than its sockets' closing."""


class RankConfig(msgspec.Struct, frozen=True):
    """What a rank other than 0 is told, on its command line. ``rendezvous`` and ``cache`` are the paths of files that
    only processes of this user can open: where the ranks meet, and where their KV cache lies if they share one.
    ``parent`` is the process id of rank 0."""

    model: str
    engine: EngineConfig
    rank: int
    num_ranks: int
    parent: int
    threads: int
    rendezvous: str
    cache: str
    logs: LogSettings


class Ranks(Protocol):
    """The other ranks of an instance. ``cache`` is the path of the file for a KV cache that all of them share."""

    cache: str

    def connect(self, device: torch.device) -> Group:
        """Rank 0's end of the group, once all ranks run. Raises StartError when one of them ends before."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks do together. If it fails anywhere, the ranks no longer agree on where they are, so the
        instance has to end: raises StartError with the cause."""

    def lead(self, forward: Forward, group: Group, row_dtype: torch.dtype) -> Forward:
        """Rank 0's ``forward`` as its runner sees it: hands each step on, media rows in ``row_dtype``, before it
        computes its own part. What was copied into a shared cache before is there for the others, who wait for the
        step; and once it is over on rank 0, nobody reads or writes the cache any more."""

    def close(self) -> None:
        """Ends all of them."""


class NoRanks:
    """An instance that is one process."""

    cache = ""

    def connect(self, device: torch.device) -> Group:
        return SINGLE_RANK

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def lead(self, forward: Forward, group: Group, row_dtype: torch.dtype) -> Forward:
        return forward

    def close(self) -> None:
        """There is nothing to end."""


class ChildRanks:
    """Ranks 1, 2, … as child processes. ``on_failure`` is told once, from any thread, why the group can't go on."""

    def __init__(self, model: str, engine: EngineConfig, size: int, on_failure: Callable[[StartError], None]) -> None:
        """Starts them, so that with this process there are ``size`` ranks. Call it on the main thread: the kernel ends
        them when the thread that started them ends."""
        self._size = size
        self._on_failure = on_failure
        self._failure: StartError | None = None
        self._lock = threading.Lock()
        self._noticed = threading.Event()
        self._closing = False
        self._group: ProcessGroup | None = None
        # Files without a name in a file system, so that nothing is left behind however this process ends. The first is
        # never closed: the store opens it once more when it is destroyed, and would look for it for minutes.
        path = _path(os.memfd_create("triptych-ranks"))
        cache = os.memfd_create("triptych-kv", os.MFD_CLOEXEC)
        self.cache = _path(cache)
        self._close_cache = weakref.finalize(self, os.close, cache)  # what is mapped of it stays
        threads = torch.get_num_threads()
        self._store = rendezvous(path, self._size)
        self._processes = [
            _start(
                RankConfig(
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
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"watch-rank-{rank}", daemon=True).start()

    def connect(self, device: torch.device) -> Group:
        self._store.set(ready_key(0), "")
        while not self._store.check([ready_key(rank) for rank in range(1, self._size)]):
            self._noticed.wait(CHECK_INTERVAL)
            if self._failure is not None:
                raise self._failure
        with self.together():
            self._group = ProcessGroup(self._store, 0, self._size, device)
        return self._group

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except StartError:
            raise
        except Exception as error:
            if not self._noticed.wait(NOTICE_WITHIN):
                log.error("what all ranks do together failed here", exc_info=error)
            self._fail(StartError(f"tensor-parallel rank 0 of {self._size} failed: {error}"))
            raise self._failure or error from error

    def lead(self, forward: Forward, group: Group, row_dtype: torch.dtype) -> Forward:
        def lead_forward(batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None = None) -> Tensor:
            with self.together():
                send_step(batch, group, row_dtype)
                return forward(batch, cache, after_layer)

        return lead_forward

    def close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._close_cache()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._closing:
            who = f"tensor-parallel rank {rank} of {self._size} (process {process.pid})"
            self._fail(StartError(f"{who} {describe_exit(code)}"))

    def _fail(self, failure: StartError) -> None:
        """Only the first failure is one: the others follow from it. Who waits for it goes on when it has been told."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
                self._on_failure(failure)
                self._noticed.set()
                if self._group is not None:
                    self._group.abort()


def _path(file: int) -> str:
    """Of an open file of this process, for other processes of the same user."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _start(config: RankConfig) -> "subprocess.Popen[bytes]":
    command = children.command("triptych.server.rank", msgspec.json.encode(config).decode())
    environment = children.environment() | {"OMP_NUM_THREADS": str(config.threads)}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, cwd=children.FOLDER)
