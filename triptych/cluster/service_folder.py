"""What is kept of a service whose instances outlive their supervisor: a folder of its owner's alone, with the service's
record, its secret, and a lock that one supervisor holds."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from triptych.config import ServeConfig
from triptych.config.frontend_spec import as_path
from triptych.config.private_files import read_private
from triptych.errors import ConfigError, StartError
from triptych.topology import Role, Topology

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
"""Names of services: they are names of folders and of Ray's namespaces."""
MAX_RECORD = 2**20
"""Bytes of the longest record."""


@dataclass(frozen=True)
class ServiceState:
    """What a supervisor goes on with."""

    config: ServeConfig
    """With the HTTP port that was found."""
    topology: Topology
    controls: tuple[str, ...]
    """``HOST:PORT`` where operators reach each frontend."""
    joins: tuple[str, ...]
    """The same of where instances join, which differs after a rollout to another model."""


@dataclass(frozen=True)
class RayPlace:
    """Where instances are placed."""

    address: str
    """Of the Ray cluster, as in ``Connect``."""
    resources: Mapping[Role, Mapping[str, float]]
    """What each instance of a role asks for, besides CPUs and GPUs."""
    spares: int = 0
    """Places that are kept free, with a process that has imported what an instance does, for each set of resources that
    instances ask for."""


@dataclass(frozen=True)
class ServiceRecord:
    """All that another supervisor needs."""

    state: ServiceState
    place: RayPlace


def state_home() -> Path:
    """Return the folder for what services keep: ``XDG_STATE_HOME``, else ``~/.local/state``. Raises ConfigError for a
    user without a home directory."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():  # the XDG specification says to ignore a relative path
        return given
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        raise ConfigError("this user has no home directory for the service's folder: set XDG_STATE_HOME") from None


class ServiceFolder:
    """The folder of one service, held by this process until the context manager is left."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for a name that isn't one."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a service: letters, digits, '-', '_' and '.', at most 63")
        self.name = name
        self.path = state_home() / "triptych" / "services" / name
        self._place: RayPlace | None = None
        self._lock: int | None = None
        self._holder = ""
        """Process id of who held the folder when this process couldn't."""

    @property
    def secret_file(self) -> Path:
        """The file with the cluster secret, made at its first use."""
        path = self.path / "secret"
        if not path.exists():
            _write(path, secrets.token_hex(32).encode())
        return path

    def create(self, place: RayPlace) -> None:
        """Hold the folder of a new service. Raises ConfigError when there is a service of that name, and StartError
        when the folder can't be made."""
        self._place = place
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"the folder {self.path} can't be made: {error.strerror}") from None
        if not self.hold() or (self.path / "record").exists():
            self.release()
            raise ConfigError(
                f"the service {self.name} exists: --attach {self.name} goes on with it, and triptych stop --name "
                f"{self.name} ends it"
            )

    def open(self) -> ServiceRecord:
        """Hold the folder of a service, and return its record. Raises ConfigError when there is none, or another
        process holds it."""
        if not self.hold():
            raise ConfigError(f"the service {self.name} has a supervisor already: process {self._holder}")
        record = self.read()
        self._place = record.place
        return record

    def hold(self) -> bool:
        """Hold the folder, unless another process does. Raises ConfigError when there is no such service."""
        if self._lock is None:
            try:
                lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                raise self._unknown() from None
            except OSError as error:
                raise ConfigError(f"the folder {self.path} can't be used: {error.strerror}") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which ends with the process, however it ends
            except BlockingIOError:
                # by its descriptor, because the holder may remove the folder meanwhile
                self._holder = os.pread(lock, 20, 0).decode("ascii", "replace")
                os.close(lock)
                return False
            self._lock = lock
            os.truncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return True

    def read(self) -> ServiceRecord:
        """Return the service's record. Raises ConfigError when there is none, or it can't be read."""
        path = self.path / "record"
        if not path.exists():
            raise self._unknown()
        content = read_private(str(path), str(path), MAX_RECORD)
        try:
            return msgspec.msgpack.decode(content, type=ServiceRecord, dec_hook=as_path)
        except ValueError as error:  # msgspec's own errors are among them
            raise ConfigError(f"{path} can't be read: {error}") from None

    def save(self, state: ServiceState) -> None:
        """Replace the state. Raises OSError."""
        assert self._place is not None, "the folder isn't held"
        _write(self.path / "record", msgspec.msgpack.encode(ServiceRecord(state, self._place), enc_hook=str))

    def forget(self) -> None:
        """Drop the state: the service has ended."""
        (self.path / "record").unlink(missing_ok=True)

    def release(self) -> None:
        """Let another process hold the folder, which is removed if it keeps no service."""
        if self._lock is not None:
            if not (self.path / "record").exists():
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "ServiceFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _unknown(self) -> ConfigError:
        services = self.path.parent
        known = sorted(path.parent.name for path in services.glob("*/record")) if services.is_dir() else []
        there = f"there are: {', '.join(known)}" if known else "there is none"
        return ConfigError(f"no service {self.name} was started by this user on this machine with --detach; {there}")


def _write(path: Path, content: bytes) -> None:
    """Write a file of its owner's alone, whole or not at all."""
    part = path.with_name(f"{path.name}.new")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    part.replace(path)
