"""A whole service on one machine: a supervisor in this process, the frontend and the instances in child processes."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import read_folder
from triptych.clock import SystemClock
from triptych.cluster.changes import Plan
from triptych.cluster.child import ChildSpec, Print, groups_of
from triptych.cluster.frontend_link import FrontendLink
from triptych.cluster.launcher import Launcher, LocalLauncher
from triptych.cluster.revision import Revision
from triptych.cluster.rollout import Replaceable, Rollout
from triptych.cluster.scale import Scale
from triptych.cluster.supervisor import STOP_GRACE, Supervisor
from triptych.config import FrontendSpec, ServeConfig, changed
from triptych.control_groups import usable_cores
from triptych.errors import ChildFailed, ConfigError, StartError, TopologyError
from triptych.messages.operations import LaunchState, StartChange, StartRollout, StartScale
from triptych.models.registry import family_of, identity_of
from triptych.server.http_socket import host_port_of, listen, listen_all, reserve, url_of
from triptych.server.worker_extra import check_installed
from triptych.topology import Stage, Topology

log = logging.getLogger(__name__)

T = TypeVar("T")

LAST_RESPONSES = 3.0
"""Seconds that a frontend may take to end, after its drain."""
REPORT_SECONDS = 0.02
"""Seconds in which a report arrives that must come before a signal."""


def check_roles(model: Path, topology: Topology) -> None:
    """Raise TopologyError for a topology with instances that encode and a text-only model."""
    encoding = [role for role in topology.roles if role.encodes]
    if encoding and not family_of(load_config(model)).takes_media:
        raise TopologyError(
            f"topology {topology} has instances that encode ({encoding[0]}), and {model} is a text-only model: "
            "try 1PD or 1P1D"
        )


async def unless_lost(lost: asyncio.Future[ChildFailed], work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result, or raise what ``Service.lost`` holds when the service is lost before."""
    working = asyncio.ensure_future(work)
    first: set[asyncio.Future[Any]] = {working, lost}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not working.done():
            working.cancel()
    if not working.done():
        raise lost.result()
    return await working


class Service:
    """A service that starts when this async context manager is entered and can be used after ``wait_until_ready``.

    The HTTP socket is this process's. A frontend inherits it, so that connections wait while it is started again."""

    def __init__(
        self,
        config: ServeConfig,
        topology: Topology,
        show: Print,
        *,
        restart: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        """``restart`` is False to end the service with any of its processes, whatever the settings say. ``launcher``
        starts them; None starts them on this machine."""
        _check(config, topology)
        if launcher is None and config.engine.threads and (warning := _too_many_threads(config, topology)):
            log.warning("%s", warning)
        self._config = config
        self._topology = topology
        self._restart = restart
        with contextlib.ExitStack() as stack:
            http, cluster_host = config.frontend.http, config.cluster.cluster_host
            self._listeners = [stack.enter_context(one) for one in listen_all(http)]
            # each frontend can also be asked by itself, for its metrics
            self._own = [stack.enter_context(listen(replace(http, port=port, frontends=1))) for port in http.own_ports]
            # where operators reach the frontends, each in turn
            self._reserved = [
                stack.enter_context(reserve(cluster_host, http.control_port and http.control_port + number))
                for number in range(http.frontends)
            ]
            self._joins = self._reserved
            """Where instances join."""
            children, self._own_controls = self._children(config, self._joins)
            stack.callback(self._release)
            self._frontend_names = [child.name for child in children if child.role is None]
            self._launcher = launcher or LocalLauncher()
            max_restarts = config.lease.max_restarts if restart else 0
            self._supervisor = Supervisor(children, show, self._launcher, max_restarts, clock=SystemClock())
            self._stack = stack.pop_all()
        self.lost: asyncio.Future[ChildFailed] = self._supervisor.lost
        """Done, with an explanation, when the service can't go on."""

    @property
    def url(self) -> str:
        """Where the HTTP server listens."""
        return url_of(self._listeners[0], self._config.frontend.tls)

    @property
    def own_urls(self) -> list[str]:
        """Where each of several frontends alone is reached; empty for one frontend."""
        return [url_of(one, self._config.frontend.tls) for one in self._own]

    @property
    def control(self) -> str:
        """``HOST:PORT`` where instances join, of each frontend, separated by commas; the same for each incarnation."""
        return ",".join(map(host_port_of, self._reserved))

    async def __aenter__(self) -> "Service":
        try:
            self._link = FrontendLink(
                self._supervisor,
                [*map(host_port_of, self._own_controls.values())],
                self._config.cluster,
                self._plan_change,
                "" if self._restart else "it ends with the command that started it",
            )
        except StartError:
            self._stack.close()
            raise
        self._supervisor.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._announce_end()
        try:
            await self._supervisor.end(self._frontend_names, signal.SIGINT, LAST_RESPONSES)
            await self._supervisor.end(self._supervisor.names, signal.SIGINT, STOP_GRACE)
        finally:
            self._launcher.close()
            await self._link.close()
            self._stack.close()

    def _release(self) -> None:
        """Close the sockets that keep control addresses and that rollouts may have replaced."""
        for bound in (*self._joins, *self._own_controls.values()):
            bound.close()

    @property
    def missing(self) -> list[str]:
        """Names of the processes that aren't ready."""
        processes = self._supervisor.supervision.processes
        return [name for name, process in processes.items() if process.state is not LaunchState.READY]

    @property
    def was_ready(self) -> bool:
        """Whether all processes have been ready at one time."""
        return self._supervisor.supervision.was_complete

    @property
    def stop_asked(self) -> asyncio.Event:
        """Set once an operator asks for the end of the service."""
        return self._link.stop.asked

    async def wait_until_ready(self) -> None:
        """Return once every instance has joined. Raises ChildFailed when a process ends before, and StartError on a
        timeout."""
        timeout = self._config.lease.start_timeout
        try:
            async with asyncio.timeout(timeout):
                while not self.was_ready:
                    if self.lost.done():
                        failure = self.lost.result()
                        raise ChildFailed(f"before it was ready, {failure}", failure.exit_code)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise StartError(f"the instances weren't ready within {timeout:g} s") from None

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let running requests finish, until the drain timeout or until ``hurry`` is set."""
        await self._announce_end()
        timeout = self._config.lease.drain_timeout + LAST_RESPONSES
        ending = asyncio.create_task(self._supervisor.end(self._frontend_names, signal.SIGTERM, timeout))
        hurried = asyncio.create_task(hurry.wait())
        first: set[asyncio.Future[Any]] = {ending, hurried, self.lost}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        self._supervisor.hurry(self._frontend_names)
        await ending

    async def _announce_end(self) -> None:
        self._supervisor.ending = True
        await self._link.end_change()
        if not self._link.stopping:
            self._link.stopping = True
            self._link.report()
            await asyncio.sleep(REPORT_SECONDS)

    async def _plan_change(self, message: StartChange) -> Plan:
        """Return how the processes change. Raises ConfigError, and CheckpointError for a model that can't be served."""
        if not self.was_ready or self._link.stopping:
            raise ConfigError("the service isn't ready yet" if not self._link.stopping else "the service is ending")
        return self._plan_scale(message) if isinstance(message, StartScale) else await self._plan_rollout(message)

    def _plan_scale(self, message: StartScale) -> Plan:
        """Return how instances are added and removed. Those that stay keep their threads and their KV cache."""
        before, after = self._topology, self._topology.scaled(message.counts)
        check_roles(self._config.model, after)
        self._config.engine.tensor_parallel_size.check(after.roles)
        specs = {spec.name: spec for spec in self._instances(self._config, after, self._joins)}
        add = [name for name in after.names if name not in before.names]
        remove = [name for name in reversed(before.names) if name not in after.names]
        groups = {name: groups_of(role) for name, role in (before.names | after.names).items()}
        policy = Scale(
            {name: groups[name] for name in after.names},
            add,
            {name: groups[name] for name in remove},
            _step_timeout(self._config),
        )

        def end(_: bool) -> None:
            counts = Counter(before.roles)
            counts.update(after.names[name] for name in policy.done if name in add)
            counts.subtract(before.names[name] for name in policy.removed)
            self._topology = before.with_counts(counts)

        changes = [*(f"adding {name}" for name in add), *(f"removing {name}" for name in remove)]
        return Plan(
            specs=[specs[name] for name in add],
            names=list(groups),
            policy=policy,
            drain_timeout=_drain_timeout(self._config),
            summary=f"scaling {before} to {after}: {', '.join(changes) or 'nothing changes'}",
            warning=_too_many_threads(self._config, after) if add else "",
            end=end,
        )

    async def _plan_rollout(self, message: StartRollout) -> Plan:
        """Return what replaces all processes."""
        config = changed(self._config, message.settings)
        config.engine.tensor_parallel_size.check(self._topology.roles)
        if message.model:
            config = replace(config, model=Path(message.model))
            if await asyncio.to_thread(_is_another_model, self._config.model, config.model, self._topology):
                return self._plan_revision(config, surge=message.surge)
        specs, own_controls = self._children(config, self._joins)
        # --no-surge saves the memory of weights, which frontends don't have
        groups = {one.name: Replaceable(one.groups, message.surge or one.role is None) for one in specs}
        frontends = {one.name: groups.pop(one.name) for one in specs if one.role is None}
        policy = Rollout(groups | frontends, _step_timeout(config))

        def end(complete: bool) -> None:
            self._settle(own_controls, policy.done)
            if complete:
                self._config = config

        return self._plan(specs, own_controls, policy, _drain_timeout(config), end)

    def _plan_revision(self, config: ServeConfig, *, surge: bool) -> Plan:
        """Return what replaces all processes by those of another model, with a frontend and a control address of its
        own. That frontend later listens at the first address, too, which operators know."""
        if len(self._frontend_names) > 1:
            raise ConfigError("another model needs a service with one frontend")
        joins = [reserve(config.cluster.cluster_host, 0)]
        specs, own_controls = self._children(config, joins)
        instances = {one.name: one.groups for one in specs if one.role is not None}
        old = self._instances(self._config, self._topology, [*self._own_controls.values()])
        policy = Revision(self._frontend_names[0], instances, surge=surge, timeout=_step_timeout(config))

        def end(_: bool) -> None:
            unused = joins
            if policy.switched:
                self._config, unused, self._joins = config, self._joins, joins
            self._settle(own_controls, self._frontend_names if policy.switched else ())
            for bound in unused:
                if bound not in self._reserved:
                    bound.close()

        plan = self._plan(specs, own_controls, policy, _drain_timeout(config), end)
        return replace(plan, finishing={one.name: one for one in old})

    def _plan(
        self,
        specs: Sequence[ChildSpec],
        own_controls: Mapping[str, socket.socket],
        policy: Rollout | Revision,
        drain_timeout: float,
        end: Callable[[bool], object],
    ) -> Plan:
        """Return a plan whose new frontends accept no connections before they take over."""
        self._launcher.renew()
        for bound in own_controls.values():
            self._link.add(host_port_of(bound), standby=True)

        def take_over(name: str) -> None:
            if name in own_controls:
                self._link.add(host_port_of(own_controls[name]))
                before = host_port_of(self._own_controls[name])
                self._link.replaced(before, lambda: self._supervisor.replacing(name).old_runs)
                self._link.report()

        names = [one.name for one in specs]
        summary = f"rolling out: replacing {', '.join(names)}"
        return Plan(specs, names, policy, drain_timeout, summary, take_over=take_over, end=end)

    def _settle(self, own_controls: Mapping[str, socket.socket], replaced: Collection[str]) -> None:
        """After a rollout: forget the frontends that were replaced, and the new ones of those that weren't."""
        for name, bound in own_controls.items():
            unused = bound
            if name in replaced:
                unused, self._own_controls[name] = self._own_controls[name], bound
            else:
                self._link.add(host_port_of(self._own_controls[name]))
            self._link.remove(host_port_of(unused))
            unused.close()

    def _children(
        self, config: ServeConfig, joins: Sequence[socket.socket]
    ) -> tuple[list[ChildSpec], dict[str, socket.socket]]:
        """Return how each process is started with these settings, and what keeps the frontends' own control addresses.
        Instances join at ``joins``, one for each frontend. Raises ConfigError."""
        own_controls = {
            f"frontend{number}" if self._own else "frontend": reserve(config.cluster.cluster_host, 0)
            for number in range(len(joins))
        }
        frontends = [
            self._frontend_child(number, name, config, own, joins[number])
            for number, (name, own) in enumerate(own_controls.items())
        ]
        children = [*frontends, *self._instances(config, self._topology, joins)]
        for child in children:
            child.written(0)  # raises ConfigError now rather than later
        return children, own_controls

    @staticmethod
    def _instances(config: ServeConfig, topology: Topology, joins: Sequence[socket.socket]) -> list[ChildSpec]:
        """Return how each instance is started."""
        return [*map(ChildSpec.of_instance, config.instances(topology, ",".join(map(host_port_of, joins))))]

    def _frontend_child(
        self, number: int, name: str, config: ServeConfig, own_control: socket.socket, join: socket.socket
    ) -> ChildSpec:
        listener, own = self._listeners[number].fileno(), self._own[number].fileno() if self._own else None
        port = own_control.getsockname()[1]
        config = replace(config, frontend=config.frontend.having({"control_port": port}))
        own_ports = {f"frontend{other}": bound.getsockname()[1] for other, bound in enumerate(self._own)}
        takes_over = dict.fromkeys(map(host_port_of, (join, self._reserved[number])))

        def written(incarnation: int) -> bytes:
            return FrontendSpec(
                name=name,
                config=config,
                expects_encoders=Stage.ENCODE in self._topology.stages,
                listener=listener,
                own_listener=own,
                control=host_port_of(self._reserved[number]),
                own_ports=own_ports,
                supervisor=os.getpid(),
                takes_over=tuple(takes_over),
                awaits_instances=incarnation > 0 and self.was_ready,
            ).to_bytes()

        fds = (listener,) if own is None else (listener, own)
        return ChildSpec(name, None, "triptych.server.frontend_main", written, pass_fds=fds)


def _drain_timeout(config: ServeConfig) -> float:
    return config.lease.drain_timeout + LAST_RESPONSES


def _step_timeout(config: ServeConfig) -> float:
    return config.lease.start_timeout + _drain_timeout(config)


def _check(config: ServeConfig, topology: Topology) -> None:
    """Raise StartError for what would end each of the processes."""
    check_installed("an instance")
    check_roles(config.model, topology)
    config.cluster.secret()
    config.frontend.tls.check_files()


def _too_many_threads(config: ServeConfig, topology: Topology) -> str:
    """Return a warning when a topology's instances compute with more threads than there are usable cores."""
    cores = usable_cores()
    threads = sum(spec.engine.threads * spec.num_ranks for spec in config.instances(topology, ""))
    return f"{topology} computes with {threads} threads on {cores} usable cores" if threads > cores else ""


def _is_another_model(served: Path, new: Path, topology: Topology) -> bool:
    """Return whether a checkpoint contains another model than the one that is served. Takes long for large files.
    Raises CheckpointError when it can't be served, and ConfigError when its architecture is another."""
    if not new.is_absolute():
        raise ConfigError(f"{str(new)!r} is not an absolute path")
    before, after = load_config(served), load_config(new)
    if before.get("architectures") != after.get("architectures"):
        raise ConfigError(f"{new} has the architecture {after.get('architectures')}, not {before.get('architectures')}")
    check_roles(new, topology)
    read_folder(new)
    return identity_of(served).difference(identity_of(new)) != ""
