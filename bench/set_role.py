"""Time to change an idle instance's role, compared with starting an instance in that role.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.set_role /tmp/mid --out bench/results/set-role-mid.json

A change is measured from the operator's command until the frontend has registered the instance in its new role, a start
from the process's start until then. The model's files are in the page cache.
"""

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measuring import report
from triptych.cli.flags import model_folder
from triptych.cluster.control_client import ControlClient
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, MemorySize, ServeConfig
from triptych.measure.machine import machine
from triptych.topology import Role, Topology

CHANGES = [Role.P, Role.D, Role.PD, Role.D, Role.P, Role.PD]
"""Every change between the three roles, starting from PD."""
CHANGED, STARTED = "pd0", "started"
TIMEOUT = 120.0


def change_seconds(operator: ControlClient, rounds: int) -> dict[str, list[float]]:
    """Return seconds by change, as in ``P → D``."""
    found: dict[str, list[float]] = {}
    now = Role.PD
    for then in itertools.chain.from_iterable([CHANGES] * rounds):
        began = time.monotonic()
        operator.set_role(CHANGED, then, TIMEOUT, force=True)
        found.setdefault(f"{now} → {then}", []).append(time.monotonic() - began)
        now = then
    return found


def start_seconds(operator: ControlClient, config: ServeConfig, control: str, role: Role) -> float:
    """Start an instance, and end it again."""
    command = [sys.executable, "-m", "triptych.server.instance_main", "--name", STARTED]
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(config.instance(role, STARTED, control).to_bytes())
    process.stdin.close()
    try:
        wait_for(lambda: is_there(operator, STARTED))
        return time.monotonic() - began
    finally:
        process.terminate()
        process.wait(30)
        wait_for(lambda: not is_there(operator, STARTED))


def is_there(operator: ControlClient, name: str) -> bool:
    return any(one.name == name for one in operator.status().instances)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {TIMEOUT:g} s")
        time.sleep(0.005)


def measure(config: ServeConfig, control: str, rounds: int) -> dict[str, Any]:
    with ControlClient(control, config.cluster) as operator:
        changes = change_seconds(operator, rounds)
        starts = {role: [start_seconds(operator, config, control, role) for _ in range(rounds)] for role in CHANGES[:3]}
    return {
        "change_ms": {change: _summary(seconds) for change, seconds in changes.items()},
        "start_ms": {role: _summary(seconds) for role, seconds in starts.items()},
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    ms = [1e3 * one for one in seconds]
    return {"median": round(statistics.median(ms), 1), "least": round(min(ms), 1), "most": round(max(ms), 1)}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    config = ServeConfig(
        model=model_folder(options.model),
        engine=EngineConfig(threads=1, kv_cache_memory=MemorySize.parse(options.kv_cache_memory)),
        frontend=FrontendConfig.of(port=0),
    )
    async with Service(config, Topology.parse("2PD"), show=lambda line: print(line, file=sys.stderr)) as service:
        await service.wait_until_ready()
        return await asyncio.to_thread(measure, config, service.control, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint folder, or demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    settings = {name: str(value) for name, value in vars(options).items() if name != "out"}
    result = {"machine": machine(), "options": settings} | asyncio.run(run(options))
    report(result, options.out)


if __name__ == "__main__":
    main()
