"""Rows in files: what is damaged, who else writes there, and what is left by who was killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.encode_harness import LAYOUT, A, EncodeHarness, stored_name
from tests.support.plans import plan_of
from tests.support.serving import wait_for
from triptych.clock import SystemClock
from triptych.encode import file_store, stored_rows
from triptych.encode.file_store import FileStore
from triptych.encode.store import EmbeddingRows, MemoryStore, TieredStore
from triptych.executor import started_executor
from triptych.messages.stats import InstanceStats

WIDTH = 64
MAX_BYTES = 64 * 1024


def rows(value: int, number: int = 4) -> EmbeddingRows:
    return np.full((number, WIDTH), value % 251, np.uint8)


def found(store: FileStore, *texts: str) -> list[int | None]:
    result = store.lookup([stored_name(text) for text in texts]).result(20)
    return [None if one is None else int(one[0, 0]) for one in result]


def size_of(folder: Path) -> int:
    """Bytes of all rows' files, each counted once."""
    files = {about.st_ino: about.st_size for one in folder.iterdir() if len(one.name) == 64 for about in [one.stat()]}
    return sum(files.values())


def is_kept(store: FileStore, value: int) -> bool:
    store.put([stored_name(f"{value}")], rows(value))
    store.flush()
    return found(store, f"{value}") == [value]


def filled(folder: Path, number: int = 4) -> FileStore:
    store = FileStore(folder, MAX_BYTES, SystemClock(), started_executor)
    for value in range(number):
        store.put([stored_name(f"{value}"), stored_name(f"content {value}")], rows(value))
    store.flush()
    return store


def test_rows_outlive_the_process_under_all_names(tmp_path: Path) -> None:
    first = filled(tmp_path / "rows")
    first.put([stored_name("again"), stored_name("content 2")], rows(2))
    first.close()
    assert len(list((tmp_path / "rows").glob("?" * 64))) == 9
    second = FileStore(tmp_path / "rows", MAX_BYTES, SystemClock(), started_executor)
    assert found(second, "0", "content 1", "again", "never") == [0, 1, 2, None]
    second.flush()
    assert second.num_bytes == size_of(tmp_path / "rows")
    (one,) = second.lookup([stored_name("3")]).result(20)
    assert one is not None
    assert np.array_equal(one, rows(3))
    second.close()


def spoil_length(data: bytearray, source: random.Random) -> bytearray:
    return data[: source.randrange(len(data))]


def spoil_bit(data: bytearray, source: random.Random) -> bytearray:
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return data


@pytest.mark.parametrize("spoil", [spoil_length, spoil_bit, lambda data, _: bytearray(), lambda data, _: data + b"x"])
def test_damaged_rows_are_as_good_as_none(
    tmp_path: Path, spoil: Callable[[bytearray, random.Random], bytearray]
) -> None:
    source = random.Random(1)
    store = filled(tmp_path, 40)
    for value in range(40):
        path = tmp_path / stored_name(f"{value}")
        path.write_bytes(spoil(bytearray(path.read_bytes()), source))
    assert found(store, *map(str, range(40))) == [None] * 40
    store.flush()
    assert size_of(tmp_path) == 0
    store.put([stored_name("1")], rows(9))
    store.flush()
    assert found(store, "1", "content 1") == [9, None]
    store.close()


def test_rows_of_another_version_are_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    monkeypatch.setattr(stored_rows, "__version__", "another")
    store = FileStore(tmp_path, MAX_BYTES, SystemClock(), started_executor)
    assert found(store, "1") == [None]
    store.close()


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    store = FileStore(tmp_path, MAX_BYTES, SystemClock(), started_executor)
    for value in range(300):
        store.put([stored_name(f"{value}")], rows(value, 16))
        if value == 30:
            store.flush()
            used = tmp_path / stored_name("0")
            os.utime(used, (time.time() + 100, time.time() + 100))
    store.flush()
    assert MAX_BYTES // 2 < size_of(tmp_path) == store.num_bytes <= MAX_BYTES
    assert found(store, "0", "1", "299") == [0, None, 299 % 251]
    store.close()


def test_a_smaller_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    filled(tmp_path, 40).close()
    store = FileStore(tmp_path, 2000, SystemClock(), started_executor)
    store.flush()
    assert 0 < size_of(tmp_path) <= 2000
    store.put([stored_name("huge")], rows(1, 100))
    store.flush()
    assert found(store, "huge") == [None]
    store.close()


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    other = tmp_path / "important.txt"
    other.write_text("x" * 2 * MAX_BYTES)
    (tmp_path / "folder").mkdir()
    store = filled(tmp_path, 200)
    assert found(store, "199") == [199]
    assert other.exists()
    store.close()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for text in ("open", "link", "file"):
        with pytest.raises(OSError, match=text):
            FileStore(tmp_path / text, MAX_BYTES, SystemClock(), started_executor)


def test_what_cannot_be_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk; once there is room, rows are kept again after a while."""
    monkeypatch.setattr(file_store, "PAUSE_SECONDS", 0.2)
    store = filled(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        for value in range(10, 20):
            store.put([stored_name(f"{value}")], rows(value))
        store.flush()
    assert found(store, "3", "10") == [3, None]
    assert caplog.text.count("No space left on device") == 1
    wait_for(lambda: is_kept(store, 20))
    store.close()


def test_damaged_rows_are_removed_also_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        store.put([stored_name("more")], rows(1))
        store.flush()
    (tmp_path / stored_name("3")).write_bytes(b"damaged")
    assert found(store, "3", "3", "2") == [None, None, 2]
    store.flush()
    assert not (tmp_path / stored_name("3")).exists()
    assert not (tmp_path / stored_name("content 3")).exists()
    assert caplog.text.count("are damaged") == 1
    store.close()


def test_too_much_at_once_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_QUEUED_BYTES", rows(1).nbytes)
    store = FileStore(tmp_path, MAX_BYTES, SystemClock(), started_executor)
    with store.exclusive():
        for value in range(5):
            store.put([stored_name(f"{value}")], rows(value))
    store.flush()
    assert sum(one is not None for one in found(store, *map(str, range(5)))) == 1
    store.close()


VALUES = 400
"""That processes write, again and again: more than there is room for."""
WRITE = """
import itertools
import sys
from pathlib import Path
from tests.encode.test_file_store import MAX_BYTES, VALUES, FileStore, SystemClock, rows, started_executor, stored_name
store = FileStore(Path(sys.argv[1]), MAX_BYTES, SystemClock(), started_executor)
print("ready", flush=True)
for number in itertools.count(int(sys.argv[2]), 2):
    value = number % VALUES
    store.put([stored_name(f"{value}"), stored_name(f"content {value}")], rows(value, 16))
    store.flush()
    print(value, flush=True)
"""


def test_processes_that_are_killed_leave_whole_rows_within_the_limit(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITE, str(tmp_path / "rows")]
    writers = [
        subprocess.Popen([*command, f"{first}"], stdout=subprocess.PIPE, env=environment, text=True) for first in (0, 1)
    ]
    for writer in writers:
        assert writer.stdout is not None
        for _ in range(40):
            writer.stdout.readline()
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    for writer in writers:
        writer.communicate()
    assert size_of(tmp_path / "rows") <= MAX_BYTES
    (tmp_path / "rows" / file_store.TEMPORARY).write_bytes(b"part of a file")
    store = FileStore(tmp_path / "rows", MAX_BYTES, SystemClock(), started_executor)
    store.flush()
    assert not (tmp_path / "rows" / file_store.TEMPORARY).exists()
    assert store.num_bytes == size_of(tmp_path / "rows")
    kept = found(store, *(f"{value}" for value in range(VALUES)))
    assert all(one in (None, value % 251) for value, one in enumerate(kept))
    assert sum(one is not None for one in kept) > 20
    store.close()


def test_a_stopped_process_that_has_the_lock_holds_up_neither_readers_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(file_store, "PAUSE_SECONDS", 2.0)
    store = filled(tmp_path)
    with filled(tmp_path).exclusive():
        for value in range(100):
            store.put([stored_name(f"late {value}")], rows(value))
        assert found(store, "1", "late 1") == [1, None]
        began = time.monotonic()
        store.flush()
        assert time.monotonic() - began < 5, "they don't wait one after the other"
    wait_for(lambda: is_kept(store, 200))
    store.close()


def test_after_a_restart_nothing_is_encoded_again(tmp_path: Path) -> None:
    """Nor fetched: the tower and the preprocessors don't run, and rows are the same."""
    plan = plan_of(1, 2, 3)
    for start in range(2):
        files = FileStore(tmp_path, MAX_BYTES, SystemClock(), started_executor)
        harness = EncodeHarness(TieredStore([MemoryStore(2**20), files]))
        for number in range(10):
            harness.encode(f"t{number}", key=f"key {number}", plan=plan)
            harness.settle()
            harness.answer(bytes([number + 1] * 3))
        assert harness.encoded() == [(A, f"t{number}", bool(start)) for number in range(10)]
        assert bool(harness.preprocessors.seen) == (start == 0)
        harness.loop.add_stats(stats := InstanceStats())
        assert stats.encode is not None
        memory, disk = stats.encode.tiers
        assert (memory.name, disk.name, disk.hits) == ("memory", "disk", 30 * start)
        assert (stats.encode.patches, stats.encode.batches > 0) == (0 if start else 60, not start)
        assert memory.bytes == 60 * LAYOUT.row_bytes
        harness.close()
        files.close()
