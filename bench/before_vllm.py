"""Encode instances before vLLM, beside vLLM alone on the same cores.

    scripts/setup-peers /tmp/peers
    python -m bench.make_checkpoint /tmp/mid --preset mid --tokenizer /tmp/peers/tokenizer
    python -m bench.before_vllm --model /tmp/mid --vllm /tmp/peers/vllm --out bench/results/before-vllm.json

Three figures: the time to the first token of a request with one image; the time per token of answers without images
while requests with images come; and the processor time of an engine whose requests wait for rows, for three families.

Both services run all the time, and the one that isn't measured is stopped: a worker of vLLM's computes while it waits.
They take turns within a round. Each request has its own images and text, so that no cache answers.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import peer_engines as engines
from bench.measuring import report
from bench.peers import client_of, free_port
from bench.serve import Load, Sample, ask, request_body
from tests.support.ec_vllm import transfer_config, variables_of_vllm
from tests.support.vllm_checkpoints import SHAPES
from triptych.checkpoint.config_files import load_config
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.measure.machine import machine
from triptych.models.vllm_grids import GRID_FAMILIES

START_LIMIT = 900.0
WARM_UP = 2
LONG_LEASE = ("--lease-expiry", "300")
"""A stopped encode instance isn't replaced meanwhile."""


@dataclass
class Side:
    """A service that is compared."""

    client: httpx.AsyncClient
    roots: Sequence[int]
    """Processes that, with all that they started, are the service."""
    control: str = ""

    def processes(self) -> Iterator[psutil.Process]:
        for root in self.roots:
            with suppress(psutil.NoSuchProcess):
                one = psutil.Process(root)
                yield from (one, *one.children(recursive=True))

    def engine(self) -> psutil.Process:
        return next(one for one in self.processes() if "EngineCore" in " ".join(one.cmdline()))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        every = list(self.processes())
        for one in every:
            one.suspend()
        try:
            yield
        finally:
            for one in every:
                with suppress(psutil.NoSuchProcess):
                    one.resume()


@asynccontextmanager
async def alone(options: argparse.Namespace, model: Path, logs: Path) -> AsyncIterator[Side]:
    """vLLM, which encodes images itself."""
    row = engines.vllm(options.vllm, model, options.dtype, options.sequences)
    assert row.server is not None
    log = logs / "alone.log"
    async with engines.running(row.server, free_port(), log, START_LIMIT) as server, client_of(server.url) as client:
        yield Side(client, [server.pid])


@asynccontextmanager
async def before(
    options: argparse.Namespace, model: Path, logs: Path, flags: Sequence[str] = ()
) -> AsyncIterator[Side]:
    """vLLM with the connector, behind encode instances."""
    port, control = free_port(), f"127.0.0.1:{free_port()}"
    row = engines.vllm(options.vllm, model, options.dtype, options.sequences)
    assert row.server is not None
    command = [*row.server.command, "--ec-transfer-config", json.dumps(transfer_config({"frontends": [control]}))]
    command += ["--language-model-only"] if load_config(model)["model_type"].startswith(GRID_FAMILIES) else []
    path = {"PYTHONPATH": variables_of_vllm(logs)["PYTHONPATH"]}
    vllm = replace(row.server, command=tuple(command), environment={**row.server.environment, **path})
    service = engines.triptych(model, options.topology, f"--dtype {options.dtype} {options.triptych}").server
    assert service is not None
    more = ["--engine", f"vllm-ec=http://127.0.0.1:{port}", "--control-port", control.rpartition(":")[2], *flags]
    service = replace(service, command=(*service.command, *more))
    async with (
        engines.running(vllm, port, logs / "vllm.log", START_LIMIT) as behind,
        engines.running(service, free_port(), logs / "triptych.log", START_LIMIT) as front,
        client_of(front.url) as client,
    ):
        yield Side(client, [behind.pid, front.pid], control)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def first_tokens(side: Side, options: argparse.Namespace, seeds: Iterator[int]) -> list[float]:
    """Milliseconds to the first token of requests with one image, one at a time."""
    load = Load(output_tokens=4)
    return [1e3 * _good(await ask(side.client, body)).ttft for body in _bodies(load, seeds, options.requests)]


async def gaps_under_load(side: Side, options: argparse.Namespace, seeds: Iterator[int]) -> list[float]:
    """Milliseconds between two tokens of answers to texts, while requests with images come one after the other."""

    async def pictures() -> None:
        while True:
            for body in _bodies(Load(output_tokens=1), seeds, 1):
                _good(await ask(side.client, body))

    texts = _bodies(Load(images=0, output_tokens=options.tokens), seeds, options.answers)
    async with asyncio.TaskGroup() as group:
        coming = [group.create_task(pictures()) for _ in range(options.pictures)]
        answers = await asyncio.gather(*(ask(side.client, body) for body in texts))
        for one in coming:
            one.cancel()
    return [1e3 * gap for answer in answers for gap in _good(answer).gaps]


async def waiting_share(side: Side, options: argparse.Namespace, seeds: Iterator[int]) -> float:
    """Cores that the engine's process uses while all its requests wait for rows."""
    with ControlClient(side.control, ClusterConfig()) as operator:
        encoders = [psutil.Process(one.pid) for one in operator.status().instances]
    for one in encoders:
        one.suspend()
    asked = [asyncio.create_task(ask(side.client, body)) for body in _bodies(Load(output_tokens=1), seeds, 4)]
    await asyncio.sleep(3.0)
    engine, began = side.engine(), time.monotonic()
    used = sum(engine.cpu_times()[:2])
    await asyncio.sleep(options.seconds)
    share = (sum(engine.cpu_times()[:2]) - used) / (time.monotonic() - began)
    assert not any(one.done() for one in asked), "they wait"
    for one in encoders:
        one.resume()
    for answer in asked:
        _good(await answer)
    return round(share, 4)


def _bodies(load: Load, seeds: Iterator[int], count: int) -> list[dict[str, Any]]:
    return [request_body(engines.MODEL, load, next(seeds)) for _ in range(count)]


def _good(sample: Sample) -> Sample:
    assert not sample.error, sample.error
    return sample


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[round(0.99 * (len(ordered) - 1))]


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def compare(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Measure both services in turns."""
    seeds, rounds = iter(range(10**9)), []
    async with AsyncExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, starting in (("alone", alone), ("before", before)):
            folder = logs / name
            folder.mkdir()
            sides[name] = await stack.enter_async_context(starting(options, options.model, folder))
            for body in _bodies(Load(output_tokens=4), seeds, WARM_UP):
                _good(await ask(sides[name].client, body))
        for number in range(options.rounds):
            found: dict[str, dict[str, float]] = {}
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                (other,) = (side for key, side in sides.items() if key != name)
                with other.stopped():
                    await _until_ready(sides[name])
                    found[name] = {
                        "ttft_ms": statistics.median(await first_tokens(sides[name], options, seeds)),
                        "tpot_p99_ms": p99(await gaps_under_load(sides[name], options, seeds)),
                    }
            rounds.append(found)
            print(json.dumps(found), flush=True)
    names = ("ttft_ms", "tpot_p99_ms")
    return {
        "rounds": rounds,
        **{side: {name: spread([one[side][name] for one in rounds]) for name in names} for side in ("alone", "before")},
        "before ÷ alone": {
            name: spread([one["before"][name] / one["alone"][name] for one in rounds]) for name in names
        },
    }


async def _until_ready(side: Side) -> None:
    """Leases have run out while it was stopped."""
    async with asyncio.timeout(60):
        while (answer := await ask(side.client, _bodies(Load(output_tokens=1), iter([-1]), 1)[0])).error:
            await asyncio.sleep(0.5)
    _good(answer)


async def waiting(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The cores of each family's engine."""
    found: dict[str, float] = {}
    for shape, make in SHAPES.items():
        logs = folder / shape
        logs.mkdir()
        async with before(options, make(logs / "model"), logs, LONG_LEASE) as side:
            seeds = iter(range(10**6))
            _good(await ask(side.client, _bodies(Load(output_tokens=1), seeds, 1)[0]))
            found[shape] = await waiting_share(side, options, seeds)
            print(json.dumps({shape: found[shape]}), flush=True)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint that both load; without it, only engines that wait")
    parser.add_argument("--vllm", type=Path, required=True, metavar="ENV", help="an environment with vLLM's CPU build")
    parser.add_argument("--topology", default="1E")
    parser.add_argument("--triptych", default="", metavar="FLAGS", help="more flags of triptych serve")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", type=int, default=16, help="of vLLM at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5, help="with an image, one at a time, per round")
    parser.add_argument("--answers", type=int, default=4, help="to texts, at a time")
    parser.add_argument("--tokens", type=int, default=100, help="of each of them")
    parser.add_argument("--pictures", type=int, default=2, help="requests with an image at a time meanwhile")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which a waiting engine is watched")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    found: dict[str, Any] = {"machine": machine(), "settings": {k: str(v) for k, v in vars(options).items()}}
    with tempfile.TemporaryDirectory() as name:
        if options.model:
            found |= asyncio.run(compare(options, Path(name)))
        found["engine_cores_waiting"] = asyncio.run(waiting(options, Path(name)))
    report(found, options.out)


if __name__ == "__main__":
    main()
