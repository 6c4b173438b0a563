"""Tells systemd, or another service manager, how a service is."""

import asyncio

from triptych.cluster.service import LocalService
from triptych.observe import sd_notify

INTERVAL = 1.0
"""Most seconds between two looks at the service."""
MORE_TIME = 30.0
"""Seconds by which the manager's limit on the start is put off while weights load."""


async def tell_service_manager(service: LocalService) -> None:
    """Report the start, which processes are missing, and that this process's event loop runs, until cancelled."""
    if not sd_notify.is_wanted():
        return
    watchdog = sd_notify.watchdog_seconds()
    interval = min(INTERVAL, watchdog / 3) if watchdog else INTERVAL
    was_ready, before = False, ""
    while True:
        missing, lines = service.missing, []
        status = f"STATUS=waiting for {', '.join(missing)}" if missing else "STATUS=ready"
        if not was_ready and service.was_ready:
            was_ready = True
            lines.append("READY=1")
        elif not was_ready:
            lines.append(f"EXTEND_TIMEOUT_USEC={int(MORE_TIME * 1e6)}")
        if status != before:
            lines.append(status)
            before = status
        if watchdog:
            lines.append("WATCHDOG=1")
        if lines:
            sd_notify.send(*lines)
        await asyncio.sleep(interval if was_ready else min(interval, 0.1))
