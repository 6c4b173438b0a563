"""Messages of supervisors and operators: what runs, what is asked of a service, and rollouts."""

import enum
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from triptych.messages.identity import ModelIdentity
from triptych.messages.stats import Load
from triptych.messages.work import Seconds
from triptych.topology import Role
from triptych.types import Address, Count

Text = Annotated[str, Meta(max_length=4096)]

# ── supervisor ⇄ frontend ──────────────────────────────────────────────────────────────────────────────────


class LaunchState(enum.StrEnum):
    """What has become of a process that a supervisor started."""

    STARTING = "starting"
    """It runs, and hasn't joined."""
    READY = "ready"
    """It has joined."""
    RESTARTING = "restarting"
    """It has ended, and is started again after a delay."""
    FAILED = "failed"
    """It has ended, and is not started again."""
    DRAINING = "draining"
    """It finishes its work, and ends: another one takes its place, or it is one too many."""


class LaunchedInstance(Struct, frozen=True):
    """An instance or a frontend, as its supervisor sees it."""

    name: str
    role: Role | None
    """None for a frontend."""
    state: LaunchState
    restarts: Count = 0
    """How often it was started again."""
    restart_in: Annotated[float, Meta(ge=0, le=10**9)] = 0.0
    """Seconds until it is started again, if it is restarting."""
    reasons: dict[str, Count] = {}
    """Its restarts by why they were needed: a signal's name, ``exit_1``, ``out_of_memory``, …"""
    incarnation: Count = 0
    """Incarnation of the process that runs or, if none does, of the one that has ended."""
    node: Text = ""
    """The machine it runs on; empty for the supervisor's own."""
    pending: Text = ""
    """Why it has no machine yet; empty if it has one."""
    lost: bool = False
    """Whether it ended last because its machine did, or what had started it there: that says nothing of its work."""


class SparePlace(Struct, frozen=True):
    """A place that is kept free for an instance of a lost machine, or waits for one."""

    asks: Text
    """The resources that it holds, or asks for: those of the instances that it is for."""
    node: Text = ""
    """Its machine; empty until that is known to be fit."""
    pending: Text = ""
    """What it waits for: a machine, or the check of the one that it has; empty if for nothing, or not for long."""


class LauncherReport(Struct, frozen=True, tag=True):
    """Supervisor → frontend: the processes that it keeps running. Sent regularly, and when one changes its state.
    Answered by LauncherStatus."""

    launcher: Address
    """Address of the supervisor, where the frontend answers."""
    instances: Annotated[list[LaunchedInstance], Meta(max_length=10_000)]
    stopping: bool = False
    """The service is ending: at its end the frontend stops all instances, also those that joined by themselves."""
    change: Text = ""
    """The change of the processes that is in progress, and what it does; empty without one."""
    standby: bool = False
    """The frontend that gets this accepts no connections yet: another one serves."""
    spares: Annotated[list[SparePlace], Meta(max_length=10_000)] = []
    """The places that it keeps free, or waits for."""
    finishing: Annotated[list[Address], Meta(max_length=1_000)] = []
    """The frontends that have been replaced, and finish their requests."""


class JoinedInstance(Struct, frozen=True):
    """An instance that holds a lease."""

    name: str
    incarnation: Count


class LauncherStatus(Struct, frozen=True, tag=True):
    """Frontend → supervisor: the instances that have joined."""

    pid: int
    """The frontend's process id, by which an answer of an earlier frontend is recognised."""
    joined: list[JoinedInstance]


# ── operators: triptych status ⇄ frontend ──────────────────────────────────────────────────────────────────


class GetStatus(Struct, frozen=True, tag=True):
    """Operator → frontend: report the service's status."""

    reply_to: Address


class InstanceStatus(Struct, frozen=True):
    """An instance, as the frontend sees it."""

    name: str
    role: Role
    address: Address
    pid: int
    outstanding: float
    """Cost of its assigned, unfinished work, as in ``router/membership.py``."""
    seconds_since_heartbeat: float
    """Seconds since its last heartbeat."""
    load: Load
    next_role: Role | None = None
    """The role that it is changing to, if it is."""
    draining: bool = False
    """Whether it gets nothing new, and leaves once it has finished its work."""


class ServerStatus(Struct, frozen=True):
    """A language server of another project, as the frontend sees it."""

    name: str
    url: str
    state: Text
    """A ``gateway.servers.ServerState``."""
    why: Text = ""
    """Why it isn't serving, or serves text alone."""
    running: Count = 0
    """Requests that it has."""
    losses: Count = 0


class Status(Struct, frozen=True, tag=True):
    """Frontend → operator: the service's status."""

    ready: bool
    draining: bool
    requests: Count
    """Requests in flight."""
    instances: list[InstanceStatus]
    model: ModelIdentity = ModelIdentity()
    """The model that all of them serve."""
    launched: list[LaunchedInstance] = []
    """The processes that a supervisor keeps running, whether they have joined or not."""
    change: Text = ""
    """The change of the processes that is in progress, and what it does; empty without one."""
    spares: list[SparePlace] = []
    """The places that supervisors keep free, or wait for."""
    servers: list[ServerStatus] = []
    """The language servers that answer in place of instances."""


class SetRole(Struct, frozen=True, tag=True):
    """Operator → frontend: change the role of the instance of that name, once it has drained."""

    reply_to: Address
    instance: str
    role: Role
    timeout: Seconds
    """Time to drain."""
    force: bool = False
    """Change the role even if the service can answer fewer requests, or none, during or after the change."""


class RoleSet(Struct, frozen=True, tag=True):
    """Frontend → operator: the instance now has that role."""

    instance: str
    role: Role


class RoleRefused(Struct, frozen=True, tag=True):
    """Frontend → operator: the role was not changed, for this reason."""

    instance: str
    role: Role
    reason: str


# ── operators: triptych rollout, scale, stop ⇄ frontend ⇄ supervisor ───────────────────────────────────────


class StartRollout(Struct, frozen=True, tag=True):
    """Operator → frontend → supervisor: replace all processes one by one. The supervisor answers the operator."""

    kind: ClassVar[str] = "rollout"
    """What messages call it."""
    outcome: ClassVar[str] = "replaced"
    """What becomes of a process."""
    reply_to: Address
    settings: Annotated[dict[Text, Text], Meta(max_length=100)] = {}
    """Settings that change, by their own names, as text."""
    surge: bool = True
    """Start each new instance beside the old one; otherwise the old one ends first."""
    model: Text = ""
    """Folder of another checkpoint of the same architecture; empty for the one that is served."""


class StartScale(Struct, frozen=True, tag=True):
    """Operator → frontend → supervisor: add instances, or drain and end some. The supervisor answers the operator."""

    kind: ClassVar[str] = "scale operation"
    outcome: ClassVar[str] = "added or removed"
    reply_to: Address
    counts: Annotated[dict[Role, Count], Meta(max_length=len(Role))]
    """How many instances of each of these roles there are to be."""


StartChange = StartRollout | StartScale


class StopService(Struct, frozen=True, tag=True):
    """Operator → frontend → supervisor: drain, then end all processes. The supervisor answers the operator, as it does
    for a change, until none is left."""

    kind: ClassVar[str] = "stop"
    outcome: ClassVar[str] = "ended"
    reply_to: Address


class ChangeRefused(Struct, frozen=True, tag=True):
    """Frontend or supervisor → operator: nothing was changed, for this reason."""

    reason: str


class ChangeProgress(Struct, frozen=True, tag=True):
    """Supervisor → operator: what the change does. Sent regularly."""

    text: str
    done: Count
    """Processes whose part of the change is complete."""
    total: Count


class ChangeEnded(Struct, frozen=True, tag=True):
    """Supervisor → operator: the change has ended."""

    done: Count
    total: Count
    reason: str = ""
    """Why it isn't complete; empty if it is."""


OperationsMessage = (
    LauncherReport | LauncherStatus | GetStatus | Status | SetRole | RoleSet | RoleRefused
    | StartRollout | StartScale | StopService | ChangeRefused | ChangeProgress | ChangeEnded
)  # fmt: skip
