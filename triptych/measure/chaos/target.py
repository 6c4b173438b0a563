"""The processes of a service on this machine: signals to them, and what they hold."""

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import StartError
from triptych.measure.load.processes import command_of, descendants, named_children, usage
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
    "instance_outstanding",
    "stage_outstanding",
)
"""Metrics, without their prefix, that are zero once no request is in flight."""
MORE_THREADS = 8
"""Threads that a process may have more than before: pools start theirs when they are first needed."""
MEMORY_GROWTH, MORE_MEMORY = 1.5, 64 * 2**20
"""Memory may grow to this multiple of what it was, and by these bytes."""
_SHARED_MEMORY = Path("/dev/shm")


class Kin(StrEnum):
    """Processes of a service that do the same."""

    INSTANCE = "instance"
    FRONTEND = "frontend"
    DECODER = "media decoder"
    FORK_SERVER = "fork server"


_MODULES = {
    Kin.INSTANCE: "triptych.server.instance_main",
    Kin.FRONTEND: "triptych.server.frontend_main",
    Kin.DECODER: "triptych.sandbox.child",
    Kin.FORK_SERVER: "triptych.server.fork_server",
}


@dataclass(frozen=True)
class Ranked:
    """A process by its place among those of its group that run at the moment, by name and age; past the last one, the
    count begins again."""

    group: Kin
    rank: int

    def __str__(self) -> str:
        return f"{self.group} {self.rank}"


Victim = str | Ranked
"""A process: its name, or its rank."""


@dataclass(frozen=True)
class Process:
    """A process of a service that runs."""

    name: str
    pid: int

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


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

    def find(self, victim: Victim) -> Process:
        """Return a running process. Raises StartError when there is none."""
        if isinstance(victim, str):
            if pid := named_children(self.supervisor).get(victim):
                return Process(victim, pid)
        elif found := self._group(victim.group):
            return found[victim.rank % len(found)]
        raise StartError(f"no process {victim} runs")

    def _group(self, group: Kin) -> list[Process]:
        found = []
        for pid in descendants(self.supervisor):
            words = command_of(pid)
            if _MODULES[group] in words:
                found.append(Process(words[words.index("--name") + 1] if "--name" in words[:-1] else group, pid))
        return sorted(found, key=lambda one: (one.name, one.pid))

    def send(self, victim: Victim, number: signal.Signals) -> Process:
        """Send a signal to a process, and return it. Raises StartError when there is none."""
        process = self.find(victim)
        self.mark(f"{number.name} {process.name}")
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._ending.add(process.pid)
        process.send(number)
        return process

    @contextlib.contextmanager
    def operating(self) -> Iterator[ControlClient]:
        """Connect as an operator. Raises StartError and FrontendSilent."""
        with ControlClient(self.control, self.cluster) as client:
            yield client

    async def roll_out(self, model: str = "") -> None:
        """Replace all processes one by one, by those of another checkpoint if one is given. Raises TriptychError when
        they aren't."""
        await asyncio.to_thread(self._roll_out, model)

    def _roll_out(self, model: str) -> None:
        replaced = -1
        with self.operating() as client:
            for progress in client.rollout({}, surge=True, model=model):
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
    threads: Mapping[str, int] = field(default_factory=dict)
    """Threads of each process."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Resident bytes of each process."""

    def more_than(self, before: "Held") -> list[str]:
        """Return what is held now and wasn't before."""
        more = [
            f"{what} {count} instead of {before.counts.get(what, 0)}"
            for what, count in self.counts.items()
            if count > before.counts.get(what, 0)
        ]
        more += [
            f"{count} threads of {name} instead of {before.threads[name]}"
            for name, count in self.threads.items()
            if count > before.threads.get(name, count) + MORE_THREADS
        ]
        more += [
            f"{size >> 20} MiB of {name} instead of {before.memory[name] >> 20}"
            for name, size in self.memory.items()
            if size > MEMORY_GROWTH * before.memory.get(name, size) + MORE_MEMORY
        ]
        return more + [f"{what} {value:g}" for what, value in self.busy.items()]


async def held(supervisor: int, urls: Sequence[str]) -> Held:
    """Return what the service holds at this moment. ``urls`` are those of its frontends, each alone."""
    busy = [await _busy(url) for url in urls]
    named = {SUPERVISOR: supervisor} | named_children(supervisor)
    return Held(
        counts=_counts(named),
        busy={what: value for one in busy for what, value in one.items()},
        threads={name: _num_threads(pid) for name, pid in named.items()},
        memory={name: usage(pid, alone=True).resident_bytes for name, pid in named.items()},
    )


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


def _num_threads(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:  # it has just ended
        return 0


def _counts(named: Mapping[str, int]) -> dict[str, int]:
    found = {"names in /dev/shm": len(list(_SHARED_MEMORY.iterdir()))}
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
