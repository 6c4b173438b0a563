"""The process that is connected to Ray, and the only one of the operator's that imports it: it may be started again
without harm to the frontend, the supervisor or the instances, whose actors outlive it."""

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from triptych import exit_codes, running_time
from triptych.cluster.on_ray import messages
from triptych.cluster.on_ray.messages import (
    Checking,
    Connect,
    Connected,
    FromRay,
    FromSupervisor,
    Gone,
    Host,
    News,
    Place,
    Release,
    Reserve,
    Reserved,
    Signal,
    Unfit,
    Waiting,
)
from triptych.config import host_and_port
from triptych.observe import logs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of what will change in later versions
    import ray
    import ray.exceptions

    from triptych.cluster.on_ray.actor import HostActor

log = logging.getLogger("triptych.cluster.on_ray.driver")  # also when it is the main module

WAITING_AFTER = 3.0
"""Seconds without a word of an actor after which it is said to wait for a place; Ray starts one in a second or two."""
WAITING_INTERVAL = 2.0
"""Seconds between two looks at what is free."""
UNAVAILABLE_DELAY = 0.5
"""Seconds between two questions to an actor that can't be reached for now."""
END_SECONDS = 10.0
"""Seconds in which actors are killed at the end; Ray may not answer any more."""
ASK_SECONDS = 10.0
"""Seconds between two questions to an actor without an instance."""
REACH_SECONDS = 5.0
"""Seconds in which the cluster's address must accept a connection."""
CALLS_AT_ONCE = 8
"""Threads of an actor: one waits for news, the others take signals."""
_OF_PLACEMENT_GROUP = re.compile(r"_group_(\d+_)?[0-9a-f]{16,}$")
"""Ends of Ray's own names of resources that are reserved for one."""


class RayConnection:
    """The actors of one service."""

    def __init__(self, writer: asyncio.StreamWriter, namespace: str) -> None:
        self._writer = writer
        self._namespace = namespace
        self._actors: dict[str, Any] = {}
        """Handles of actors, by name."""
        self._places: dict[str, str] = {}
        """Names of actors by the key of their instance."""
        self._attending: dict[str, asyncio.Task[None]] = {}
        """Tasks that watch actors without an instance, by name."""
        self._released: set[str] = set()
        """Names of actors that the supervisor wants to be gone."""
        self._heard: set[str] = set()
        """Keys of instances whose actors have answered a process like this."""
        self._placed: set[str] = set()
        """Names of actors that have a place: this process has reached them, or knows that it can't for now."""
        self._creating: set[asyncio.Task[Any]] = set()
        """Creations of actors, which can't be stopped: one that is released meanwhile is killed after it."""
        self._releasing: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: FromSupervisor) -> None:
        """Do what the supervisor asks, in the background."""
        match message:
            case Place(key, host):
                self._places[key] = host.name
                self._stop_attending(host.name)
                self._begin(self._follow(message))
            case Reserve(host):
                self._attending[host.name] = self._begin(self._attend(message))
            case Release(name):
                self._stop_attending(name)
                self._releasing.add(task := self._begin(self._release(name)))
                task.add_done_callback(self._releasing.discard)
            case Signal():
                self._begin(self._signal(message))

    async def finish(self) -> None:
        """Return once no actor is being created, and those that the supervisor has released are ended."""
        await asyncio.sleep(0)  # what was taken last begins
        await asyncio.gather(*self._creating, *self._releasing, return_exceptions=True)

    def kill_all(self) -> None:
        """End all actors, and so their instances. Blocks while Ray does."""
        for name in list(self._actors):
            self._kill(name)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.fatal(f"the connection to Ray failed: {error}")
            os._exit(exit_codes.FAILED)  # the supervisor starts it again, and asks again

    def _stop_attending(self, name: str) -> None:
        if task := self._attending.pop(name, None):
            task.cancel()

    def _send(self, message: FromRay) -> None:
        self._writer.write(messages.framed(message))

    async def _follow(self, place: Place) -> None:
        """Start an instance, or find it, and report what it does until it has ended."""
        key = place.key
        if place.heard:
            self._heard.add(key)
        try:
            actor = await self._reach(place.host, new=not place.heard)
        except (ValueError, ray.exceptions.RayError) as error:
            self._send(Gone(key, _first_line(error), failed=not place.heard))
            return
        had_place = place.host.name in self._placed
        self._placed.discard(place.host.name)  # until it answers: Ray may have started another actor of its name
        watching = asyncio.create_task(self._watch(key, place.host))
        try:
            await self._report(place, actor, had_place=had_place)
        finally:
            watching.cancel()
            self._places.pop(key, None)

    async def _attend(self, reserve: Reserve) -> None:
        """Start an actor without an instance, or find it, and report whether it has a place that is fit for instances
        until it has ended."""
        host = reserve.host
        try:
            actor = await self._reach(host, new=True)
            self._placed.discard(host.name)  # until it answers: Ray may have started another actor of its name
        except (ValueError, ray.exceptions.RayError) as error:
            self._send(Gone(host.name, _first_line(error), failed=True))
            return
        watching, known = asyncio.create_task(self._watch(host.name, host)), False
        try:
            while True:
                try:
                    node = await actor.node.remote(after=ASK_SECONDS if known else 0.0)
                    self._placed.add(host.name)
                    is_fit = known or node == reserve.fit_node
                    if not is_fit:
                        self._send(Checking(host.name, node))  # which may take minutes
                    why = "" if is_fit else await actor.unfit.remote()
                except ray.exceptions.ActorUnavailableError:  # its node may come back
                    self._placed.add(host.name)
                    await asyncio.sleep(UNAVAILABLE_DELAY)
                    continue
                if why:
                    self._send(Unfit(host.name, node, why))
                    return
                if not known:
                    known = True
                    self._send(Reserved(host.name, node))
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.RayActorError):  # its method failed, and it lives
                await asyncio.to_thread(self._kill, host.name)
            self._forget(host.name)
            self._send(Gone(host.name, _why(error)))
        finally:
            watching.cancel()

    def _forget(self, name: str) -> None:
        """An actor has ended: another one of its name has no place yet."""
        self._actors.pop(name, None)
        self._placed.discard(name)

    async def _reach(self, host: Host, *, new: bool) -> Any:
        """Return the handle of an actor, which is created if it is new and doesn't exist yet. That goes on if this task
        is cancelled."""
        self._creating.add(task := asyncio.create_task(self._reach_or_kill(host, new=new)))
        task.add_done_callback(self._creating.discard)
        return await asyncio.shield(task)

    async def _reach_or_kill(self, host: Host, *, new: bool) -> Any:
        self._actors[host.name] = actor = await asyncio.to_thread(self._create if new else self._find, host)
        if host.name in self._released:  # meanwhile
            await asyncio.to_thread(self._kill, host.name)
        return actor

    def _find(self, host: Host) -> Any:
        return ray.get_actor(host.name, self._namespace)

    def _create(self, host: Host) -> Any:
        resources = dict(host.resources)
        return (
            ray.remote(HostActor)
            .options(
                name=host.name,
                get_if_exists=True,  # an earlier process may have been asked, too
                namespace=self._namespace,
                lifetime="detached",  # so that it outlives this process
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy="SPREAD",
                max_restarts=0,  # the supervisor starts instances again, with its delays and another incarnation
                max_concurrency=CALLS_AT_ONCE,
            )
            .remote(host.example)
        )

    async def _report(self, place: Place, actor: Any, *, had_place: bool) -> None:
        key, name = place.key, place.host.name
        seen, pid, begun = place.seen, 0, place.heard
        while True:
            try:
                if not begun:
                    await actor.begin.remote(key, place.assignment)
                    begun = True
                    self._placed.add(name)
                news = msgspec.msgpack.decode(await actor.news.remote(key, seen, pid), type=News)
            except ray.exceptions.ActorUnavailableError:  # its node may come back
                self._placed.add(name)
                await asyncio.sleep(UNAVAILABLE_DELAY)
                continue
            except ray.exceptions.RayError as error:
                killed, is_lost = name in self._released, isinstance(error, ray.exceptions.RayActorError)
                failed = not killed and not (is_lost and (had_place or key in self._heard or name in self._placed))
                out_of_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
                self._forget(name)
                why = _first_line(error) if out_of_memory else _why(error)
                self._send(Gone(key, why, killed=killed, failed=failed, out_of_memory=out_of_memory))
                return
            self._heard.add(key)
            self._placed.add(name)
            seen, pid = news.seen, news.pid
            self._send(msgspec.structs.replace(news, key=key))
            if news.ended:
                return

    async def _watch(self, key: str, host: Host) -> None:
        """Say what an actor waits for that Ray doesn't place, since Ray doesn't."""
        await asyncio.sleep(WAITING_AFTER)
        while host.resources and host.name not in self._placed:  # what asks for nothing fits
            free = await asyncio.to_thread(ray.available_resources)
            if host.name in self._placed:  # meanwhile
                return
            asked = f"it asks for {messages.shown(host.resources)}; free on all nodes: {messages.shown(_asked(free))}"
            self._send(Waiting(key, asked))
            await asyncio.sleep(WAITING_INTERVAL)

    async def _signal(self, message: Signal) -> None:
        if (name := self._places.get(message.key)) is None:
            return  # it has ended
        if message.number == 9 or message.key not in self._heard:
            await self._release(name)
        elif (actor := self._actors.get(name)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # its end is reported by the task that follows it
                await actor.send.remote(message.key, message.number)

    async def _release(self, name: str) -> None:
        self._released.add(name)
        await asyncio.to_thread(self._kill, name)

    def _kill(self, name: str) -> None:
        # the kernel kills the instance with the process that forked it, and that with the actor
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actors.get(name) or ray.get_actor(name, self._namespace), no_restart=True)


def _why(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _asked(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that an instance may ask for, without Ray's own."""
    hidden = ("memory", "object_store_memory", "node:")
    shown = [name for name in resources if not (name.startswith(hidden) or _OF_PLACEMENT_GROUP.search(name))]
    return {name: resources[name] for name in shown}


async def serve(connect: Connect) -> None:
    """Take messages from the supervisor until it closes the connection, then end all actors."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=connect.socket))
    connection = RayConnection(writer, connect.namespace)
    names = ray.util.list_named_actors()  # of this namespace
    writer.write(messages.framed(Connected(ray.util.get_node_ip_address(), list(names))))
    async for message in messages.received(reader, messages.FromSupervisor):
        connection.take(message)
    threading.Timer(END_SECONDS, os._exit, [exit_codes.FAILED]).start()
    await connection.finish()
    await asyncio.to_thread(connection.kill_all)
    os._exit(0)


def _check_address(address: str) -> None:
    """Raise OSError when nothing listens at HOST:PORT, which takes Ray twenty seconds to say."""
    if address != "auto":
        socket.create_connection(host_and_port(address), REACH_SECONDS).close()


def main() -> None:
    logs.set_up(logs.LogSettings(process="ray"))
    connect = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Connect)
    try:
        _check_address(connect.address)
        ray.init(
            address=connect.address,
            namespace=connect.namespace,
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        where = "this machine's node" if connect.address == "auto" else connect.address
        logs.fatal(f"no connection to a Ray cluster by {where}: {_first_line(error)}")
        sys.exit(exit_codes.FAILED)
    running_time.run(serve(connect))


if __name__ == "__main__":
    main()
