"""Has waiting work go on: requests, prompts and media items, each to an instance that has room for it.

Everything else only changes state, and ``Pump.run`` follows once. So no change has to know what waits for it.
"""

import functools
from collections.abc import Sequence

from triptych.clock import Clock
from triptych.errors import InstanceLost
from triptych.router.admission import Admission
from triptych.router.availability import Availability
from triptych.router.encode_dispatcher import EncodeDispatcher
from triptych.router.instance import Instance, WorkKind
from triptych.router.membership import Membership
from triptych.router.placement import PlacementPolicy
from triptych.router.prefix_placement import PrefixPlacement
from triptych.router.quarantine import Quarantine
from triptych.router.request_state import RequestState
from triptych.router.request_table import RequestTable
from triptych.router.transitions import LOST, Transitions
from triptych.topology import Stage


class Pump:
    """Brings all that waits to the instances that may have it."""

    def __init__(
        self,
        *,
        requests: RequestTable,
        admission: Admission,
        encodes: EncodeDispatcher,
        transitions: Transitions,
        membership: Membership,
        availability: Availability,
        quarantine: Quarantine,
        policy: PlacementPolicy,
        clock: Clock,
    ) -> None:
        self._requests = requests
        self._admission = admission
        self._encodes = encodes
        self._transitions = transitions
        self._membership = membership
        self._availability = availability
        self._quarantine = quarantine
        self._clock = clock
        self._decode_placement = PrefixPlacement(policy)
        self._prefill_placement = PrefixPlacement(policy)
        self._missing = list[Stage]()
        """Stages that no instance runs, or will run soon."""
        self._seen = self._version

    def run(self, *, time_passed: bool = False) -> None:
        """Have everything go on that can, and fail what no instance can serve. Call once after each message, tick and
        submission; ``time_passed`` a few times a second. Does nothing unless something may go on by now."""
        if not time_passed and self._version == self._seen:
            return
        if time_passed or self._membership.number != self._seen[-1]:
            now = self._clock.now()
            self._missing = [stage for stage in Stage if not self._membership.serves(stage, now)]
        freed = None
        while freed != self._transitions.num_freed:  # what it ends or moves makes room; all else only takes some
            freed = self._transitions.num_freed
            if self._missing:
                self._fail_unservable()
            self._place_prompts()
            self._encodes.dispatch()
            self._dispatch_queued()
        self._seen = self._version

    @property
    def _version(self) -> tuple[int, int, int]:
        """Another value once something may go on."""
        return self._requests.num_openings, self._encodes.num_openings, self._membership.number

    def _fail_unservable(self) -> None:
        """Fail the requests that wait for a stage that no instance runs, or will run soon."""
        missing, members = self._missing, self._membership
        if missing != [Stage.ENCODE] or self._admission.has_queued_items:
            for state in self._admission.queued():
                if unavailable := self._availability.unavailable(has_media=bool(state.prompt.items)):
                    self._transitions.fail(state, InstanceLost(LOST) if state.interrupted else unavailable)
        if Stage.ENCODE in missing and len(self._encodes) and not members.encode_instances(begun=True):
            for request in self._encodes.queued_requests():
                if waiting := self._requests.get(request):
                    self._transitions.fail_missing(waiting, Stage.ENCODE)
        if Stage.PREFILL in missing and not members.prefill_instances(begun=True):
            for state in self._requests.waiting_for_prefill:
                self._transitions.fail_missing(state, Stage.PREFILL)

    def _place_prompts(self) -> None:
        """Send prompts that wait to prefill instances. Without one, their requests move to an instance that prefills
        for itself."""
        if not (waiting := self._requests.waiting_for_prefill):
            return
        instances = self._membership.prefill_instances(begun=True)
        if not instances and not self._membership.serving_instances():
            return
        for state in waiting:
            needed = state.prefill_needed
            assert needed is not None, "it waits"
            if not instances:
                self._transitions.requeue(state)
            elif allowed := self._quarantine.allowed(state, instances):
                instance = self._prefill_placement.place(state, allowed, state.num_to_prefill(needed))
                assert instance is not None
                self._transitions.prefill(state, needed, instance)

    def _dispatch_queued(self) -> None:
        """Dispatch queued requests to instances that have room, in the order of admission."""
        instances = self._membership.serving_instances() if len(self._admission) else []
        while len(self._admission):
            ready = [one for one in instances if one.has_room]
            rooms = {True: [one for one in ready if one.has_stalling_room], False: ready}
            if not ready:
                return
            # those that may stall aren't looked through while no instance has room for one: they may be many
            kinds = (WorkKind.READY, WorkKind.MAY_STALL) if rooms[True] else (WorkKind.READY,)
            request = self._admission.next(functools.partial(self._has_room, rooms), kinds)
            if request is None:
                return
            instance = self._decode_placement.place(request, self._with_room(rooms, request), request.token_cost)
            assert instance is not None
            self._transitions.dispatch(request, instance)

    def _has_room(self, rooms: dict[bool, list[Instance]], state: RequestState) -> bool:
        """``rooms`` are the instances that have room for a request that may stall, and for any other one."""
        return bool(self._with_room(rooms, state))

    def _with_room(self, rooms: dict[bool, list[Instance]], state: RequestState) -> Sequence[Instance]:
        """Return the instances that have room for a request."""
        return self._quarantine.allowed(state, rooms[state.may_stall])
