"""An instance in virtual time: the product's process and stage loops, on devices that only take time."""

import random
from dataclasses import dataclass, field
from functools import partial

import torch

from triptych.config import EncodeConfig, EngineConfig, LeaseConfig
from triptych.costs.profile import Stage
from triptych.encode.loop import EncodeLoop
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import MemoryStore
from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.engine.loop import EngineCore
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Scheduler
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.work import Capacity, Encode, Generate, Prefill
from triptych.server.components import Components, EngineComponents, PoolSize, layouts
from triptych.server.instance import InstanceProcess
from triptych.simulate.channel import SendFrom, TurningChannel
from triptych.simulate.costs import ServiceCosts
from triptych.simulate.devices import (
    TOKEN_ROWS,
    CostFabric,
    CostPreprocessors,
    CostRows,
    CostRunner,
    CostTower,
    NoGrammars,
    Note,
    WorkPace,
)
from triptych.simulate.machine import SharedMachine
from triptych.topology import Role
from triptych.transfer.memory import PlainMemory
from triptych.transfer.sender import Sender
from triptych.types import Address
from triptych.virtual_time import VirtualClock

IDENTITY = ModelIdentity()
EMBEDDINGS = RowLayout(IDENTITY.digest, "uint8", 1, 1)
KV = RowLayout(IDENTITY.digest, "uint8", 1, TOKEN_ROWS.row_bytes, RowKind.KV)


@dataclass(frozen=True)
class SimulatedModel:
    """What a simulation needs to know of a model."""

    context_length: int = 4096
    vocab_size: int = 4096
    kv_token_bytes: int = 64
    """A token's, in all layers."""
    kv_token_rows: int = TOKEN_ROWS.in_all_layers
    """Rows of a token in all layers."""
    embedding_bytes: int = 16
    """Those of a row that an encoder makes."""


@dataclass(frozen=True)
class InstanceSettings:
    """What one instance is, by the product's own settings."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """``threads`` are the instance's own, at least 1, and ``kv_cache_tokens`` its cache, in place of memory."""
    encode: EncodeConfig = field(default_factory=EncodeConfig)

    @property
    def threads(self) -> int:
        return max(1, self.engine.threads)


class SimulatedInstance:
    """An instance, and its channel, which gives it turns."""

    def __init__(
        self,
        name: str,
        role: Role,
        number: int,
        *,
        model: SimulatedModel,
        settings: InstanceSettings,
        costs: ServiceCosts,
        machine: SharedMachine,
        frontend: Address,
        lease: LeaseConfig,
        send: SendFrom,
        clock: VirtualClock,
        rng: random.Random,
        note: Note,
    ) -> None:
        """``number`` is larger for a later process."""
        self.channel = TurningChannel(clock, Address(f"tcp://127.0.0.1:{1000 + number}"), send)
        self.pace = WorkPace(clock, machine, name, settings.threads, costs.of_instance(settings.threads), rng, note)
        self._model, self._settings = model, settings
        engine, encode = settings.engine, settings.encode
        self.process = InstanceProcess(
            name=name,
            role=role,
            model=IDENTITY,
            layouts=layouts(EMBEDDINGS, KV, has_decoder=role.has_decoder),
            capacity=Capacity(engine.max_num_seqs, encode.encode_batch_patches),
            channel=self.channel,
            join=[frontend.removeprefix("tcp://")],
            lease=lease,
            clock=clock,
            start_executor=clock.start_executor,
            incarnation=number + 1,
        )
        row_bytes = {
            RowKind.MEDIA: float(model.embedding_bytes),
            RowKind.KV: model.kv_token_bytes / TOKEN_ROWS.in_all_layers,
        }
        fabric = CostFabric(clock, costs, RowKind.KV if role.takes_kv else RowKind.MEDIA, row_bytes)
        sender = Sender({fabric.name: fabric}, self.channel.address, self.process.send, clock=clock)
        self.process.loop_builder = Components(
            instance=self.process,
            check_device=lambda _: None,
            embedding_layout=EMBEDDINGS,
            kv_layout=KV,
            fabrics=[fabric],
            sender=sender,
            make_encode_loop=partial(self._encode_loop, sender, self._store()) if role.encodes else None,
            engine=self._engine() if role.has_decoder else None,
        )
        self.process.take_role(role)
        self.channel.drive(self.process)

    def deliver(self, message: Message) -> None:
        """Give the instance a message, which its loop takes a while for."""
        self.channel.deliver(message, self.pace.in_loop(self._seconds_of(message)))

    def _seconds_of(self, message: Message) -> float:
        match message:
            case Encode():
                return self.pace.costs.request("encode", 0)
            case Prefill():
                return self.pace.costs.request("prefill", len(message.generate.tokens))
            case Generate():
                stage: Stage = "prefill" if self.process.role.prefills else "decode"
                return self.pace.costs.request(stage, len(message.tokens))
            case _:
                return 0.0

    def _store(self) -> MemoryStore:
        return MemoryStore(self._settings.encode.encode_cache_mb * 2**20 // self._model.embedding_bytes)

    def _encode_loop(self, sender: Sender, store: MemoryStore) -> EncodeLoop:
        process, encode = self.process, self._settings.encode
        workers = encode.decode_workers or max(1, self._settings.threads // 4)
        return EncodeLoop(
            preprocessors=CostPreprocessors(self.pace, workers),
            runner=EncoderRunner(CostTower(self.pace), torch.uint8, process.compute),
            max_patches=encode.encode_batch_patches,
            latency=encode.encode_latency_ms / 1000,
            store=store,
            sender=sender,
            layout=EMBEDDINGS,
            wake=self.channel.wake,
            address=self.channel.address,
            send=process.send,
            clock=self.pace.clock,
            start_executor=self.pace.clock.start_executor,
        )

    def _engine(self) -> EngineComponents:
        engine, model = self._settings.engine, self._model
        tokens = engine.kv_cache_tokens or 4 * model.context_length
        pages = PagePool(max(1, tokens // engine.page_size), engine.page_size)
        scheduler = Scheduler(
            CacheManager([pages]),
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            reuse_prefixes=engine.enable_prefix_caching,
        )
        # a pool of as many tokens as the product's, whose rows are other parts of a token
        block_rows = engine.receive_block_rows * TOKEN_ROWS.in_all_layers / model.kv_token_rows
        return EngineComponents(
            engine=EngineCore(
                scheduler=scheduler,
                runner=CostRunner(self.pace),
                compute=self.process.compute,
                clock=self.pace.clock,
                grammars=NoGrammars(),
                no_media=MediaEmbeddings.none(1, torch.uint8),
                context_length=min(model.context_length, tokens),
                vocab_size=model.vocab_size,
                length_rule=None,
            ),
            kv_rows=CostRows(),
            embedding_dtype=torch.uint8,
            embedding_width=1,
            receive_pools={
                RowKind.MEDIA: PoolSize(engine.receive_blocks, engine.receive_block_rows, allocate=PlainMemory),
                RowKind.KV: PoolSize(
                    engine.kv_receive_blocks,
                    max(1, round(block_rows * TOKEN_ROWS.largest_part)),
                    TOKEN_ROWS.largest_run,
                    PlainMemory,
                ),
            },
            check_always=False,
        )
