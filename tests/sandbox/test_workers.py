"""Sandboxed workers that do what a hostile file could make them do."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from tests.support import sandbox_handlers as handlers
from tests.support.processes import is_gone
from tests.support.sandbox_handlers import LIMITS
from triptych.errors import DecodeFailed, HelperFailed, InternalError, StartError, TruncatedMedia
from triptych.sandbox import spawn as spawn_module
from triptych.sandbox import workers as workers_module
from triptych.sandbox.protocol import Bulk, ProtocolError, WorkerSpec
from triptych.sandbox.workers import WorkerPool


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    made = WorkerPool(WorkerSpec(f"{handlers.__name__}:obedient", "hello", LIMITS), 1, DecodeFailed)
    made.wait_until_ready()
    yield made
    made.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in made.pids)


def ask(workers: WorkerPool, what: str, data: bytes = b"") -> list[tuple[bytes, bytes]]:
    return [(payload, bytes(bulk or b"")) for payload, bulk in workers.results(what.encode(), data)]


def payloads(workers: WorkerPool, what: str, data: bytes = b"") -> list[bytes]:
    return [payload for payload, _ in ask(workers, what, data)]


def test_results_carry_their_bulk(workers: WorkerPool) -> None:
    for data in (b"", b"x", os.urandom(2**20)):
        assert ask(workers, "echo", data) == [(b"hello", data)]


def test_one_worker_serves_several_items_at_a_time(workers: WorkerPool) -> None:
    iterators = [workers.results(b"count", b"%d" % number) for number in (3, 0, 5)]
    seen: list[list[bytes]] = [[], [], []]
    for _ in range(6):
        for number, iterator in enumerate(iterators):
            if (result := next(iterator, None)) is not None:
                seen[number].append(result[0])
    assert seen == [[b"0", b"1", b"2"], [], [b"0", b"1", b"2", b"3", b"4"]]


@pytest.mark.slow
def test_a_library_may_be_larger_than_the_limit_which_stays() -> None:
    """And takes longer than an item may."""
    workers = WorkerPool(WorkerSpec(f"{handlers.__name__}:obedient", "", LIMITS), 1, DecodeFailed)
    workers.wait_until_ready()
    try:
        assert payloads(workers, "import_late", b"torch") == [b"torch"]
        with pytest.raises(DecodeFailed, match="longer than 1 s"):
            ask(workers, "hang")
        with pytest.raises((DecodeFailed, InternalError)):
            ask(workers, "import_within_the_limit", b"torch")
        assert payloads(workers, "import_late", b"torch") == [b"torch"]
        with pytest.raises(DecodeFailed, match="memory"):
            ask(workers, "hoard")
    finally:
        workers.close()


def test_a_cancelled_request_is_dropped(workers: WorkerPool) -> None:
    iterator = workers.results(b"count", b"1000000")
    next(iterator)
    del iterator
    assert payloads(workers, "count", b"2") == [b"0", b"1"]
    ((in_progress, held),) = workers.debug_state()
    assert in_progress == 0
    assert held <= 1


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("crash", DecodeFailed, "crashed"),
        ("crash_later", DecodeFailed, "crashed"),
        ("hang", DecodeFailed, "longer than 1 s"),
        ("spin", DecodeFailed, "longer than 1 s"),
        ("hoard", DecodeFailed, "memory"),
        ("refuse", TruncatedMedia, "it ends early"),
        ("fail", InternalError, "it failed"),
        ("misfire", InternalError, "^it failed$"),
        ("write_much", InternalError, "^it failed$"),
    ],
)
def test_an_error_fails_only_its_item(workers: WorkerPool, what: str, error: type[Exception], message: str) -> None:
    other = workers.results(b"count", b"3")
    assert next(other)[0] == b"0"
    with pytest.raises(error, match=message):
        ask(workers, what)
    assert [payload for payload, _ in other] == [b"1", b"2"], "another item of the same worker continues"
    assert ask(workers, "echo", b"x") == [(b"hello", b"x")]


def test_memory_is_bounded(workers: WorkerPool) -> None:
    with pytest.raises(DecodeFailed):
        ask(workers, "hoard")
    status = Path(f"/proc/{workers.pids[0]}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak * 1024 < LIMITS.memory_bytes + 2**27


def test_a_worker_killed_from_outside_fails_no_item(workers: WorkerPool, tmp_path: Path) -> None:
    assert payloads(workers, "crash_once", str(tmp_path / "crashed").encode()) == [b"0", b"1"]
    before = workers.pids
    os.kill(before[0], signal.SIGKILL)
    time.sleep(0.05)
    assert ask(workers, "echo", b"x") == [(b"hello", b"x")]
    assert workers.pids != before


def test_an_input_that_crashes_workers_is_tried_once_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of it; others are, and only a limited number is remembered."""
    monkeypatch.setattr("triptych.sandbox.workers.CRASHES_KEPT", 2)
    made = WorkerPool(WorkerSpec(f"{handlers.__name__}:obedient", "hello", LIMITS), 1, DecodeFailed)
    try:
        for name in (b"first", b"second", b"third"):
            with pytest.raises(DecodeFailed, match="crashed"):
                ask(made, "crash", name)
        assert ask(made, "echo", b"first") == [(b"hello", b"first")], "forgotten"
        before = made.pids
        for name in (b"second", b"third"):
            with pytest.raises(DecodeFailed, match="crashed"):
                ask(made, "echo", name)
        assert ask(made, "echo", b"other") == [(b"hello", b"other")]
        assert made.pids == before
    finally:
        made.close()


def test_an_item_is_not_at_fault_when_this_process_has_no_memory_for_its_result(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Bulk, "of", full)
        with pytest.raises(MemoryError, match="Cannot allocate memory"):
            payloads(workers, "echo", b"data")
    assert payloads(workers, "echo", b"data")


def test_workers_see_no_secrets(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", "secret")
    os.kill(workers.pids[0], signal.SIGKILL)
    time.sleep(0.05)
    (variables,) = payloads(workers, "environment")
    assert b"TRIPTYCH" not in variables
    assert b"PATH" in variables


def test_several_workers_share_the_work() -> None:
    made = WorkerPool(WorkerSpec(f"{handlers.__name__}:obedient", "hello", LIMITS), 2, DecodeFailed)
    found: list[bytes] = []
    iterators = [made.results(b"pid") for _ in range(2)]
    threads = [threading.Thread(target=lambda one=one: found.append(next(one)[0])) for one in iterators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    assert len(set(found)) == 2


def test_closing_cancels_requests_in_progress() -> None:
    limits = msgspec.structs.replace(LIMITS, seconds=30.0)  # so that the limit ends nothing before the close does
    made = WorkerPool(WorkerSpec(f"{handlers.__name__}:obedient", "hello", limits), 1, DecodeFailed)
    made.wait_until_ready()
    errors: list[BaseException] = []

    def asks() -> None:
        try:
            ask(made, "hang")
        except InternalError as error:
            errors.append(error)

    thread = threading.Thread(target=asks)
    thread.start()
    time.sleep(0.2)
    made.close()
    thread.join(20)
    assert len(errors) == 1


def test_a_worker_ends_with_its_parent() -> None:
    code = """
import os, signal
from tests.support.sandbox_handlers import LIMITS
from triptych.errors import DecodeFailed
from triptych.sandbox.protocol import WorkerSpec
from triptych.sandbox import spawn as spawn_module
from triptych.sandbox import workers as workers_module
from triptych.sandbox.workers import WorkerPool
workers = WorkerPool(WorkerSpec("tests.support.sandbox_handlers:obedient", "hello", LIMITS), 1, DecodeFailed)
workers.wait_until_ready()
print(*workers.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert parent.returncode == -signal.SIGKILL
    assert is_gone(int(parent.stdout))


def test_workers_that_cannot_start() -> None:
    made = WorkerPool(WorkerSpec(f"{handlers.__name__}:broken", "", LIMITS), 1, DecodeFailed)
    with pytest.raises(StartError, match="can't start"):
        made.wait_until_ready()
    with pytest.raises(HelperFailed, match="could not be started"):
        ask(made, "echo")
    made.close()


@pytest.mark.parametrize("how", ["killed", "no process"])
def test_workers_that_die_while_they_start_fail_no_item(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As under a kernel that is short of memory: the worker is lost, and its first two successors."""
    failures: list[str] = []

    def spawn(*arguments: Any) -> Any:
        if len(failures) == 2:
            return real(*arguments)
        failures.append(how)
        if how == "no process":
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        process, connection = real(*arguments)
        process.kill()
        return process, connection

    real = spawn_module.spawn
    monkeypatch.setattr(workers_module, "spawn", spawn)
    os.kill(workers.pids[0], signal.SIGKILL)
    time.sleep(0.05)
    assert ask(workers, "echo", b"x") == [(b"hello", b"x")]
    assert len(failures) == 2


def test_bulk_is_sealed_before_it_is_read() -> None:
    bulk = Bulk.of(b"abc")
    assert bytes(bulk.sealed(3) or b"") == b"abc"
    for change in (lambda: os.write(bulk.file, b"x"), lambda: os.ftruncate(bulk.file, 0)):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(ProtocolError, match="3 bytes"):
        Bulk.of(b"abc").sealed(2)
    plain = Bulk(os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(ProtocolError, match="written"):
        plain.sealed(3)
