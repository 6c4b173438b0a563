"""Compares topologies on one checkpoint under the same load: latency, throughput, time per stage, and each process's
memory next to the size of its weights.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.topologies /tmp/mid 1EPD:2 1E1PD:1 --rounds 3

``1EPD:2`` is topology and threads per instance. Rounds alternate between the topologies, so that changes in the
machine's speed affect all of them.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.serve import Load, run
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import read_folder
from triptych.cluster.service import LocalService
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.models.registry import family_of, resolve
from triptych.topology import Role, Topology

MIB = 2**20


async def measure(folder: Path, setup: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Start a service, measure it under load and stop it."""
    name, _, threads = setup.partition(":")
    engine = EngineConfig(dtype=options.dtype, threads=int(threads or 1))
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name="m"))
    load = Load(options.images, options.size, options.size, options.text_length, options.output_tokens)
    async with LocalService(config, Topology.parse(name), show=lambda _: None) as service:
        await service.wait_until_ready()
        idle = memory()
        results = {"setup": setup, "memory_mib": idle}
        for concurrency in options.concurrency:
            results[f"concurrency {concurrency}"] = await run(
                service.url, "m", load, requests=options.requests * concurrency, concurrency=concurrency, seed=seed
            )
        results["memory_after_mib"] = memory()
        return results


def memory() -> dict[str, float]:
    """Proportional set size of every process of the service, in MiB: shared pages count in equal parts."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children()]:
        command = process.cmdline()
        name = command[command.index("--name") + 1] if "--name" in command else "frontend"
        found[name] = round(process.memory_full_info().pss / MIB, 1)
    return found


def weight_bytes(folder: Path) -> dict[str, float]:
    """What each role loads of the checkpoint, in MiB."""
    config = load_config(folder)
    stages = resolve(family_of(config).adapter)(config).weight_bytes_by_stage(read_folder(folder))
    return {
        role.value: round((role.encodes * stages["encoder"] + role.has_decoder * stages["decoder"]) / MIB, 1)
        for role in Role
    }


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one setup's medians over rounds."""
    first = rounds[0]
    found: dict[str, Any] = {"memory_mib": first["memory_mib"], "memory_after_mib": first["memory_after_mib"]}
    for key in (key for key in first if key.startswith("concurrency")):
        shown = [entry[key] for entry in rounds]
        found[key] = {
            "ttft_ms": statistics.median(entry["ttft_ms"]["p50"] for entry in shown),
            "tpot_ms": statistics.median(entry["tpot_ms"]["p50"] for entry in shown),
            "output_tokens_per_second": statistics.median(entry["output_tokens_per_second"] for entry in shown),
            "stages_ms": {
                stage: statistics.median(entry["stages_ms"].get(stage, 0.0) for entry in shown)
                for stage in shown[0]["stages_ms"]
            },
            "errors": sum(len(entry["errors"]) for entry in shown),
        }
    return found


async def main_async(options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {setup: [] for setup in options.setups}
    for number in range(options.rounds):
        for setup in options.setups:
            rounds[setup].append(await measure(options.model, setup, options, seed=number))
    return {
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "load": vars(options) | {"model": str(options.model.name)},
        "weights_mib": weight_bytes(options.model),
        "setups": {setup: summary(entries) for setup, entries in rounds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("setups", nargs="+", help="topology:threads, such as 1EPD:2 1E1PD:1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3, help="per unit of concurrency and round")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--text-length", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    result = asyncio.run(main_async(options))
    text = json.dumps(result, indent=2, default=str)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
