"""NIXL over UCX: RDMA where there is a card for it, TCP elsewhere.

Limitations of UCX:

- Nothing is authenticated or encrypted: use a private network. Over TCP the owner's UCX writes to any address that the
  writer's UCX sends, and only the writer's NIXL checks bounds. So a peer that forges UCX's protocol can write to any
  address of the owner. RDMA cards check bounds against the registration.
- UCX reads addresses and keys inside metadata without checking their length. A malicious handle can crash the process
  that writes to it. A digest catches handles that are corrupt by accident.
- Within one machine UCX may write directly into the other process (cross memory attach), like the ``shm`` fabric. A
  peer that has a region open then still reaches its memory after it is deregistered.
"""

import base64
import contextlib
import ctypes
import importlib
import os
import re
import secrets
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from triptych.config import is_loopback
from triptych.errors import RegionError, StartError, TransferError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import CompletedWrite, Copy, Write, check_bounds
from triptych.transfer.fabrics.registration_cache import CachedRegistration, RegistrationCache
from triptych.transfer.fabrics.sealing import seal, unseal
from triptych.transfer.memory import Bytes, Memory

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
"""One wheel per CUDA version. For host memory they are equivalent."""

_LOCATION = re.compile(r"([0-9a-f]{32}):([0-9a-f]{1,16}):([0-9A-Za-z+/=]+)")
"""Agent, address, and metadata in base64, whose length grows with the number of network cards."""

_MAX_LOCATION = 2**17

PROGRESS_MICROSECONDS = 1000
"""How long NIXL's progress thread sleeps at most when no descriptor wakes it. By default, and always with NIXL's Python
wrapper, it never sleeps and occupies one core per agent. So the bindings are used here."""


class NixlFabric:
    """Moves bytes into the memory of processes that UCX reaches.

    Each region has an agent of its own, because UCX over TCP doesn't implement deregistration: only closing the agent
    makes a region unreachable.
    """

    name = "nixl"
    scope = ""
    checksums = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        """``host`` is the address at which peers reach this process. With a loopback address UCX listens on that
        interface only, otherwise on all, or those in UCX_NET_DEVICES. Raises StartError when the library isn't
        installed or can't start."""
        self._nixl = load()
        self._errors: tuple[type[Exception], ...] = tuple(
            kind for kind in vars(self._nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        self._config = "NET_DEVICES=lo" if is_loopback(host) else ""
        try:
            self._writer = self._agent(secrets.token_hex(16))
        except self._errors as error:
            raise StartError(f"NIXL can't start its UCX backend: {error}") from None
        self._sources = RegistrationCache(self._register_source, self._deregister_source)
        self._owned: dict[str, tuple[Any, Any, Bytes]] = {}  # by location: agent, descriptors, memory
        self._opened: dict[RegionHandle, _Peer] = {}
        self._peers: dict[str, _Peer] = {}  # by agent: those opened, and those released with writes in progress
        self._writes: set[_NixlWrite] = set()

    def _agent(self, name: str) -> Any:
        config = self._nixl.nixlAgentConfig()
        # over TCP the owner's CPU takes part in writes, even while its own thread is busy
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_MICROSECONDS
        agent = self._nixl.nixlAgent(name, config)
        agent.createBackend("UCX", {"engine_config": self._config} if self._config else {})
        return agent

    def _register_source(self, start: int, num_bytes: int) -> Any:
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(start, num_bytes, 0, "")])
        self._writer.registerMem(descriptors, [])
        return descriptors

    def _deregister_source(self, descriptors: Any) -> None:
        self._writer.deregisterMem(descriptors, [])

    def register(self, memory: Memory) -> RegionHandle:
        name, start, size = secrets.token_hex(16), memory.bytes.ctypes.data, memory.bytes.nbytes
        try:
            agent = self._agent(name)
            descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(start, size, 0, "")])
            agent.registerMem(descriptors, [])
            metadata = base64.b64encode(agent.getLocalMD()).decode()
        except self._errors as error:
            raise RegionError(f"NIXL can't register {size} bytes: {error}") from None
        region = seal(self.name, f"{name}:{start:x}:{metadata}", size)
        self._owned[region.location] = agent, descriptors, memory.bytes
        return region

    def deregister(self, region: RegionHandle) -> None:
        if (owned := self._owned.pop(region.location, None)) is not None:
            agent, descriptors, _ = owned
            agent.deregisterMem(descriptors, [])

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        peer = self._open(region)
        check_bounds(region, copies)
        copies = [copy for copy in copies if copy.source.nbytes]
        if not copies:
            return CompletedWrite()
        here = [(copy.source.ctypes.data, copy.source.nbytes, 0) for copy in copies]
        there = [(peer.start + copy.offset, copy.source.nbytes, 0) for copy in copies]
        sources: list[CachedRegistration[Any]] = []
        handle: int | None = None
        try:
            sources = self._sources.acquire(
                (copy.source, start) for copy, (start, _, _) in zip(copies, here, strict=True)
            )
            handle = self._writer.createXferReq(
                self._nixl.NIXL_WRITE, self._descriptors(here), self._descriptors(there), peer.name, "", []
            )
            self._writer.postXferReq(handle, "")
        except self._errors as error:
            if handle is not None:
                with contextlib.suppress(*self._errors):
                    self._writer.releaseXferReq(handle)
            self._sources.release(sources)
            self._lose(peer)
            raise RegionError(f"NIXL can't write to the region: {error}") from None
        write = _NixlWrite(self, peer, handle, copies, sources)
        peer.writes += 1
        self._writes.add(write)
        return write

    def _descriptors(self, ranges: list[tuple[int, int, int]]) -> Any:
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, np.array(ranges, dtype=np.uint64))

    def _open(self, region: RegionHandle) -> "_Peer":
        if region not in self._opened:
            self._opened[region] = self._connect(region)
        return self._opened[region]

    def _connect(self, region: RegionHandle) -> "_Peer":
        parts = _LOCATION.fullmatch(unseal(self.name, region, _MAX_LOCATION))
        if parts is None:
            raise RegionError(f"not a NIXL region: {region.location[:80]}")
        if self._writer is None:
            raise RegionError("the fabric is closed")
        name, start = parts[1], int(parts[2], 16)
        if start + region.num_bytes > 2**64:
            raise RegionError("the region goes beyond the end of memory")
        if (peer := self._peers.get(name)) is not None:
            if peer.region != region or peer.lost:
                raise RegionError("the region's owner was lost, or is open under another handle")
            return peer
        refused: tuple[type[Exception], ...] = (*self._errors, RegionError, ValueError)
        try:
            loaded = self._writer.loadRemoteMD(base64.b64decode(parts[3], validate=True))
            if loaded.decode() != name:
                raise RegionError("the region's handle names another agent than its metadata")
        except refused as error:
            self._unload(name)
            raise RegionError(f"NIXL can't open the region: {error}") from None
        peer = self._peers[name] = _Peer(region, name, start)
        return peer

    def _unload(self, name: str) -> None:
        with contextlib.suppress(*self._errors):  # it raises when nothing was loaded
            self._writer.invalidateRemoteMD(name)

    def release(self, region: RegionHandle) -> None:
        """Close a region. NIXL drops the peer after its last write in progress."""
        if (peer := self._opened.pop(region, None)) is not None:
            self._unload_unused(peer)

    def _unload_unused(self, peer: "_Peer") -> None:
        if not peer.writes and peer.region not in self._opened:
            self._unload(peer.name)
            del self._peers[peer.name]

    def _lose(self, peer: "_Peer") -> None:
        """Close a peer after a failure: all further writes to it would fail, until it is loaded again."""
        peer.lost = True
        self.release(peer.region)

    def poll(self, write: "_NixlWrite", handle: int) -> bool:
        """Return whether a write is done. Raises TransferError when it has failed."""
        try:
            if self._writer.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return False
        except self._errors as error:
            self._lose(write.peer)
            self._finish(write, handle)
            raise TransferError(f"NIXL lost the region's owner: {error}") from None
        self._finish(write, handle)
        return True

    def _finish(self, write: "_NixlWrite", handle: int) -> None:
        with contextlib.suppress(*self._errors):
            self._writer.releaseXferReq(handle)
        self._writes.discard(write)
        self._sources.release(write.sources)
        write.peer.writes -= 1
        self._unload_unused(write.peer)

    def close(self) -> None:
        """Fail writes in progress. Their sources are released with the agent, whose threads and sockets end here."""
        for write in list(self._writes):
            write.fail("the fabric was closed")
        self._writes.clear()
        self._opened.clear()
        self._peers.clear()
        for location in list(self._owned):
            self.deregister(RegionHandle(self.name, location, 1))
        self._writer = None


class _Peer:
    """A region's owner, loaded into NIXL. ``start`` is the region's address there."""

    def __init__(self, region: RegionHandle, name: str, start: int) -> None:
        self.region = region
        self.name = name
        self.start = start
        self.writes = 0
        self.lost = False


class _NixlWrite:
    """A posted request. NIXL's progress thread advances it, and so does polling."""

    def __init__(
        self,
        fabric: NixlFabric,
        peer: _Peer,
        handle: int,
        copies: Sequence[Copy],
        sources: list[CachedRegistration[Any]],
    ) -> None:
        self.peer = peer
        self.sources = sources
        self._copies = copies  # keep the memory alive
        self._fabric = fabric
        self._handle: int | None = handle
        self._failure = ""

    def done(self) -> bool:
        if self._failure:
            raise TransferError(self._failure)
        if self._handle is not None:
            try:
                if not self._fabric.poll(self, self._handle):
                    return False
            except TransferError as error:
                self.fail(str(error))
                raise
            self._handle = None
        return True

    def cancel(self) -> None:
        """Do nothing: UCX can't cancel a put that a network card may be reading from."""

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._handle = None


def load() -> ModuleType:
    """Return NIXL's bindings. Raises StartError when they aren't installed."""
    for variable in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        os.environ.setdefault(variable, "FATAL")  # relevant errors are raised
    # UCX bundles libnl and, with RDMA drivers installed, loads the system's libnl after it. That one then binds to
    # functions of the bundled one, and the process crashes at exit. Loaded first, it binds to its own functions.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise StartError(f"the nixl fabric needs NIXL: pip install '.[nixl]' in a checkout ({'; '.join(reasons)})")
