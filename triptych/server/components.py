"""What an instance has loaded, and the hosts that it is wired into for a role."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triptych.encode.loop import EncodeLoop
from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.kv_rows import LAYER_ROWS, CacheRows
from triptych.engine.kv_sink import KVSink
from triptych.engine.kv_source import KVSource
from triptych.engine.loop import EngineCore, EngineLoop
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.split_loops import DecodeLoop, PrefillLoop
from triptych.errors import StartError
from triptych.layers.attention.base import KVTensors
from triptych.messages.rows import RowKind, RowLayout, TransferSide
from triptych.server.instance import Instance, RoleLoops
from triptych.server.sender_loop import SenderLoop
from triptych.stage_loop import StageLoop
from triptych.topology import Role
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import SharedMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.sender import Sender


@dataclass(frozen=True)
class EngineComponents:
    """The decoder's side: it stays, weights, KV cache and all it knows of prefixes, whatever is done with it.
    ``embedding_width`` counts elements of ``row_dtype`` in a media row; ``receive_blocks`` are blocks for rows of each
    kind."""

    engine: EngineCore
    cache: KVTensors
    row_dtype: torch.dtype
    embedding_width: int
    receive_blocks: dict[RowKind, int]
    block_rows: int
    check_always: bool


@dataclass(frozen=True)
class Components:
    """All that is loaded. ``check_role`` raises StartError for a role that these settings don't allow;
    ``make_encode_loop`` is None where no tower is loaded, ``language`` where no decoder is."""

    instance: Instance
    check_role: Callable[[Role], None]
    media_layout: RowLayout
    kv_layout: RowLayout
    fabrics: Sequence[Fabric]
    sender: Sender
    make_encode_loop: Callable[[], EncodeLoop] | None
    language: EngineComponents | None

    def check(self, role: Role) -> None:
        """Raises StartError, saying why, for a role that can't be had with these parts."""
        if role.encodes and self.make_encode_loop is None:
            raise StartError("it has not loaded the towers, so it can't encode")
        if role.has_decoder and self.language is None:
            raise StartError("it has not loaded the decoder, so it can neither prefill nor decode")
        self.check_role(role)

    def compose(self, role: Role) -> RoleLoops:
        """New hosts, with a receive buffer of their own if they need one. Raises as ``check`` does, and what allocating
        and registering memory raise; then nothing is left behind."""
        self.check(role)
        language = self._engine_loop(role, self.language) if role.has_decoder and self.language else None
        hosts: list[tuple[StageLoop, TransferSide | None]] = []
        if role.encodes and self.make_encode_loop:
            hosts.append((self.make_encode_loop(), None))
        if role.encodes or role.sends_kv:
            # before the language host: when all is given up, transfers end without a word, and nobody is told twice
            hosts.append((SenderLoop(self.sender), TransferSide.CONSUMER))
        if language:
            hosts.append((language, TransferSide.PRODUCER))
        return RoleLoops(hosts, layouts(self.media_layout, self.kv_layout, has_decoder=self.language is not None))

    def _engine_loop(self, role: Role, parts: EngineComponents) -> EngineLoop:
        """The engine behind prefill and decode, or behind one of them."""
        instance, engine = self.instance, parts.engine
        address, send = instance.channel.address, instance.send
        place = {"address": address, "frontend": instance.frontend}
        if role.takes_kv:
            receiver, no_rows = (
                self._receiver(self.kv_layout, parts),
                MediaEmbeddings.none(parts.embedding_width, parts.row_dtype),
            )
            arriving = KVSource(receiver, CacheRows(parts.cache), instance.name, address, no_rows=no_rows)
            return DecodeLoop(engine, arriving, **place, send=send)
        receiver = self._receiver(self.media_layout, parts)
        incoming = EmbeddingSource(receiver, instance.name, address, parts.row_dtype, parts.embedding_width)
        if role.sends_kv:
            outgoing = KVSink(self.sender, CacheRows(parts.cache), engine.scheduler.pool, self.kv_layout)
            wake, name = instance.channel.wake, instance.name
            return PrefillLoop(engine, incoming, outgoing, wake=wake, name=name, **place, send=send)
        return EngineLoop(engine, incoming, **place, send=send)

    def _receiver(self, layout: RowLayout, parts: EngineComponents) -> Receiver:
        buffer = RowBuffer(
            layout, parts.receive_blocks[layout.kind], parts.block_rows, self.fabrics, allocate=SharedMemory
        )
        grant_rows = LAYER_ROWS if layout.kind is RowKind.KV else 0
        return Receiver(
            buffer,
            self.instance.channel.address,
            self.instance.send,
            grant_rows=grant_rows,
            check_always=parts.check_always,
        )


def layouts(media: RowLayout, kv: RowLayout, *, has_decoder: bool) -> list[RowLayout]:
    """What rows an instance makes or takes, in its role or in another that it can have: KV caches are all alike, and so
    are media rows, so that an instance that changes its role fits, and a request that goes on elsewhere has the same
    tokens."""
    return [media, kv] if has_decoder else [media]
