"""Two checkouts of the project as services: times to the first token and per token, and processor time, as ratios to
those of the other.

    git worktree add /tmp/before HEAD~1
    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.served_checkouts /tmp/mid /tmp/before --flags "--dtype float32" "--dtype float16" --out served.json

Unlike ``bench.checkouts``, it needs nothing of the other checkout but ``triptych serve``, so it takes old ones. One
that needs other packages has them in its ``.venv``. Both services run on all cores. They are sent the same requests in
turns, so that other work on the machine slows both: text alone, or pictures and text, one or several at a time. No
two requests share anything that a cache holds. Each pair of turns yields a ratio.
"""

import asyncio
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from bench import peer_engines
from bench.checkouts import HERE, commit, compared, in_turn, parsed, parser_of
from bench.measuring import report
from bench.peers import free_port
from bench.serve import Load, Sample, closed_loop, request_body
from triptych.measure.machine import machine

LIMIT = 300.0
"""Seconds until a service must be ready: the first start of a checkout compiles its kernels."""
WARM = 2
"""Turns of each service that aren't counted."""


@dataclasses.dataclass(frozen=True)
class Service:
    """A checkout's service."""

    started: peer_engines.Started
    client: httpx.AsyncClient

    async def answers(self, bodies: list[dict[str, Any]]) -> list[Sample]:
        """Send requests at once and return their answers. Raises RuntimeError for one that fails."""
        samples = await closed_loop(self.client, bodies, len(bodies))
        if errors := [sample.error for sample in samples if sample.error]:
            raise RuntimeError(errors[0])
        return samples


@asynccontextmanager
async def services(model: Path, checkouts: Sequence[Path], flags: str) -> AsyncIterator[list[Service]]:
    """Run a service of each checkout with these flags. Raises NotStarted."""
    server = peer_engines.triptych(model, "1EPD", flags).server
    assert server is not None
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = []
        for number, checkout in enumerate(checkouts):
            # as -P, for all processes: otherwise Python would import from the folder that this one runs in
            variables = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
            python = checkout / ".venv/bin/python"
            command = (str(python) if python.exists() else sys.executable, *server.command[1:])
            its = dataclasses.replace(server, command=command, environment=variables)
            log = folder / f"{number}.log"
            started = await stack.enter_async_context(peer_engines.running(its, free_port(), log, LIMIT))
            client = httpx.AsyncClient(base_url=started.url, trust_env=False, timeout=None)
            found.append(Service(started, await stack.enter_async_context(client)))
        yield found


async def served(
    model: Path, checkouts: list[Path], flags: str, loads: Sequence[tuple[Load, int]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return ``compared`` by load and figure, of services with these flags. A load is a request's contents, and how
    many such requests run at a time. Raises NotStarted, and RuntimeError for a request that fails."""
    taken: dict[str, list[list[float]]] = {}
    async with services(model, checkouts, flags) as both:
        for turn in range(WARM + rounds):
            for number, (load, batch) in enumerate(loads):
                seeds = [(turn * len(loads) + number) * batch + place for place in range(batch)]
                bodies = [request_body(peer_engines.MODEL, load, seed) for seed in seeds]
                for which, service in in_turn(list(enumerate(both)), turn):
                    before = service.started.cpu_seconds
                    samples = await service.answers(bodies)
                    figures = {
                        "time to first token": statistics.median(sample.ttft for sample in samples),
                        "time per token": statistics.median(sample.tpot for sample in samples),
                        "time": max(sample.total for sample in samples),
                        "processor time": service.started.cpu_seconds - before,
                    }
                    for figure, seconds in figures.items():
                        name = f"{_shown(load)}, {batch} at a time: {figure}"
                        taken.setdefault(name, [[], []])[which].append(seconds)
    return {name: compared(*(seconds[WARM:] for seconds in both)) for name, both in taken.items()}


def _shown(load: Load) -> str:
    return f"{load.images} pictures" if load.images else "text alone"


async def main() -> None:
    parser = parser_of(__doc__, rounds=10)
    parser.add_argument("--flags", nargs="+", default=["--dtype float32", "--dtype float16"], help="of both services")
    parser.add_argument("--images", type=int, nargs="+", default=[1], help="pictures of a request: each number in turn")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="requests at a time: each number in turn")
    parser.add_argument("--output-tokens", type=int, default=Load().output_tokens)
    options = parsed(parser)
    loads = [
        (Load(images=images, output_tokens=options.output_tokens), batch)
        for images in options.images
        for batch in options.batches
    ]
    checkouts = [options.other.absolute(), HERE]
    shown = {name: str(value) for name, value in vars(options).items() if name != "out"}
    found: dict[str, Any] = {"machine": machine(), "options": shown}
    found["commits"] = [commit(checkout) for checkout in checkouts]
    found["flags"] = {}
    for flags in options.flags:
        try:
            model = options.model.absolute()
            found["flags"][flags] = await served(model, checkouts, flags, loads, options.rounds)
        except (peer_engines.NotStarted, RuntimeError) as error:
            parser.exit(1, f"{flags}: {error}\n")
    report(found, options.out)


if __name__ == "__main__":
    asyncio.run(main())
