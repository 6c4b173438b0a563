"""Runs one frontend: the entry point of its process, whose parent writes a ``FrontendSpec`` to its standard input."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable

from triptych import exit_codes, running_time
from triptych.config import FrontendSpec
from triptych.errors import StartError
from triptych.heap import gc_frozen
from triptych.observe import logs
from triptych.observe.machine import end_with_parent
from triptych.observe.pipeline import FrontendNames
from triptych.server.descriptors import AcceptFailures, raise_limit
from triptych.server.frontend import Frontend

log = logging.getLogger("triptych.server.frontend_main")  # also when it is the main module


async def serve_frontend(make: Callable[[], Frontend], announce: Callable[[Frontend], None]) -> None:
    """Serve until SIGTERM, which drains, or SIGINT, which ends at once. ``announce`` is called once it serves."""
    interrupted, terminated = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    loop.set_exception_handler(AcceptFailures())
    raise_limit()
    async with make() as frontend:
        announce(frontend)
        interrupting, terminating = asyncio.create_task(interrupted.wait()), asyncio.create_task(terminated.wait())
        with gc_frozen():
            await asyncio.wait({interrupting, terminating}, return_when=asyncio.FIRST_COMPLETED)
            if not interrupted.is_set():
                draining = asyncio.create_task(frontend.drain())
                await asyncio.wait({draining, interrupting}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await draining
        interrupting.cancel()
        terminating.cancel()


def main() -> None:
    logs.set_up(logs.LogSettings(process="frontend"))
    try:
        spec = FrontendSpec.from_bytes(sys.stdin.buffer.read())
        end_with_parent(spec.supervisor)
        observe = spec.config.observe
        level = logging.getLevelNamesMapping()[observe.log_level.upper()]
        logs.set_up(logs.LogSettings(observe.log_format, level, spec.name))
        listener = socket.socket(fileno=spec.listener)
        own = None if spec.own_listener is None else socket.socket(fileno=spec.own_listener)

        def make() -> Frontend:
            return Frontend(
                spec.config,
                expects_encoders=spec.expects_encoders,
                listener=listener,
                own_listener=own,
                awaits_instances=spec.awaits_instances,
                takes_over=spec.takes_over,
                among=FrontendNames(spec.name, spec.control, spec.own_ports),
            )

        running_time.run(serve_frontend(make, lambda _: log.info("serving")))
    except StartError as error:
        logs.fatal(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)


if __name__ == "__main__":
    main()
