"""Digests of weight files: made once, remembered in the user's cache folder, and never wrong."""

import hashlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.checkpoint import digest_store, digests
from triptych.checkpoint.digests import FileDigests, file_digests
from triptych.errors import CheckpointError

HUB_DIGEST = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of digests, in a cache folder of the test's own."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triptych" / "digests"


class Processes:
    """Hashes as a number of processes would, one after another."""

    def __init__(self) -> None:
        self.num_read = 0
        """How many files the last one has read."""

    def __call__(self, *files: Path) -> list[str]:
        process = FileDigests(settled_ns=0)
        found = process.of(files)
        assert process.of(files) == found
        self.num_read = process.num_hashed
        return found


@pytest.fixture
def process() -> Processes:
    return Processes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_files_are_hashed_once_by_all_processes(tmp_path: Path, store: Path, process: Processes) -> None:
    contents = [b"", b"b", os.urandom(digests.CHUNK_BYTES + 1)]
    files = [written(tmp_path / str(number), data) for number, data in enumerate(contents)]
    expected = [sha256(data) for data in contents]
    assert (process(*files), process.num_read) == (expected, 3)
    assert (process(*files[::-1], files[0]), process.num_read) == ([*expected[::-1], expected[0]], 0)
    assert (store.stat().st_mode & 0o777, {file.stat().st_mode & 0o777 for file in store.iterdir()}) == (0o700, {0o600})


def test_any_change_of_a_file_is_seen(tmp_path: Path, process: Processes) -> None:
    file = written(tmp_path / "weights", b"1234")
    one = FileDigests(settled_ns=0)
    assert one.of([file]) == process(file) == [sha256(b"1234")]
    stamps = file.stat()
    with file.open("r+b") as stream:  # in place, with the same size, inode and time of modification
        stream.write(b"5")
    os.utime(file, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    assert one.of([file]) == process(file) == [sha256(b"5234")]
    written(tmp_path / "new", b"5678").replace(file)
    assert one.of([file]) == process(file) == [sha256(b"5678")]


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, store: Path) -> None:
    file = written(tmp_path / "weights", b"1234")
    careful = FileDigests(settled_ns=10**12)
    for _ in range(2):
        assert careful.of([file]) == [sha256(b"1234")]
    assert careful.num_hashed == 2
    assert not list(store.glob("*.json"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.write_bytes(b""),
        lambda entry: entry.write_bytes(b"\xff{"),
        lambda entry: entry.write_bytes(b"[" * 4000),
        lambda entry: entry.write_bytes(entry.read_bytes() + b" " * 5000),
        lambda entry: entry.write_text(json.dumps(json.loads(entry.read_bytes()) | {"sha256": "../x"})),
        lambda entry: entry.write_text(json.dumps(json.loads(entry.read_bytes()) | {"state": [1, 2]})),
        lambda entry: entry.write_text(json.dumps(json.loads(entry.read_bytes()) | {"state": [1, 2, 3, 2**70]})),
        lambda entry: entry.chmod(0o666),
        lambda entry: (entry.rename(entry.with_name("moved")), entry.symlink_to("moved")),
        lambda entry: (entry.unlink(), subprocess.run(["mkfifo", entry], check=True)),
        lambda entry: (entry.unlink(), entry.mkdir()),
    ],
)
def test_an_entry_that_is_damaged_or_forged_costs_a_reading(
    tmp_path: Path, *, store: Path, process: Processes, spoil: Callable[[Path], object]
) -> None:
    file = written(tmp_path / "weights", b"1234")
    process(file)
    [entry] = store.glob("*.json")
    spoil(entry)
    assert (process(file), process.num_read) == ([sha256(b"1234")], 1)
    assert not [left for left in store.iterdir() if left.name.startswith("tmp")]


def test_a_volume_that_is_given_to_a_group_at_each_mount_keeps_digests(
    tmp_path: Path, *, store: Path, process: Processes
) -> None:
    """As Kubernetes does for ``fsGroup``, with modes 0660 and 02770."""
    file = written(tmp_path / "weights", b"1234")
    process(file)
    for path in [store, *store.iterdir()]:
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
    assert (process(file), process.num_read) == ([sha256(b"1234")], 0)
    stranger = next(gid for gid in range(60_000, 61_000) if gid not in os.getgroups())
    try:
        for path in [store, *store.iterdir()]:
            os.chown(path, -1, stranger)
    except PermissionError:
        pytest.skip("only root can give a file to another group")
    assert (process(file), process.num_read) == ([sha256(b"1234")], 1)


@pytest.mark.parametrize("how", ["file", "writable by others", "link", "no home"])
def test_without_a_folder_of_its_own_nothing_is_remembered(
    tmp_path: Path, *, store: Path, process: Processes, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store.parent.mkdir(parents=True)
    if how == "file":
        store.write_bytes(b"")
    elif how == "writable by others":
        store.mkdir()
        store.chmod(0o777)
    elif how == "link":
        (tmp_path / "elsewhere").mkdir()
        store.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
    file = written(tmp_path / "weights", b"1234")
    for _ in range(2):
        assert (process(file), process.num_read) == ([sha256(b"1234")], 1)


def test_the_hub_cache_of_the_user_names_its_files(
    tmp_path: Path, process: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(hub: Path, name: str = HUB_DIGEST, folder: str = "blobs") -> Path:
        written(hub / "models--a--b" / folder / name, b"weights")
        link = hub / "models--a--b" / "snapshots" / f"{folder}-{name}" / "model.safetensors"
        link.parent.mkdir(parents=True)
        link.symlink_to(Path("..", "..", folder, name))
        return link

    hub, unpacked = tmp_path / "cache" / "huggingface" / "hub", tmp_path / "unpacked"
    of_snapshot = snapshot(unpacked)
    assert (process(snapshot(hub)), process.num_read) == ([HUB_DIGEST], 0)
    for other in (
        snapshot(hub, name=HUB_DIGEST[:40]),
        snapshot(hub, folder="files"),
        hub / "models--a--b" / "blobs" / HUB_DIGEST,  # not a link of a snapshot
        of_snapshot,
    ):
        assert (process(other), process.num_read) == ([sha256(b"weights")], 1), other
    monkeypatch.setenv("HF_HUB_CACHE", str(unpacked))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert process(of_snapshot, snapshot(tmp_path / "home" / "hub")) == [HUB_DIGEST] * 2


def test_processes_wait_for_the_one_that_hashes(
    tmp_path: Path, process: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = written(tmp_path / "weights", b"1234")
    found: list[str] = []
    other = threading.Thread(target=lambda: found.extend(process(file)))
    with digest_store.DigestStore.open().locked():
        other.start()
        deadline = time.monotonic() + 10
        while "waiting for it" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not found
    other.join(10)
    assert found == [sha256(b"1234")]


def test_a_lock_that_is_never_released_delays_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(digest_store, "MAX_WAIT", 0.1)
    file = written(tmp_path / "weights", b"1234")
    with digest_store.DigestStore.open().locked():
        assert file_digests([file]) == [sha256(b"1234")]
    assert "without a lock" in caplog.text


def test_hashing_much_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file_digests([written(tmp_path / "small", b"1234")])
    assert not caplog.messages
    monkeypatch.setattr(digests, "LARGE_BYTES", 4)
    file_digests([written(tmp_path / "large", b"12345")])
    assert [message.split()[0] for message in caplog.messages] == ["hashing", "hashed"]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "weights", b"1234")
    advise = os.posix_fadvise

    def growing(*arguments: int) -> None:
        advise(*arguments)
        with file.open("ab") as stream:
            stream.write(b"5")

    monkeypatch.setattr(os, "posix_fadvise", growing)
    with pytest.raises(CheckpointError, match="weights: changed while it was read"):
        file_digests([file])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing: can't be read"):
        file_digests([tmp_path / "missing"])
    with pytest.raises(CheckpointError, match="folder: can't be read"):
        file_digests([written(tmp_path / "folder" / "x", b"").parent])
