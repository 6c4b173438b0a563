"""Sandboxed processes of services inside the test process do the same, though they are forked."""

import os
import subprocess

import psutil
import pytest

from tests.support import sandbox_handlers as handlers
from tests.support.forked_sandbox import Forked, forked_sandbox
from tests.support.processes import is_gone
from tests.support.sandbox_handlers import LIMITS
from triptych.errors import DecodeFailed
from triptych.sandbox.protocol import WorkerSpec
from triptych.sandbox.spawn import spawn
from triptych.sandbox.workers import WorkerPool

SPEC = WorkerSpec(f"{handlers.__name__}:obedient", "hello", LIMITS)


def made() -> WorkerPool:
    pool = WorkerPool(SPEC, 1, DecodeFailed)
    pool.wait_until_ready()
    return pool


def seen(pool: WorkerPool) -> tuple[set[bytes], int, str, int]:
    """A worker's variables, number of open files, and folder, and 0 if its process group is its own."""
    [pid] = pool.pids
    [variables], [files] = ([payload for payload, _ in pool.results(what, b"")] for what in (b"environment", b"files"))
    return set(variables.split()), len(files.split(b",")), os.readlink(f"/proc/{pid}/cwd"), os.getpgid(pid) - pid


def test_a_forked_worker_is_as_one_that_is_started() -> None:
    started = made()
    with forked_sandbox():
        forked = made()
    assert seen(forked) == seen(started)
    assert psutil.Process(started.pids[0]).ppid() == os.getpid()
    assert psutil.Process(forked.pids[0]).ppid() != os.getpid()
    for pool in (forked, started):
        [pid] = pool.pids
        pool.close()
        assert is_gone(pid)


def test_a_process_that_was_forked_can_be_watched_and_ended() -> None:
    with forked_sandbox():
        started, connection = spawn("triptych.sandbox.child", SPEC, "worker")
    process: object = started
    assert isinstance(process, Forked)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(10) == process.poll() == 0
    process.kill()
    connection.close()
