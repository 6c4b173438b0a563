"""Tells systemd, or another service manager, how a service is."""

import asyncio

from triptych.cluster.service import Service
from triptych.observe import sd_notify

INTERVAL = 1.0
"""Most seconds between two looks at the service."""
MORE_TIME = 30.0
"""Seconds by which the manager's limit on the start is put off while weights load."""


async def tell_service_manager(service: Service) -> None:
    """Report the start, which processes are missing, and that this process's event loop runs, until cancelled."""
    if not sd_notify.is_wanted():
        return
    watchdog = sd_notify.watchdog_seconds()
    interval = min(INTERVAL, watchdog / 3) if watchdog else INTERVAL
    told_ready, told_status = False, ""
    while True:
        missing, ready, lines = service.missing, service.was_ready, []
        status = f"STATUS=waiting for {', '.join(missing)}" if missing else "STATUS=ready"
        if not told_ready:
            lines.append("READY=1" if ready else f"EXTEND_TIMEOUT_USEC={int(MORE_TIME * 1e6)}")
        if status != told_status:
            lines.append(status)
        if watchdog:
            lines.append("WATCHDOG=1")
        if lines and sd_notify.send(*lines):  # otherwise they are repeated
            told_ready, told_status = ready, status
        await asyncio.sleep(interval if told_ready else min(interval, 0.1))
