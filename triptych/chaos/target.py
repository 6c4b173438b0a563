"""The processes of a service on this machine: signals to them, and what they hold."""

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import StartError
from triptych.load_test.processes import descendants, named_children
from triptych.observe.metrics import PREFIX

SUPERVISOR = "serve"
"""Name of the process that supervises the others."""
ZERO_WHEN_IDLE = (
    "num_requests_queued",
    "num_items_queued",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "receive_pool_usage_perc",
    "engine_outstanding",
    "stage_outstanding",
)
"""Metrics, without their prefix, that are zero once no request is in flight."""
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Mark:
    """Something that a fault did, and when, in seconds since the run began."""

    at: float
    what: str


@dataclass
class Target:
    """A service whose supervisor is the process ``supervisor``, while one run is under way."""

    supervisor: int
    control: str
    """Control addresses of its frontends (HOST:PORT), separated by commas."""
    cluster: ClusterConfig
    marks: list[Mark] = field(default_factory=list)
    _ending: set[int] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Start a run's clock."""
        self.marks, self._began = [], time.monotonic()

    def mark(self, what: str) -> None:
        """Record that something happens now."""
        self.marks.append(Mark(time.monotonic() - self._began, what))

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process of that name. Raises StartError when there is none."""
        pid = named_children(self.supervisor).get(name)
        if pid is None:
            raise StartError(f"no process {name} runs that could be sent {number.name}")
        self.mark(f"{number.name} {name}")
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._ending.add(pid)
        os.kill(pid, number)

    async def roll_out(self) -> None:
        """Replace all processes one by one. Raises TriptychError when they aren't."""
        await asyncio.to_thread(self._roll_out)

    def _roll_out(self) -> None:
        replaced = -1
        with ControlClient(self.control, self.cluster) as client:
            for progress in client.rollout({}, surge=True):
                if progress.done > replaced:
                    replaced = progress.done
                    self.mark(f"{replaced} of {progress.total} replaced")
        self.mark("all replaced")

    @property
    def ending(self) -> list[str]:
        """The processes that a signal must end and that still run, by name."""
        return [name for name, pid in named_children(self.supervisor).items() if pid in self._ending]

    def names(self, prefix: str) -> list[str]:
        """Return the names of the running processes that consist of this prefix and a number, or nothing else."""
        names = sorted(named_children(self.supervisor))
        return [name for name in names if name.startswith(prefix) and not name.removeprefix(prefix).strip("0123456789")]


@dataclass(frozen=True)
class Held:
    """What a service holds that must return to where it was."""

    counts: Mapping[str, int]
    """Open files, sockets and shared memory of each process, the number of all processes, names in ``/dev/shm``."""
    busy: Mapping[str, float]
    """The metrics of ``ZERO_WHEN_IDLE`` that aren't zero."""

    def more_than(self, before: "Held") -> list[str]:
        """Return what is held now and wasn't before."""
        more = [
            f"{what} {count} instead of {before.counts.get(what, 0)}"
            for what, count in self.counts.items()
            if count > before.counts.get(what, 0)
        ]
        return more + [f"{what} {value:g}" for what, value in self.busy.items()]


async def held(supervisor: int, urls: Sequence[str]) -> Held:
    """Return what the service holds at this moment. ``urls`` are those of its frontends, each alone."""
    busy = [await _busy(url) for url in urls]
    return Held(counts=_counts(supervisor), busy={what: value for one in busy for what, value in one.items()})


async def _busy(url: str) -> dict[str, float]:
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10.0) as http:
            text = (await http.get("/metrics")).text
    except httpx.TransportError as error:
        return {f"no metrics: {type(error).__name__}": 1.0}
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := sample.name.removeprefix(PREFIX)) in ZERO_WHEN_IDLE and sample.value:
                found[f"{name} of {sample.labels.get('engine', 'frontend')}"] += sample.value
    return dict(found)


def _counts(supervisor: int) -> dict[str, int]:
    found = {"names in /dev/shm": len(list(_SHARED_MEMORY.iterdir()))}
    named = {SUPERVISOR: supervisor} | named_children(supervisor)
    for name, pid in named.items():
        try:
            links = [_link(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            maps = Path(f"/proc/{pid}/maps").read_text().count("/memfd:triptych-")
        except OSError:  # it has just ended
            continue
        links = [link for link in links if link]
        sockets = sum(link.startswith("socket:") for link in links)
        found |= {f"sockets of {name}": sockets, f"files of {name}": len(links) - sockets}
        found |= {f"shared memory of {name}": maps, f"processes of {name}": len(descendants(pid))}
    return found


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it has just been closed
        return ""
