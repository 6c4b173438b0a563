"""Writes quantities for people: shares, durations, sizes. Values may be nonsense of another process."""

import math


def share(value: float) -> str:
    """Return a share as a percentage, such as ``97 %``."""
    return f"{finite(value) * 100:.0f} %"


def duration(seconds: float) -> str:
    """Return a duration in at most two units, such as ``45 ms``, ``2.1 s``, ``3 min 12 s`` or ``5 d 2 h``."""
    seconds = max(0.0, finite(seconds))
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def size(value: float) -> str:
    """Return a number of bytes in decimal units, such as ``1.2 GB``."""
    value = finite(value)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def finite(value: float) -> float:
    """Return the value within bounds that keep a text short; 0 for what is no number."""
    return min(1e15, max(-1e15, value)) if math.isfinite(value) else 0.0
