"""A service in virtual time: a real router, and real instances of every role, whose devices are models of their cost.

Equal seeds give equal traces. Only names that are random by design differ; traces have none of them.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from triptych.simulate.channel import TurningChannel
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.demo import MODEL_DIR
from triptych.encode.loop import EncodeLoop
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import MemoryStore
from triptych.engine.cache_manager import CacheManager
from triptych.engine.cache_rows import cache_rows
from triptych.engine.grammar.service import GrammarService
from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_rows import TokenRows
from triptych.engine.loop import EngineCore
from triptych.engine.runner import MediaEmbeddings, Runner
from triptych.engine.scheduler import Scheduler
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import CacheSpec
from triptych.layers.decoder import AfterLayer, ForwardBatch
from triptych.layers.encoder import PreprocessedPart
from triptych.messages.codec import Message, decode, encode
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.work import Capacity, Encode, Generate, Prefill
from triptych.models.base import EncoderInput, Parts, chosen
from triptych.router.router import Router
from triptych.server.components import Components, EngineComponents, PoolSize, layouts
from triptych.server.instance import InstanceProcess
from triptych.topology import Role
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.sender import Sender
from triptych.types import Address, ItemPlan
from triptych.virtual_time import VirtualClock

IDENTITY = ModelIdentity()
VOCABULARY, CONTEXT = 4096, 4096
WIDTH, PAGE, LAYERS = 4, 16, 2
MAX_SEQS, STEP_TOKENS, MAX_PATCHES = 8, 64, 256
CPU = torch.device("cpu")
SPECS = [CacheSpec(1, (WIDTH, WIDTH), cache_format(torch.float32))] * LAYERS
KV_ROWS = TokenRows(SPECS)
EMBEDDINGS = RowLayout(IDENTITY.digest, "float32", WIDTH, 4 * WIDTH)
KV = RowLayout(IDENTITY.digest, "float32", WIDTH, KV_ROWS.row_bytes, RowKind.KV)
POOLS = {RowKind.MEDIA: PoolSize(64, 8), RowKind.KV: PoolSize(64, 8 * KV_ROWS.largest_part, KV_ROWS.largest_run)}
FRONTEND = Address("tcp://127.0.0.1:1")
LEASE = LeaseConfig(heartbeat=0.5, lease_expiry=3.0)
TICK = 0.1


@dataclass(frozen=True)
class Costs:
    """Seconds that work takes."""

    step: float = 0.004
    token: float = 0.0002
    batch: float = 0.003
    patch: float = 0.0001
    preprocess: float = 0.00005
    """A patch's."""
    hop: float = 0.0003
    jitter: float = 0.0004
    """Most seconds that a message takes beyond ``hop``."""


Note = Callable[..., None]
"""Adds what happened to the trace, with its time."""


@dataclass(frozen=True)
class CostDecoder:
    """A decoder that takes time. Every next token is the first of the vocabulary."""

    clock: VirtualClock
    costs: Costs
    note: Note

    def __call__(self, batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None) -> Tensor:
        (attention,) = batch.attention
        self.note("step", list(zip(attention.query_lens, attention.kv_lens, strict=True)))
        seconds = self.costs.step + self.costs.token * len(batch.tokens)
        for layer in range(LAYERS):
            self.clock.sleep(seconds / LAYERS)
            if after_layer is not None:
                after_layer(layer)
        return torch.zeros(len(batch.logits_index), VOCABULARY)


@dataclass(frozen=True)
class CostTower:
    """A tower that takes time. The second value of a part's patches is its number of rows."""

    clock: VirtualClock
    costs: Costs
    note: Note
    embedding_width = WIDTH

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        patches = sum(len(part.patches) for part in inputs)
        self.note("batch", patches, [int(part.patches[0, 0]) for part in inputs])
        self.clock.sleep(self.costs.batch + self.costs.patch * patches)
        return [torch.zeros(int(part.patches[0, 1]), WIDTH) for part in inputs]


@dataclass
class CostPreprocessors:
    """Preprocessors that take time. A part's first patch has its name, and its number of rows."""

    clock: VirtualClock
    costs: Costs
    number: int = 2

    @property
    def pids(self) -> list[int]:
        return []

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        for number in chosen(plan, parts):
            patches = plan.parts[number].patches
            self.clock.sleep(self.costs.preprocess * patches)
            name = 1000 * int(data) + number
            values = np.full((patches, 2), (name, plan.rows_of(number)), np.float32)
            yield EncoderInput(values, (1, 1, patches), f"part {name}")

    def close(self) -> None: ...


class SimulatedInstance:
    """An instance, and its channel, which gives it turns."""

    def __init__(self, world: "Simulation", name: str, role: Role, number: int) -> None:
        self.channel = TurningChannel(world.clock, Address(f"tcp://127.0.0.1:{1000 + number}"), world.send)
        self.process = InstanceProcess(
            name=name,
            role=role,
            model=IDENTITY,
            layouts=layouts(EMBEDDINGS, KV, has_decoder=role.has_decoder),
            capacity=Capacity(MAX_SEQS if role.has_decoder else 0, MAX_PATCHES if role.encodes else 0),
            channel=self.channel,
            join=[FRONTEND.removeprefix("tcp://")],
            lease=LEASE,
            clock=world.clock,
            start_executor=world.clock.start_executor,
            incarnation=number + 1,
        )
        self.process.loop_builder = world.components(self.process)
        self.process.take_role(role)


class Simulation:
    """The service: a frontend's router, instances by name, and a network that takes its time."""

    def __init__(self, seed: int, roles: Mapping[str, Role], costs: Costs, **admission: object) -> None:
        self.clock, self._rng, self._costs = VirtualClock(), random.Random(seed), costs
        self.trace: list[tuple[object, ...]] = []
        self._arrivals: dict[tuple[Address, Address], float] = {}
        self._fabric = LocalFabric()
        self._grammars = GrammarService(Path(MODEL_DIR), VOCABULARY, lambda: None, self.clock.start_executor)
        self.router = Router(
            address=FRONTEND,
            send=partial(self.send, FRONTEND),
            disconnect=lambda _: None,
            identity=IDENTITY,
            admission=AdmissionConfig(**{"request_timeout": 600.0, "restart_hold": 0.0} | admission),  # type: ignore[arg-type]
            lease=LEASE,
            expects_encoders=any(role.encodes for role in roles.values()),
            clock=self.clock,
        )
        self.instances: dict[Address, SimulatedInstance] = {}
        self._lost: list[SimulatedInstance] = []
        for name, role in roles.items():
            self.start(name, role)
        self._tick()

    def start(self, name: str, role: Role) -> None:
        made = SimulatedInstance(self, name, role, len(self.instances) + len(self._lost))
        self.instances[made.channel.address] = made
        made.channel.drive(made.process)

    def lose(self, name: str, seconds: float) -> None:
        """Kill an instance, and start another process in its place after that time."""
        (one,) = [one for one in self.instances.values() if one.process.name == name]
        one.channel.is_lost = True
        self._lost.append(self.instances.pop(one.channel.address))
        self.note("lost", name)
        self.clock.call_at(self.clock.monotonic() + seconds, partial(self.start, name, one.process.role))

    def components(self, process: InstanceProcess) -> Components:
        """What an instance has loaded."""
        make_encode_loop = engine = None
        note = partial(self.note, process.name)
        sender = Sender({self._fabric.name: self._fabric}, process.channel.address, process.send, clock=self.clock)
        if process.role.encodes:
            tower, store = CostTower(self.clock, self._costs, note), MemoryStore(64 * 2**10)
            make_encode_loop = partial(
                EncodeLoop,
                preprocessors=CostPreprocessors(self.clock, self._costs),
                runner=EncoderRunner(tower, torch.float32, process.compute),
                max_patches=MAX_PATCHES,
                store=store,
                sender=sender,
                layout=EMBEDDINGS,
                wake=process.channel.wake,
                address=process.channel.address,
                send=process.send,
                clock=self.clock,
                start_executor=self.clock.start_executor,
            )
        if process.role.has_decoder:
            engine = self._engine(process, CostDecoder(self.clock, self._costs, note))
        return Components(
            instance=process,
            check_device=lambda _: None,
            embedding_layout=EMBEDDINGS,
            kv_layout=KV,
            fabrics=[self._fabric],
            sender=sender,
            make_encode_loop=make_encode_loop,
            engine=engine,
        )

    def _engine(self, process: InstanceProcess, decoder: CostDecoder) -> EngineComponents:
        num_pages = 192
        cache = KVTensors.allocate(SPECS, [num_pages], PAGE, CPU)
        return EngineComponents(
            engine=EngineCore(
                scheduler=Scheduler(CacheManager([PagePool(num_pages, PAGE)]), MAX_SEQS, STEP_TOKENS),
                runner=Runner(decoder, cache, PAGE),
                compute=process.compute,
                clock=self.clock,
                grammars=self._grammars,
                no_media=MediaEmbeddings.none(WIDTH, torch.float32),
                context_length=CONTEXT,
                vocab_size=VOCABULARY,
                length_rule=None,
            ),
            kv_rows=cache_rows(cache, KV_ROWS),
            embedding_dtype=torch.float32,
            embedding_width=WIDTH,
            receive_pools=POOLS,
            check_always=False,
        )

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────

    def note(self, *what: object) -> None:
        self.trace.append((round(self.clock.monotonic(), 9), *what))

    def send(self, sender: Address, to: Address, message: Message) -> None:
        """Deliver a copy of a message after a while, behind those that this one has been sent by the same sender."""
        data, link = encode(message), (sender, to)
        takes = self._costs.hop + self._costs.jitter * self._rng.random()
        arrival = self._arrivals[link] = max(self._arrivals.get(link, 0.0), self.clock.monotonic() + takes)
        if sender == FRONTEND and to in self.instances and (about := self._about(message)) is not None:
            self.note("to", self.instances[to].process.name, type(message).__name__, about)
        self.clock.call_at(arrival, lambda: self._deliver(to, decode(data)))

    def _about(self, message: Message) -> str | int | None:
        """The request that a message places, by its number, or the item; None for other messages."""
        if isinstance(message, Encode):
            return int(message.key, 16)
        request = message.generate if isinstance(message, Prefill) else message
        if not isinstance(request, Generate):
            return None
        state = self.router.lifecycle.requests.current(request.request)
        assert state is not None, "it is given to an instance"
        return state.http_id

    def _deliver(self, to: Address, message: Message) -> None:
        if to == FRONTEND:
            self.router.handle(message)
        elif to in self.instances:
            self.instances[to].channel.deliver(message)

    def _tick(self) -> None:
        self.router.tick()
        self.clock.call_at(self.clock.monotonic() + TICK, self._tick)

    def until(self, condition: Callable[[], object], seconds: float) -> None:
        """Let time pass until something is so, for ``seconds`` at most."""
        end = self.clock.monotonic() + seconds
        while not condition():
            assert self.clock.step()
            assert self.clock.monotonic() < end, f"not within {seconds:g} s"

    def close(self) -> None:
        for one in (*self.instances.values(), *self._lost):
            one.process.end()
        self._grammars.close()
        self._fabric.close()
