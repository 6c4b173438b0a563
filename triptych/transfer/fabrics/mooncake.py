"""Mooncake Transfer Engine over TCP or RDMA, without a metadata service (P2P handshake).

Limitations of Mooncake:

- Nothing is authenticated or encrypted, and both of its ports listen on every address of the machine, whatever address
  is configured. A process that reaches them can read and write the regions registered here, but no other memory. It
  can also crash this process with a message that is JSON but not an object. Use a private network.
- The first write to a peer requests the peer's segments and blocks until the answer. If the peer accepts the connection
  but doesn't respond, like a stopped process, that takes a minute. So a thread probes the peer before the first write.
- The API can't drop what it has cached about a peer, so ``release`` doesn't either. A peer that restarts at the same
  port stays unreachable. Ports are chosen at random.
- Closing takes about a second, because the handshake thread polls that rarely.
"""

import contextlib
import importlib
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

from triptych.errors import RegionError, StartError, TransferError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import CompletedWrite, Copy, Write, check_bounds
from triptych.transfer.fabrics.registration_cache import CachedRegistration, RegistrationCache
from triptych.transfer.fabrics.sealing import seal, unseal
from triptych.transfer.memory import Bytes, Memory

_LOCATION = re.compile(r"([0-9A-Za-z._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5}):([0-9a-f]{1,16})")

_MAX_LOCATION = 400

_MAX_IN_FLIGHT = 1024
"""Maximum number of copies in flight to one peer: the size of Mooncake's TCP queue. Further copies would block for a
second and then fail."""

_LANDED = 1
_IN_PROGRESS = 0


class MooncakeFabric:
    """Moves bytes into the memory of processes that Mooncake reaches."""

    name = "mooncake"
    scope = ""
    checksums = True

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", devices: str = "") -> None:
        """``host`` is the address at which peers reach this process. ``protocol`` is "tcp" or "rdma"; for the latter,
        ``devices`` are the names of network cards, separated by commas (empty: all). Raises StartError when the library
        isn't installed or the network isn't available."""
        self._host = f"[{host}]" if ":" in host else host
        self._engine = load()
        with _forced(protocol):
            if self._engine.initialize(self._host, "P2PHANDSHAKE", protocol, devices) != 0:
                raise StartError(f"Mooncake can't start {protocol} at {host}; set MC_LOG_LEVEL=INFO for details")
        # over TCP a source needs no registration, and while registered it would be open to everyone
        self._sources = RegistrationCache(self._register, self._deregister) if protocol == "rdma" else None
        self._owned: dict[str, tuple[int, Bytes]] = {}  # by location: address, array that keeps it alive
        self._in_flight: Counter[str] = Counter()  # copies, by peer
        self._writes: set[_MooncakeWrite] = set()
        self._probes: dict[str, _Probe] = {}  # by peer

    def _register(self, start: int, num_bytes: int) -> int:
        if (code := self._engine.register_memory(start, num_bytes)) != 0:
            raise RegionError(f"Mooncake can't register {num_bytes} bytes: error {code}")
        return start

    def _deregister(self, start: int) -> None:
        self._engine.unregister_memory(start)

    def register(self, memory: Memory) -> RegionHandle:
        start = self._register(memory.bytes.ctypes.data, memory.bytes.nbytes)
        region = seal(self.name, f"{self._host}:{self._engine.get_rpc_port()}:{start:x}", memory.bytes.nbytes)
        self._owned[region.location] = start, memory.bytes
        return region

    def deregister(self, region: RegionHandle) -> None:
        if (owned := self._owned.pop(region.location, None)) is not None:
            self._deregister(owned[0])

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        peer, start = self._locate(region)
        check_bounds(region, copies)
        copies = [copy for copy in copies if copy.source.nbytes]
        if not copies:
            return CompletedWrite()
        held: list[CachedRegistration[int]] = []
        if self._sources is not None:
            held = self._sources.acquire((copy.source, copy.source.ctypes.data) for copy in copies)
        write = _MooncakeWrite(self, peer, start, copies, held)
        self._writes.add(write)
        try:
            write.submit()
        except TransferError as error:
            if not write.in_progress:
                self.finish(write)
                raise RegionError(str(error)) from None
            write.abandon(str(error))
        return write

    def _locate(self, region: RegionHandle) -> tuple[str, int]:
        """Return the peer's name and the region's address. Names are validated, because Mooncake takes an invalid one
        for a host with the default port."""
        parts = _LOCATION.fullmatch(unseal(self.name, region, _MAX_LOCATION))
        if parts is None or not 0 < int(parts[2]) < 65536:
            raise RegionError(f"not a Mooncake region: {region.location[:80]}")
        start = int(parts[3], 16)
        if start + region.num_bytes > 2**64:
            raise RegionError("the region goes beyond the end of memory")
        if self._engine is None:
            raise RegionError("the fabric is closed")
        return f"{parts[1]}:{parts[2]}", start

    def submit(self, peer: str, copy: Copy, start: int) -> int | None:
        """Start one copy and return its batch id. Returns None if it must wait, for the peer's answer or because too
        many copies are in flight. Raises TransferError when the peer can't be reached."""
        if self._in_flight[peer] >= _MAX_IN_FLIGHT or not self._answers(peer):
            return None
        source = copy.source
        target = start + copy.offset
        try:
            batch: int = self._engine.transfer_submit_write(peer, source.ctypes.data, target, source.nbytes)
        except RuntimeError as error:  # the peer's description of itself is invalid
            raise TransferError(f"Mooncake can't identify the region's owner at {peer}: {error}") from None
        if batch == 0:
            raise TransferError(f"Mooncake can't reach the region's owner at {peer}")
        self._in_flight[peer] += 1
        return batch

    def _answers(self, peer: str) -> bool:
        if (probe := self._probes.get(peer)) is None:
            probe = self._probes[peer] = _Probe(self._engine, peer)
        if probe.answer is None:
            return False
        if probe.answer != 0:
            del self._probes[peer]  # the next write probes again
            raise TransferError(f"Mooncake can't reach the region's owner at {peer}")
        return True

    def status(self, peer: str, batch: int) -> int:
        """Return a copy's status, zero while it is in flight. Another status can be read only once, since Mooncake then
        frees the batch."""
        status: int = self._engine.transfer_check_status(batch)
        if status != _IN_PROGRESS:
            self._in_flight[peer] -= 1
            if not self._in_flight[peer]:
                del self._in_flight[peer]
        return status

    def finish(self, write: "_MooncakeWrite") -> None:
        self._writes.discard(write)
        if self._sources is not None:
            self._sources.release(write.held)

    def release(self, region: RegionHandle) -> None:
        """Probe the peer again before the next write. Mooncake itself keeps what it has cached about the peer."""
        with contextlib.suppress(RegionError):
            self._probes.pop(self._locate(region)[0], None)

    def close(self) -> None:
        """Fail writes in progress and end the engine's threads and sockets, except those that it keeps per process."""
        for write in list(self._writes):
            write.fail("the fabric was closed")
        self._writes.clear()
        for start, _ in self._owned.values():
            self._deregister(start)
        self._owned.clear()
        self._engine = None


class _Probe:
    """Checks in a thread whether a peer responds."""

    def __init__(self, engine: Any, peer: str) -> None:
        self.answer: int | None = None
        """None until the peer has answered or failed to; then 0 if it responds."""
        self._engine = engine
        self._peer = peer
        # a daemon, so that a silent peer can't keep this process from exiting
        threading.Thread(target=self._run, name=f"probe {peer}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = self._engine.send_probe(self._peer)
        except RuntimeError:  # the peer's description of itself is invalid
            self.answer = -1


class _MooncakeWrite:
    """A write whose copies are a batch each, because the API's non-blocking status covers only a batch's first copy."""

    def __init__(
        self, fabric: MooncakeFabric, peer: str, start: int, copies: Sequence[Copy], held: list[CachedRegistration[int]]
    ) -> None:
        self.held = held
        self._fabric = fabric
        self._peer = peer
        self._start = start
        self._copies = copies  # keep the memory alive
        self._waiting = deque(copies)
        self._batches: list[int] = []
        self._failure = ""
        self._over = False

    @property
    def in_progress(self) -> bool:
        return bool(self._batches)

    def submit(self) -> None:
        """Start as many copies as may be in flight. Raises TransferError when the peer can't be reached."""
        while self._waiting:
            batch = self._fabric.submit(self._peer, self._waiting[0], self._start)
            if batch is None:
                break
            self._waiting.popleft()
            self._batches.append(batch)

    def done(self) -> bool:
        if not self._over:
            self._poll()
            if self._waiting or self._batches:
                return False
            self._over = True
            self._fabric.finish(self)
        if self._failure:
            raise TransferError(self._failure)
        return True

    def _poll(self) -> None:
        """Update the status of all copies. After a failure the others are still awaited, since their sources are being
        read."""
        in_flight = []
        for batch in self._batches:
            status = self._fabric.status(self._peer, batch)
            if status == _IN_PROGRESS:
                in_flight.append(batch)
            elif status != _LANDED:
                self.abandon(f"Mooncake couldn't write to the region at {self._peer}: it or its owner is gone")
        self._batches = in_flight
        try:
            self.submit()
        except TransferError as error:
            self.abandon(str(error))

    def abandon(self, reason: str) -> None:
        """Start no further copy. ``done`` raises once all started copies have ended."""
        self._failure = self._failure or reason
        self._waiting.clear()

    def cancel(self) -> None:
        """Start no further copy."""
        if not self._over and self._waiting:
            self.abandon("the write was cancelled")

    def fail(self, reason: str) -> None:
        self._failure, self._over = reason, True


@contextlib.contextmanager
def _forced(protocol: str) -> Iterator[None]:
    """Force the protocol by an environment variable: by itself Mooncake chooses by the network cards that it finds."""
    variable = "MC_FORCE_TCP" if protocol == "tcp" else "MC_FORCE_HCA"
    previous = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous


def load() -> Any:
    """Return an engine that isn't initialized yet. Raises StartError when Mooncake, or a system library that it needs,
    isn't installed."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its quietest level, which also logs errors that are raised here
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ModuleNotFoundError as error:
        raise StartError(
            f"the mooncake fabric needs Mooncake: pip install '.[mooncake]' in a checkout ({error})"
        ) from None
    except ImportError as error:
        raise StartError(
            "the mooncake fabric needs Mooncake (pip install '.[mooncake]' in a checkout) and the libraries that it "
            f"links to (apt-get install libibverbs1 librdmacm1): {error}"
        ) from None
