"""Requests that a seed makes, and the history of the service that they are asked of in virtual time."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.plans import plan_of
from triptych.config import AdmissionConfig, EncodeConfig, EngineConfig, LeaseConfig
from triptych.messages.work import Encode, Generate, Prefill
from triptych.simulate.costs import LinearCosts, ServiceCosts
from triptych.simulate.instance import InstanceSettings
from triptych.simulate.load import Asked, ItemAsked, SimulatedLoad
from triptych.simulate.service import SimulatedService
from triptych.topology import Role
from triptych.types import ItemPlan

NUM_ITEMS = 12
"""Distinct items: some are asked about again and again."""
MAX_SEQS, STEP_TOKENS, MAX_PATCHES = 8, 64, 256
SETTINGS = InstanceSettings(
    EngineConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_tokens=192 * 16,
        receive_block_rows=8,
        kv_receive_blocks=64,
    ),
    EncodeConfig(encode_batch_patches=MAX_PATCHES, decode_workers=2),
)
LEASE = LeaseConfig(heartbeat=0.5, lease_expiry=3.0)


def requests(seed: int, number: int, rate: float) -> Iterator[Asked]:
    """Items, then text; some texts begin as others do. ``rate`` is in requests per second."""
    rng, plans = random.Random(f"load {seed}"), random.Random(f"items {seed}")
    items = [ItemAsked(f"item {one}", _plan(plans)) for one in range(NUM_ITEMS)]
    prefix, when = [plans.randrange(1, 256) for _ in range(48)], 0.0
    for _ in range(number):
        when += rng.expovariate(rate)
        chosen = rng.sample(items, rng.choice([0, 0, 1, 1, 2, 3]))
        text = (prefix if rng.random() < 0.5 else []) + [rng.randrange(1, 256) for _ in range(rng.randint(4, 80))]
        yield Asked(when, text, rng.randint(1, 24), tuple(chosen), f"client {rng.randrange(3)}")


def _plan(rng: random.Random) -> ItemPlan:
    """A picture's, of one part, or a long video's, of several."""
    rows = [rng.randint(2, 30) for _ in range(rng.choice([1, 1, 1, 6]))]
    return plan_of(*rows, patches=[4 * one for one in rows], cost=float(4 * sum(rows)))


@dataclass
class World:
    """A service in virtual time that remembers what happens."""

    seed: int
    roles: Mapping[str, Role]
    costs: ServiceCosts = field(default_factory=LinearCosts)
    max_queue: int = 20
    trace: list[tuple[object, ...]] = field(default_factory=list)
    """Each with its time, and whose it is or what."""

    def __post_init__(self) -> None:
        self.service = SimulatedService(
            self.seed,
            self.roles,
            self.costs,
            settings=SETTINGS,
            admission=AdmissionConfig(max_queue=self.max_queue, restart_hold=60.0),
            lease=LEASE,
            note=self._note,
        )

    def ask(self, number: int, rate: float) -> SimulatedLoad:
        return SimulatedLoad(self.service, requests(self.seed, number, rate))

    def _note(self, *what: object) -> None:
        told, *rest = what
        if told == "sent":
            name, message = rest
            if isinstance(message, Encode):
                told, rest = "to", [name, "Encode", message.key]
            elif isinstance(message, Generate | Prefill):
                request = message.generate if isinstance(message, Prefill) else message
                state = self.service.router.lifecycle.requests.current(request.request)
                assert state is not None, "it is given to an instance"
                told, rest = "to", [name, type(message).__name__, state.http_id]
            else:
                return
        self.trace.append((round(self.service.clock.monotonic(), 9), told, *rest))

    @property
    def history(self) -> str:
        """All that happened, line by line."""
        return "\n".join(map(str, self.trace))
