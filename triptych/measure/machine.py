"""What a report says of the machine that it was measured on."""

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Describe the machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.machine()
