"""Membership: the registered instances, with their leases, roles and capacities."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import LaunchedInstance, LaunchState
from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.work import Heartbeat, Register
from triptych.router.instance import Account, Instance
from triptych.router.launcher_view import LauncherView
from triptych.topology import Role, Stage
from triptych.types import Address

_DTYPE_SETTINGS = {
    RowKind.MEDIA: "--dtype, --encoder-quantization",
    RowKind.KV: "--dtype, --quantization, --kv-cache-dtype",
}
"""The settings that decide the format of rows, by their kind."""

_JOINED = (LaunchState.READY, LaunchState.DRAINING)
"""States of instances that have joined, or are about to leave."""

AVOIDED_SECONDS = 2.0
"""Seconds for which an instance that has failed, perhaps by its own fault, is given no work that others can take. It
would look idle, and so attract all of it."""


@dataclass
class Membership:
    """All instances that hold a lease. Callers pass the time, in seconds."""

    expiry: float
    """Seconds without a heartbeat after which a lease is lost."""
    hold: float = 0.0
    """Seconds that a stage may lack an instance before it counts as gone."""
    _leases: dict[Address, Instance] = field(default_factory=dict)
    launched: LauncherView = field(default_factory=LauncherView)
    """What supervisors say of the processes that they keep running."""
    _last_served: dict[Stage, float] = field(default_factory=dict)
    """When each stage last had an instance that takes work."""
    number: int = 0
    """Changes of the leases so far, but for the work that they have."""
    _taking: dict[tuple[str, bool], list[Instance]] = field(default_factory=dict)
    """Lists of instances by what they do, until these change: each message asks for some."""
    _served: set[Stage] | None = None
    """The stages that they run, likewise."""

    def add(self, message: Register, now: float) -> Instance:
        """Add an instance and return it. A process that registers again while it holds a lease keeps it, with its
        work."""
        held = self._leases.get(message.address)
        if held is not None and is_same(held, message):
            held.last_seen = now
            held.credit = message.credit or message.capacity.whole
            self.number += 1
            return held
        instance = Instance(
            name=message.name,
            role=message.role,
            address=message.address,
            pid=message.pid,
            incarnation=message.incarnation,
            layouts=message.layouts,
            capacity=message.capacity,
            context_length=message.context_length,
            last_seen=now,
            since=now,
            credit=message.credit or message.capacity.whole,
            resets=message.resets,
            join=message.join,
            num_frontends=message.num_frontends,
            stats=message.stats,
            account=Account(max((one.num_assigned for one in self if one.role is message.role), default=0)),
        )
        instance.history.add(message.stats, now)
        self._leases[instance.address] = instance
        self._changed()
        return instance

    def refresh(self, message: Heartbeat, now: float) -> Instance | None:
        """Record a heartbeat. Return the instance; None if it isn't registered."""
        if instance := self._leases.get(message.address):
            instance.last_seen, instance.stats = now, message.stats
            instance.credit = message.credit or instance.capacity.whole
            instance.history.add(message.stats, now)
            self.number += 1
        return instance

    def remove(self, instance: Instance, now: float) -> None:
        """Remove an instance that is gone."""
        for stage in instance.role.stages:
            self.serves(stage, now)  # it did, until now
        del self._leases[instance.address]
        self._changed()

    def drain(self, instance: Instance) -> None:
        """Give an instance no new work any more: it is about to leave."""
        instance.draining = True
        self._changed()

    def avoid(self, instance: Instance, now: float) -> None:
        """Prefer others for a while: an instance has failed, perhaps by its own fault."""
        instance.avoided_until = now + AVOIDED_SECONDS
        self._changed()

    def end_avoidance(self, now: float) -> None:
        """Give instances work again that haven't failed for a while. Call a few times a second."""
        for instance in self._leases.values():
            if instance.avoided_until is not None and now >= instance.avoided_until:
                instance.avoided_until = None
                self._changed()

    def set_next_role(self, instance: Instance, role: Role | None) -> None:
        """Note the role that an instance is about to take; None if it keeps its own."""
        instance.next_role = role
        self._changed()

    def serves(self, stage: Stage, now: float) -> bool:
        """Return whether work for a stage can be taken on: an instance runs it, did a short time ago, or is being
        restarted. Call a few times a second."""
        if self._served is None:
            self._served = {one for instance in self if instance.takes_work for one in instance.role.stages}
        if stage in self._served:
            self._last_served[stage] = now
            return True
        if (since := self._last_served.get(stage)) is None:  # but perhaps before this frontend was started
            return self.launched.has_served(stage, now)
        return now - since < self.hold or bool(self.launched.returning(stage, now))

    def expected(self, now: float) -> Iterator[LaunchedInstance]:
        """Yield the instances that supervisors start, start again or have given up, and that haven't joined."""
        joined = {(instance.name, instance.incarnation) for instance in self}
        for one in self.launched.processes(now):
            has_joined = one.state in _JOINED or (one.name, one.incarnation) in joined
            if one.role is not None and not has_joined:
                yield one

    def incompatibility(self, message: Register, identity: ModelIdentity) -> str:
        """Return why an instance can't join; empty if it can.

        It must serve the model of that identity. Any encode instance may send rows to any language instance, and any
        prefill instance to any decode instance. So all must agree on the row layout."""
        if difference := message.model.difference(identity):
            return f"it serves another model than this frontend: {difference}"
        for layout in message.layouts:
            if layout.model != identity.digest:
                return f"its {layout.kind} rows aren't of the model that it serves"
            if difference := self._difference(layout):
                settings = _DTYPE_SETTINGS[layout.kind]
                return f"the {layout.kind} rows of {message.name} don't fit those of {difference} ({settings})"
        return "" if message.layouts else "its registration has no row layout"

    def _difference(self, layout: RowLayout) -> str:
        """Return how a layout differs from a registered instance's of the same kind, with its name; empty if it
        doesn't."""
        for instance in self:
            for other in instance.layouts:
                if other.kind is layout.kind and (difference := layout.difference(other)):
                    return f"{instance.name}: {difference}"
        return ""

    def expired(self, now: float) -> list[Instance]:
        """Return the instances without a heartbeat for longer than ``expiry``."""
        return [instance for instance in self._leases.values() if now - instance.last_seen > self.expiry]

    def get(self, address: Address) -> Instance | None:
        return self._leases.get(address)

    def named(self, name: str) -> list[Instance]:
        """Return the instances of that name. Operators may give it to several."""
        return [instance for instance in self if instance.name == name]

    def encode_instances(self, *, begun: bool = False) -> list[Instance]:
        """Return the instances that items are dispatched to. ``begun`` is True for items of requests in flight."""
        return self._taking_work("encodes", begun=begun)

    def decode_instances(self) -> list[Instance]:
        """Return the language instances that requests are dispatched to: those that decode."""
        return self._taking_work("decodes", begun=False)

    def prefill_instances(self, *, begun: bool = False) -> list[Instance]:
        """Return the instances that prefill for others. ``begun`` is True for requests in flight."""
        return self._taking_work("sends_kv", begun=begun)

    def serving_instances(self) -> list[Instance]:
        """Return the language instances that can take requests now. Decode-only ones need a prefill instance."""
        decoding = self.decode_instances()
        return decoding if self.prefill_instances() else [one for one in decoding if not one.role.takes_kv]

    def _taking_work(self, does: str, *, begun: bool) -> list[Instance]:
        """Return the instances of roles that do something, of those that aren't draining; of these, those that haven't
        failed lately, if there are any. For requests in flight, falls back to draining ones: a longer drain is better
        than a lost request. The list isn't changed: it is kept until the leases change."""
        if (found := self._taking.get((does, begun))) is None:
            instances = [one for one in self._leases.values() if getattr(one.role, does)]
            staying = [one for one in instances if one.takes_work]
            reliable = [one for one in staying if one.avoided_until is None]
            found = self._taking[does, begun] = reliable or staying or (instances if begun else [])
        return found

    def _changed(self) -> None:
        """Note that what instances may be given has changed."""
        self.number += 1
        self._taking.clear()
        self._served = None

    @property
    def encode_batch_patches(self) -> int:
        """Patches in one batch of an encode instance: the most that any has; 0 if there is none."""
        return max((instance.capacity.encode_batch_patches for instance in self._leases.values()), default=0)

    def context_length(self) -> int | None:
        """Return the longest request, in tokens, that every language instance can hold; None if there is none."""
        return min((instance.context_length for instance in self if instance.role.has_decoder), default=None)

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)


def is_same(instance: Instance, message: Register) -> bool:
    """Return whether a registration is for a lease that is held: from the same process, in the same role, which still
    has the work that it was given."""
    return (instance.name, instance.pid, instance.incarnation, instance.role, instance.resets) == (
        message.name,
        message.pid,
        message.incarnation,
        message.role,
        message.resets,
    )


def has_new_role(instance: Instance, message: Register) -> bool:
    """Return whether a registration is from the process of the lease that is held, in another role."""
    same_process = (instance.pid, instance.incarnation) == (message.pid, message.incarnation)
    return same_process and instance.role is not message.role


def is_before(instance: Instance, message: Register) -> bool:
    """Return whether a registration is older than the lease that is held, from the same process."""
    same_process = (instance.pid, instance.incarnation) == (message.pid, message.incarnation)
    return same_process and message.resets < instance.resets
