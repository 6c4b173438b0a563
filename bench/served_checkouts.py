"""Two checkouts of the project as services: times to the first token and per token, as ratios to those of the other.

    git worktree add /tmp/before HEAD~1
    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.served_checkouts /tmp/mid /tmp/before --flags "--dtype float32" "--dtype float16" --out served.json

Unlike ``bench.checkouts``, it needs nothing of the other checkout but ``triptych serve``, so it takes old ones. Both
services run on all cores. They are sent one request at a time, each its own picture and text, in turns, so that other
work on the machine slows both. Each pair of turns yields a ratio.
"""

import asyncio
import dataclasses
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from bench import peer_engines
from bench.checkouts import HERE, commit, compared, in_turn, parsed, parser_of
from bench.measuring import report
from bench.peers import free_port
from bench.serve import Load, Sample, ask, request_body
from triptych.transfer_bench.measure import machine

LIMIT = 300.0
"""Seconds until a service must be ready: the first start of a checkout compiles its kernels."""
WARM = 2
"""Requests to each service that aren't counted."""
FIGURES = {"time to first token": "ttft", "time per token": "tpot"}


async def served(model: Path, checkouts: list[Path], flags: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return ``compared`` by figure, of services with these flags. Raises NotStarted, and RuntimeError for a request
    that fails."""
    row = peer_engines.triptych(model, "1EPD", flags)
    assert row.server is not None
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = []
        for number, checkout in enumerate(checkouts):
            # as -P, for all processes: otherwise Python would import from the folder that this one runs in
            variables = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
            server = dataclasses.replace(row.server, environment=variables)
            log = folder / f"{number}.log"
            started = await stack.enter_async_context(peer_engines.running(server, free_port(), log, LIMIT))
            client = httpx.AsyncClient(base_url=started.url, trust_env=False, timeout=None)
            clients.append(await stack.enter_async_context(client))
        taken: list[list[Sample]] = [[], []]
        for turn in range(WARM + rounds):
            for client, samples in in_turn(list(zip(clients, taken, strict=True)), turn):
                sample = await ask(client, request_body(peer_engines.MODEL, Load(), turn))
                if sample.error:
                    raise RuntimeError(sample.error)
                samples.append(sample)
    return {
        figure: compared(*([getattr(sample, name) for sample in samples[WARM:]] for samples in taken))
        for figure, name in FIGURES.items()
    }


async def main() -> None:
    parser = parser_of(__doc__, rounds=10)
    parser.add_argument("--flags", nargs="+", default=["--dtype float32", "--dtype float16"], help="of both services")
    options = parsed(parser)
    checkouts = [options.other.absolute(), HERE]
    shown = {name: str(value) for name, value in vars(options).items() if name != "out"}
    found: dict[str, Any] = {"machine": machine(), "options": shown}
    found["commits"] = [commit(checkout) for checkout in checkouts]
    found["flags"] = {}
    for flags in options.flags:
        try:
            found["flags"][flags] = await served(options.model.absolute(), checkouts, flags, options.rounds)
        except (peer_engines.NotStarted, RuntimeError) as error:
            parser.exit(1, f"{flags}: {error}\n")
    report(found, options.out)


if __name__ == "__main__":
    asyncio.run(main())
