"""Thousands of lookups and writes while a store's tiers are damaged: none gets wrong rows, none waits for long.

Memory is small, so that most lookups reach files or the pool. A lookup's rows follow from its name alone.
"""

import fcntl
import importlib.util
import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.encode_harness import stored_name
from tests.support.mooncake_pool import Master, mooncake_master
from tests.support.serving import wait_for
from triptych.clock import SystemClock
from triptych.encode import file_store, pool_store
from triptych.encode.file_store import LOCK, FileStore
from triptych.encode.store import EmbeddingRows, EmbeddingStore, MemoryStore, TieredStore, row_name
from triptych.executor import started_executor

OPERATIONS = 10_000
NAMES, WIDTH = 60, 1024
ROWS = 4
DISK_BYTES = 512 * 1024
"""Size of each file system: more than the files may have, so that it is full only while something else fills it."""
OTHER_MODEL = "another layout"


def rows(number: int) -> EmbeddingRows:
    made = np.random.default_rng(number).integers(0, 256, (ROWS, WIDTH), np.uint8)
    made[:, 0] = number
    return made


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own that can be filled."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user can't mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class Files:
    """A tier of files, and what is done to it."""

    def __init__(self, disk: Path, name: str, choice: random.Random) -> None:
        self.folder, self._ballast = disk / "rows", disk / "ballast"
        self.store = FileStore(self.folder, DISK_BYTES // 2, SystemClock(), started_executor, name=name)
        self._choice = choice
        self._locked: int | None = None

    def _some(self) -> Path:
        files = [one for one in self.folder.iterdir() if len(one.name) == 64]
        return self._choice.choice(files) if files else self.folder / stored_name("nothing")

    def truncate(self) -> None:
        path = self._some()
        os.truncate(path, self._choice.randrange(path.stat().st_size))

    def flip(self) -> None:
        with self._some().open("r+b") as file:
            data = bytearray(file.read())
            data[self._choice.randrange(len(data))] ^= 1 << self._choice.randrange(8)
            file.seek(0)
            file.write(data)

    def empty(self) -> None:
        self._some().write_bytes(b"")

    def remove(self) -> None:
        self._some().unlink()

    def be_full(self) -> None:
        """Something else takes all that is left of the disk, or gives it back."""
        if self._ballast.exists():
            self._ballast.unlink()
            return
        descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(descriptor, bytes(4096))
        finally:
            os.close(descriptor)

    def be_locked(self) -> None:
        """A process that has stopped holds the lock, or is gone."""
        if self._locked is None:
            self._locked = os.open(self.folder / LOCK, os.O_RDWR)
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            os.close(self._locked)
            self._locked = None

    def lose_count(self) -> None:
        (self.folder / LOCK).write_bytes(self._choice.choice([b"", b"0", b"x" * 30, b"9" * 15]))

    def recover(self) -> None:
        self._ballast.unlink(missing_ok=True)
        if self._locked is not None:
            self.be_locked()

    @property
    def faults(self) -> list[Callable[[], None]]:
        damage = [self.truncate, self.flip, self.empty, self.remove]
        return [*damage * 3, self.be_full, self.be_locked, self.lose_count]


class Pool:
    """The pool's master and lender, and what is done to them."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self._hangs = False

    def hang(self) -> None:
        (self.master.go_on if self._hangs else self.master.hang)()
        self._hangs = not self._hangs

    def restart(self) -> None:
        self.recover()
        self.master.kill()
        self.master.start()
        self.lend_again()

    def lend_again(self) -> None:
        self.recover()
        self.master.end_lender()
        self.master.lend()

    def recover(self) -> None:
        if self._hangs:
            self.hang()

    @property
    def faults(self) -> list[Callable[[], None]]:
        return [self.hang, self.restart, self.lend_again]


class Stalls:
    """How long threads of this process had to wait for a core at most, on a machine that has other work."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        clock, step = SystemClock(), 0.01
        while not self._ended.is_set():
            began = clock.monotonic()
            clock.sleep(step)
            self.longest = max(self.longest, clock.monotonic() - began - step)

    def __enter__(self) -> "Stalls":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


HOPS = 8
"""Times that a lookup goes on in another thread."""


def operate(store: EmbeddingStore, choice: random.Random, counts: Counter[str]) -> float:
    """Do one thing. Returns the seconds that the caller waited."""
    clock = SystemClock()
    number = choice.randrange(NAMES)
    name, content = stored_name(f"{number}/part"), stored_name(str(number))
    kind = choice.choices(["lookup", "put", "evict", "other model"], [60, 30, 2, 8])[0]
    began = clock.monotonic()
    match kind:
        case "lookup":
            for found in store.lookup([name, content, stored_name("never")]).result(30)[:2]:
                assert found is None or np.array_equal(found, rows(number)), "wrong rows"
                counts["found" if found is not None else "missing"] += 1
        case "put":
            store.put([name, content], rows(number))
        case "evict":
            store.evict([name])
        case _:
            theirs = row_name(OTHER_MODEL, str(number), "")
            (found,) = store.lookup([theirs]).result(30)
            assert found is None or np.array_equal(found, rows(number + 100)), "wrong rows"
            store.put([theirs], rows(number + 100))
    counts[kind] += 1
    return clock.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("pooled", [False, True])
def test_damaged_tiers_give_no_wrong_rows_and_hold_up_no_caller(
    tmp_path: Path, seed: int, pooled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files cut, changed, emptied and removed, disks full, the lock held, another model's rows in the same tiers; the
    pool's master stopped, killed and started again, and what lends it memory killed."""
    if pooled and importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake isn't installed")
    monkeypatch.setattr(pool_store, "LONGEST_PAUSE", 2.0)
    monkeypatch.setattr(file_store, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(file_store, "PAUSE_SECONDS", 1.0)
    choice, counts, waits = random.Random(seed), Counter[str](), list[float]()
    with ExitStack() as stack:
        stalls = stack.enter_context(Stalls())
        files = [Files(stack.enter_context(small_disk(tmp_path / name)), name, choice) for name in ("shm", "disk")]
        stores: list[EmbeddingStore] = [MemoryStore(4 * ROWS * WIDTH), *(one.store for one in files)]
        broken: list[Files | Pool] = [*files]
        if pooled:
            master = stack.enter_context(mooncake_master())
            stores.append(stack.enter_context(master.store()))
            broken.append(Pool(master))
        store = TieredStore(stores)
        every = 400 if pooled else 20
        for operation in range(OPERATIONS):
            if operation % every == 0:
                fault = choice.choice(choice.choice(broken).faults)
                try:
                    fault()
                except (OSError, ValueError):  # what it would damage isn't there or is empty, or the disk is full
                    counts["no fault"] += 1
                counts[fault.__qualname__] += 1
            waits.append(operate(store, choice, counts))
        for one in broken:
            one.recover()

        def works() -> bool:
            tiers = stores[1:]
            for tier in tiers:
                tier.put([stored_name("again")], rows(1))
            return all(tier.lookup([stored_name("again")]).result(30)[0] is not None for tier in tiers)

        wait_for(works, 60)
        hits = {tier.name: tier.hits for tier in store.tiers}
        for one in files:
            one.store.close()
    waits.sort()
    with capsys.disabled():
        figures = f"p50 {waits[len(waits) // 2] * 1e3:.2f} ms, p99 {waits[-(len(waits) // 100)] * 1e3:.1f} ms"
        longest = f"longest {waits[-1]:.2f} s, a core came after {stalls.longest:.2f} s"
        print(f"\nseed {seed}: {figures}, {longest}; hits {hits}; {dict(counts)}")
    assert min(hits.values()) > 0
    assert counts["found"] > OPERATIONS // 20
    deadlines = pool_store.LOOKUP_SECONDS + pool_store.PUT_SECONDS if pooled else 0.0
    assert waits[-1] < deadlines + 0.5 + HOPS * stalls.longest, "deadlines, and what a busy machine adds"
