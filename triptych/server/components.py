"""What an instance has loaded, and the stage loops that it is wired into for a role."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triptych.encode.loop import EncodeLoop
from triptych.engine.cache_rows import CacheRows
from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.incoming import IncomingTransfers
from triptych.engine.kv_sink import KVSink
from triptych.engine.kv_source import KVSource
from triptych.engine.loop import EngineCore, EngineLoop
from triptych.errors import StartError
from triptych.messages.rows import RowKind, RowLayout, TransferSide
from triptych.server.instance import InstanceProcess, RoleLoops
from triptych.server.sender_loop import SenderLoop
from triptych.stage_loop import StageLoop
from triptych.topology import Role
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import Allocate, SharedMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.sender import Sender


@dataclass(frozen=True)
class PoolSize:
    """Size of a receive buffer."""

    num_blocks: int
    block_rows: int
    grant_rows: int = 0
    """Largest size of a grant in rows; 0: no limit."""
    allocate: Allocate = SharedMemory

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.block_rows


@dataclass(frozen=True)
class EngineComponents:
    """What prefill and decode need. It outlives changes of role: weights, KV cache and prefix cache stay."""

    engine: EngineCore
    kv_rows: CacheRows
    """The rows of the KV cache."""
    embedding_dtype: torch.dtype
    embedding_width: int
    """Elements of an embedding."""
    receive_pools: dict[RowKind, PoolSize]
    """Size of the receive buffer for rows of each kind."""
    check_always: bool
    """Whether rows are checked end to end over every fabric."""


@dataclass(frozen=True)
class Components:
    """All that an instance has loaded."""

    instance: InstanceProcess
    check_device: Callable[[Role], None]
    """Raises StartError for a role that the device doesn't support."""
    embedding_layout: RowLayout
    kv_layout: RowLayout
    fabrics: Sequence[Fabric]
    sender: Sender
    make_encode_loop: Callable[[], EncodeLoop] | None
    """None where no encoder is loaded."""
    engine: EngineComponents | None
    """None where no decoder is loaded."""

    def check_role(self, role: Role) -> None:
        """Raise StartError, with the reason, for a role that these components don't allow."""
        if role.encodes and self.make_encode_loop is None:
            raise StartError("it has not loaded the encoder, so it can't encode")
        if role.has_decoder and self.engine is None:
            raise StartError("it has not loaded the decoder, so it can neither prefill nor decode")
        self.check_device(role)

    def build_loops(self, role: Role) -> RoleLoops:
        """Return new loops, with a receive buffer of their own if they need one. Raises what ``check_role`` does, and
        what allocating and registering memory raise; then nothing is left behind."""
        self.check_role(role)
        engine_loop = self._engine_loop(role, self.engine) if role.has_decoder and self.engine else None
        loops: list[tuple[StageLoop, TransferSide | None]] = []
        if role.encodes and self.make_encode_loop:
            loops.append((self.make_encode_loop(), None))
        if role.encodes or role.sends_kv:
            # before the engine's loop: when everything is aborted, the transfers end first, without a second message
            loops.append((SenderLoop(self.sender), TransferSide.CONSUMER))
        if engine_loop:
            loops.append((engine_loop, TransferSide.PRODUCER))
        return RoleLoops(loops, layouts(self.embedding_layout, self.kv_layout, has_decoder=self.engine is not None))

    def _engine_loop(self, role: Role, parts: EngineComponents) -> EngineLoop:
        """Return the loop for prefill and decode, or for one of them."""
        instance, cache = self.instance, parts.kv_rows
        address, send = instance.channel.address, instance.send
        receiver = self._receiver(self.kv_layout if role.takes_kv else self.embedding_layout, parts)
        incoming = IncomingTransfers(receiver, instance.name, instance.clock)
        embedding_source = kv_source = kv_sink = None
        if role.takes_kv:
            kv_source = KVSource(incoming, cache, address, parts.engine.runner.states)
        else:
            embedding_source = EmbeddingSource(incoming, address, parts.embedding_dtype, parts.embedding_width)
        if role.sends_kv:
            manager, wake = parts.engine.scheduler.cache, instance.channel.wake
            kv_sink = KVSink(self.sender, cache, manager, self.kv_layout, wake=wake)
        return EngineLoop(
            parts.engine,
            incoming,
            embedding_source=embedding_source,
            kv_source=kv_source,
            kv_sink=kv_sink,
            name=instance.name,
            address=address,
            send=send,
        )

    def _receiver(self, layout: RowLayout, parts: EngineComponents) -> Receiver:
        pool = parts.receive_pools[layout.kind]
        return Receiver(
            RowBuffer(layout, pool.num_blocks, pool.block_rows, self.fabrics, pool.allocate),
            self.instance.channel.address,
            self.instance.send,
            grant_rows=pool.grant_rows,
            check_always=parts.check_always,
            clock=self.instance.clock,
        )


def layouts(embeddings: RowLayout, kv: RowLayout, *, has_decoder: bool) -> list[RowLayout]:
    """Return the row layouts that an instance registers, for all roles that it may change to. So a role change keeps it
    compatible with the cluster, and requests that move elsewhere get the same tokens."""
    return [embeddings, kv] if has_decoder else [embeddings]
