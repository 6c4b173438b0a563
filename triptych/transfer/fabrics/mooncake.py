"""Mooncake's Transfer Engine: TCP, or RDMA, with no metadata service: processes ask each other (P2P handshake).

What Mooncake doesn't give, whatever is done here:

- Nothing is authenticated or encrypted, and both of its ports listen on every address of the machine, whatever address
  it is told: whoever reaches them can read and write the regions registered here, but no other memory, and can end
  the process with one message that is JSON but no object. Keep it on a network of the service's own.
- The first write to a peer asks it for its segments, and blocks until the answer: a minute for a host that accepts and
  then says nothing, such as a stopped process. So a thread asks whether the peer is there before anything is written.
- What it has learnt about a peer can't be taken back by this API, so that ``release`` forgets nothing: a peer that
  began anew at the same port stays unreachable. Ports are drawn at random.
- Closing takes about a second: its handshake thread looks up once in that time.
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
from triptych.transfer.fabrics.base import Copy, Finished, Write, check_fit
from triptych.transfer.fabrics.sealing import seal, unseal
from triptych.transfer.fabrics.sources import Source, Sources
from triptych.transfer.memory import Bytes, Memory

_LOCATION = re.compile(r"([0-9A-Za-z._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5}):([0-9a-f]{1,16})")

_MAX_LOCATION = 400

_MAX_UNDER_WAY = 1024
"""Copies to one peer at a time. Mooncake queues as many over TCP; more would wait a second for room and then fail."""

_LANDED = 1
_UNDER_WAY = 0


class MooncakeFabric:
    """Moves bytes into the memory of processes that Mooncake reaches.

    ``host`` is the address that peers reach this process at, ``protocol`` "tcp" or "rdma", ``devices`` the names of
    the network cards for the latter, separated by commas (none: all). Raises StartError when the library or the
    network isn't there.
    """

    name = "mooncake"
    scope = ""
    checksums = True

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", devices: str = "") -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._engine = load()
        with _forced(protocol):
            if self._engine.initialize(self._host, "P2PHANDSHAKE", protocol, devices) != 0:
                raise StartError(f"Mooncake can't start {protocol} at {host}; MC_LOG_LEVEL=INFO says more")
        # over TCP a source needs no registration, and would be open to reading and writing by anyone while it had one
        self._sources = Sources(self._register, self._deregister) if protocol == "rdma" else None
        self._owned: dict[str, tuple[int, Bytes]] = {}  # by location: the address, and what keeps the memory
        self._under_way: Counter[str] = Counter()  # copies, by peer
        self._writes: set[_MooncakeWrite] = set()
        self._contacts: dict[str, _Contact] = {}  # by peer

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
        check_fit(region, copies)
        copies = [copy for copy in copies if copy.source.nbytes]
        if not copies:
            return Finished()
        held: list[Source[int]] = []
        if self._sources is not None:
            held = self._sources.acquire((copy.source, copy.source.ctypes.data) for copy in copies)
        write = _MooncakeWrite(self, peer, start, copies, held)
        self._writes.add(write)
        try:
            write.submit()
        except TransferError as error:
            if not write.under_way:
                self.finish(write)
                raise RegionError(str(error)) from None
            write.give_up(str(error))
        return write

    def _locate(self, region: RegionHandle) -> tuple[str, int]:
        """The peer's name and the region's address. Mooncake takes a name that it can't make out for a host with a
        default port, so it gets none such."""
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
        """Starts one copy; None when it can't start yet: the peer hasn't answered, or too many are under way. Raises
        TransferError when the peer can't be reached."""
        if self._under_way[peer] >= _MAX_UNDER_WAY or not self._answers(peer):
            return None
        source = copy.source
        target = start + copy.offset
        try:
            batch: int = self._engine.transfer_submit_write(peer, source.ctypes.data, target, source.nbytes)
        except RuntimeError as error:  # what the peer said of itself made no sense
            raise TransferError(f"Mooncake can't make out the region's owner at {peer}: {error}") from None
        if batch == 0:
            raise TransferError(f"Mooncake can't reach the region's owner at {peer}")
        self._under_way[peer] += 1
        return batch

    def _answers(self, peer: str) -> bool:
        if (contact := self._contacts.get(peer)) is None:
            contact = self._contacts[peer] = _Contact(self._engine, peer)
        if contact.answer is None:
            return False
        if contact.answer != 0:
            del self._contacts[peer]  # the next write asks again
            raise TransferError(f"Mooncake can't reach the region's owner at {peer}")
        return True

    def status(self, peer: str, batch: int) -> int:
        """Zero while the copy is under way. Anything else is said once: Mooncake has freed the batch then."""
        status: int = self._engine.transfer_check_status(batch)
        if status != _UNDER_WAY:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]
        return status

    def finish(self, write: "_MooncakeWrite") -> None:
        self._writes.discard(write)
        if self._sources is not None:
            self._sources.release(write.held)

    def release(self, region: RegionHandle) -> None:
        """Mooncake keeps what it knows about a peer; whether it is there is asked anew."""
        with contextlib.suppress(RegionError):
            self._contacts.pop(self._locate(region)[0], None)

    def close(self) -> None:
        """Writes under way fail. The engine's threads and sockets end here, but for those that it keeps per process."""
        for write in list(self._writes):
            write.fail("the fabric was closed")
        self._writes.clear()
        for start, _ in self._owned.values():
            self._deregister(start)
        self._owned.clear()
        self._engine = None


class _Contact:
    """Asks a peer whether it is there. ``answer`` is None until it is known, then 0 if it is."""

    def __init__(self, engine: Any, peer: str) -> None:
        self.answer: int | None = None
        self._engine = engine
        self._peer = peer
        # a daemon: nobody waits for a silent peer, not even the end of this process
        threading.Thread(target=self._ask, name=f"contact {peer}", daemon=True).start()

    def _ask(self) -> None:
        try:
            self.answer = self._engine.send_probe(self._peer)
        except RuntimeError:  # what the peer said of itself made no sense
            self.answer = -1


class _MooncakeWrite:
    """Copies of one write, each a batch of its own: of a batch of many, this API's status that doesn't block tells
    only the first copy's. It measures faster than its blocking call, too."""

    def __init__(
        self, fabric: MooncakeFabric, peer: str, start: int, copies: Sequence[Copy], held: list[Source[int]]
    ) -> None:
        self.held = held
        self._fabric = fabric
        self._peer = peer
        self._start = start
        self._copies = copies  # they hold the memory
        self._waiting = deque(copies)
        self._batches: list[int] = []
        self._failure = ""
        self._over = False

    @property
    def under_way(self) -> bool:
        return bool(self._batches)

    def submit(self) -> None:
        """Starts what there is room for. Raises TransferError when the peer can't be reached."""
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
        """Every copy is waited for, even once one has failed: the others' sources are still being read."""
        under_way = []
        for batch in self._batches:
            status = self._fabric.status(self._peer, batch)
            if status == _UNDER_WAY:
                under_way.append(batch)
            elif status != _LANDED:
                self.give_up(f"Mooncake couldn't write to the region at {self._peer}: it or its owner is gone")
        self._batches = under_way
        try:
            self.submit()
        except TransferError as error:
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """Starts no further copy; ``done`` raises once the last that has started is over."""
        self._failure = self._failure or reason
        self._waiting.clear()

    def cancel(self) -> None:
        """Copies that haven't started don't."""
        if not self._over and self._waiting:
            self.give_up("the write was cancelled")

    def fail(self, reason: str) -> None:
        self._failure, self._over = reason, True


@contextlib.contextmanager
def _forced(protocol: str) -> Iterator[None]:
    """Mooncake goes by the network cards that it finds rather than by the protocol that it is given."""
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
    """An engine that isn't initialized yet. Raises StartError when Mooncake, or a library of the system's that it
    needs, isn't installed."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it has no quieter one: it says "E" where we raise, too
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ModuleNotFoundError as error:
        raise StartError(f"the mooncake fabric needs Mooncake: pip install 'triptych[mooncake]' ({error})") from None
    except ImportError as error:
        raise StartError(
            "the mooncake fabric needs Mooncake (pip install 'triptych[mooncake]') and the libraries that it links "
            f"to (apt-get install libibverbs1 librdmacm1): {error}"
        ) from None
