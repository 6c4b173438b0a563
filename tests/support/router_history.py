"""Anything that may happen to a router, in any order."""

import contextlib

from tests.support.router_harness import D0, E0, E1, P0, PD0, PD1, RouterHarness
from triptych.errors import ServiceError
from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState
from triptych.messages.stats import EncodeStats, InstanceStats
from triptych.messages.work import Deregister, Encode, Encoded, Heartbeat, PrefillNeeded, Tokens
from triptych.topology import Role
from triptych.types import Address, TransferId

ALL = [E0, E1, PD0, PD1, P0, D0]
LAST_ACTION = 9


class RouterHistory:
    """Things that happen to a router, one by one."""

    def __init__(self, *instances: Address) -> None:
        self.harness = RouterHarness(*instances, max_queue=30, max_num_seqs=3, restart_hold=30.0)
        self.alive = list(instances)
        self.num_beats = 0

    def act(self, action: int, choice: int) -> None:
        """Have something happen, 0 to ``LAST_ACTION``, to one of those that it may happen to."""
        handle = self.harness.router.handle
        states = list(self.harness.router.lifecycle.requests)
        state = states[choice % len(states)] if states else None
        with contextlib.suppress(ServiceError):  # the service is full
            match action:
                case 0 | 1:
                    self.harness.submit(*[1.0] * (choice % 3), client=f"client {choice % 2}")
                case 2 if self.alive:
                    self.num_beats += 1
                    self.beat(self.alive[choice % len(self.alive)])
                case 3:
                    self.harness.wait(choice / 16, *self.alive)
                case 4 if self.alive:
                    address = self.alive.pop(choice % len(self.alive))
                    handle(Deregister(address, suspect=choice % 2 == 0))
                case 5 if lost := [one for one in ALL if one not in self.alive]:
                    self.alive.append(lost[choice % len(lost)])
                    self.harness.register(self.alive[-1], pid=choice + 2)
                case 6:
                    process = LaunchedInstance("e0", Role.E, LaunchState.STARTING, restarts=choice, incarnation=99)
                    handle(LauncherReport(Address("launcher"), [process][: choice % 2]))
                case 7 if sent := self.harness.of(Encode):
                    handle(Encoded(sent[choice % len(sent)][1].transfer, cached=False, intervals=[]))
                case 8 if state is not None and state.decode is not None:
                    consumer, request = state.decode.instance.address, state.generate.request
                    if state.prompt.items:
                        self.harness.need(state.stream, *range(len(state.prompt.items)))
                    handle(PrefillNeeded(request, consumer, TransferId(f"kv {request} {choice}"), 0, [], choice))
                case 9 if state is not None:
                    reason = "length" if choice % 4 == 0 else None
                    handle(Tokens(state.generate.request, [7], len(state.generated), finish_reason=reason))

    def beat(self, address: Address) -> None:
        counters = EncodeStats(1, 1, self.num_beats, 4 * self.num_beats, self.num_beats, 0, 0)
        self.harness.router.handle(Heartbeat(address, InstanceStats(counters, busy_seconds=0.1 * self.num_beats)))
