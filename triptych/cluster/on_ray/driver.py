"""The process that is connected to Ray, and the only one of the operator's that imports it: it may be started again
without harm to the frontend, the supervisor or the instances, whose actors outlive it."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from triptych import exit_codes
from triptych.cluster.on_ray import messages
from triptych.cluster.on_ray.messages import Connect, Connected, FromRay, Gone, News, Place, Signal, Waiting
from triptych.config import host_and_port
from triptych.observe import logs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of what will change in later versions
    import ray
    import ray.exceptions

    from triptych.cluster.on_ray.actor import InstanceActor

log = logging.getLogger("triptych.cluster.on_ray.driver")  # also when it is the main module

WAITING_AFTER = 3.0
"""Seconds without a word of an actor after which it is said to wait for a place; Ray starts one in a second or two."""
WAITING_INTERVAL = 2.0
"""Seconds between two looks at what is free."""
UNAVAILABLE_DELAY = 0.5
"""Seconds between two questions to an actor that can't be reached for now."""
END_SECONDS = 10.0
"""Seconds in which actors are killed at the end; Ray may not answer any more."""
REACH_SECONDS = 5.0
"""Seconds in which the cluster's address must accept a connection."""
CALLS_AT_ONCE = 8
"""Threads of an actor: one waits for news, the others take signals."""


class RayConnection:
    """The actors of one service."""

    def __init__(self, writer: asyncio.StreamWriter, namespace: str) -> None:
        self._writer = writer
        self._namespace = namespace
        self._actors: dict[str, Any] = {}
        """Handles by key."""
        self._killed: set[str] = set()
        """Keys of those that the supervisor wants to be gone."""
        self._heard: set[str] = set()
        """Keys of those that have answered a process like this."""
        self._placed: set[str] = set()
        """Keys of those that have a place: this process has reached them, or knows that it can't for now."""
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: Place | Signal) -> None:
        """Do what the supervisor asks, in the background."""
        work = self._follow(message) if isinstance(message, Place) else self._signal(message)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def kill_all(self) -> None:
        """End all actors, and so their instances. Blocks while Ray does."""
        for key in list(self._actors):
            self._kill(key)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.fatal(f"the connection to Ray failed: {error}")
            os._exit(exit_codes.FAILED)  # the supervisor starts it again, and asks again

    def _send(self, message: FromRay) -> None:
        self._writer.write(messages.framed(message))

    async def _follow(self, place: Place) -> None:
        """Start an instance, or find it, and report what it does until it has ended."""
        key = place.key
        if place.heard:
            self._heard.add(key)
        try:
            actor = await asyncio.to_thread(self._find if place.heard else self._create, place)
        except (ValueError, ray.exceptions.RayError) as error:
            self._send(Gone(key, _first_line(error), failed=not place.heard))
            return
        self._actors[key] = actor
        if key in self._killed:
            self._kill(key)
        watching = asyncio.create_task(self._watch(key, place.resources))
        try:
            await self._report(key, actor, place.seen)
        finally:
            watching.cancel()
            self._actors.pop(key, None)

    def _find(self, place: Place) -> Any:
        return ray.get_actor(place.key, self._namespace)

    def _create(self, place: Place) -> Any:
        resources = dict(place.resources)
        return (
            ray.remote(InstanceActor)
            .options(
                name=place.key,
                get_if_exists=True,  # an earlier process may have been asked, too
                namespace=self._namespace,
                lifetime="detached",  # so that it outlives this process
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy="SPREAD",
                max_restarts=0,  # the supervisor starts it again, with its delays and another incarnation
                max_concurrency=CALLS_AT_ONCE,
            )
            .remote(place.assignment)
        )

    async def _report(self, key: str, actor: Any, seen: int) -> None:
        pid = 0
        while True:
            try:
                news = msgspec.msgpack.decode(await actor.news.remote(seen, pid), type=News)
            except ray.exceptions.ActorUnavailableError:  # its node may come back
                self._placed.add(key)
                await asyncio.sleep(UNAVAILABLE_DELAY)
                continue
            except ray.exceptions.RayActorError as error:
                failed = key not in self._heard and key not in self._killed
                self._send(Gone(key, _why(error), killed=key in self._killed, failed=failed))
                return
            self._heard.add(key)
            self._placed.add(key)
            seen, pid = news.seen, news.pid
            self._send(msgspec.structs.replace(news, key=key))
            if news.ended:
                await asyncio.to_thread(self._kill, key)  # its resources are free for the next one
                return

    async def _watch(self, key: str, resources: Mapping[str, float]) -> None:
        """Say what an actor waits for that Ray doesn't place, since Ray doesn't."""
        await asyncio.sleep(WAITING_AFTER)
        while resources and key not in self._placed:  # what asks for nothing fits
            free = await asyncio.to_thread(ray.available_resources)
            self._send(Waiting(key, f"it asks for {_shown(resources)}; free on all nodes: {_shown(_asked(free))}"))
            await asyncio.sleep(WAITING_INTERVAL)

    async def _signal(self, message: Signal) -> None:
        key = message.key
        if message.number == 9 or key not in self._heard:
            self._killed.add(key)
            await asyncio.to_thread(self._kill, key)
        elif (actor := self._actors.get(key)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # its end is reported by the task that follows it
                await actor.send.remote(message.number)

    def _kill(self, key: str) -> None:
        # the kernel kills the instance with the thread of the actor that started it
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actors.get(key) or ray.get_actor(key, self._namespace), no_restart=True)


def _why(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _asked(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that an instance may ask for, without Ray's own."""
    hidden = ("memory", "object_store_memory", "node:")
    return {name: amount for name, amount in resources.items() if not name.startswith(hidden)}


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount) or "nothing"


async def serve(connect: Connect) -> None:
    """Take messages from the supervisor until it closes the connection, then end all actors that don't outlive it."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=connect.socket))
    connection = RayConnection(writer, connect.namespace)
    keys = ray.util.list_named_actors()  # of this namespace
    writer.write(messages.framed(Connected(ray.util.get_node_ip_address(), keys)))
    async for message in messages.received(reader, messages.FromSupervisor):
        connection.take(message)
    if connect.outlived:
        os._exit(0)
    threading.Timer(END_SECONDS, os._exit, [exit_codes.FAILED]).start()
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
    asyncio.run(serve(connect))


if __name__ == "__main__":
    main()
