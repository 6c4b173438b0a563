"""Benefit of sending a layer's KV while the next layer is computed: how much of the transfer remains after prefill,
compared with sending all KV at the end.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.kv /tmp/mid --out bench/results/kv-mid.json

Throughput is compared with a copy within one process, although KV is copied twice: into the receive buffer and from
there into pages. ``decode_waits_ms`` is the additional delay of the second token over later ones. Per fabric, two
services of a prefill and a decode instance each, with one thread per instance, get text requests alternately. Sending
at the end is an option of this benchmark only.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.serve import Load, Sample, ask, request_body
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig, FrontendConfig, ServeConfig, TransferConfig
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import bytes_per_token
from triptych.measure.machine import machine
from triptych.models.registry import family_of, resolve
from triptych.server.frontend import Frontend
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Role

START_TIMEOUT = 120.0
MODEL = "m"
OUTPUT_TOKENS = 8
CACHED_PROMPTS = 3
"""Prompts that the KV caches hold: few, so that the warm-up touches all pages."""
FABRICS = ("shm", "nixl", "mooncake")


def run_instance(config: ServeConfig, role: Role, join: str, at_end: bool) -> None:
    """Main function of an instance's process: the product's entry point, modified for sending at the end."""
    from triptych.engine.kv_sink import KVSink
    from triptych.server import instance_main

    if at_end:
        provide_layers, complete = KVSink.provide_layers, KVSink.complete

        def provide_all_and_complete(sink: KVSink, active: Any) -> None:
            provide_layers(sink)
            complete(sink, active)

        KVSink.provide_layers = lambda _: None  # type: ignore[method-assign, assignment]
        KVSink.complete = provide_all_and_complete  # type: ignore[method-assign, assignment]
    instance_main.run(config.instance(role, role.value.lower(), join))


async def start(stack: AsyncExitStack, config: ServeConfig, *, at_end: bool) -> httpx.AsyncClient:
    service = await stack.enter_async_context(Frontend(config))
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None))
    context = multiprocessing.get_context("spawn")
    for role in (Role.P, Role.D):
        process = context.Process(target=run_instance, args=(config, role, service.control, at_end), daemon=True)
        process.start()
        stack.callback(process.join, 10.0)
        stack.callback(process.terminate)
    async with asyncio.timeout(START_TIMEOUT):
        while (await ask(client, text(16, seed=10**6))).error:
            await asyncio.sleep(0.2)
    return client


def text(length: int, seed: int) -> dict[str, Any]:
    return request_body(MODEL, Load(images=0, text_length=length, output_tokens=OUTPUT_TOKENS), seed)


def left_ms(sample: Sample) -> float:
    """Return the time from the end of prefill until all KV is in its pages."""
    return max(0.0, _ends(sample, "transfer") - _ends(sample, "prefill"))


def transfer_ms(sample: Sample) -> float:
    """Return the time from the first write until all KV is in its pages."""
    return _ends(sample, "transfer") - min(row["start_ms"] for row in sample.timeline if row["stage"] == "transfer")


def _ends(sample: Sample, stage: str) -> float:
    return max(float(row["end_ms"]) for row in sample.timeline if row["stage"] == stage)


async def of_fabric(options: argparse.Namespace, fabric: str, length: int) -> dict[str, Any]:
    engine = EngineConfig(
        threads=1,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_tokens=CACHED_PROMPTS * (length + 64),
    )
    config = ServeConfig(
        model=options.model,
        engine=engine,
        transfer=TransferConfig(fabric=fabric),
        frontend=FrontendConfig.of(port=0, served_model_name=MODEL),
    )
    samples: dict[str, list[Sample]] = {"by layer": [], "at the end": []}
    async with AsyncExitStack() as stack:
        clients = {name: await start(stack, config, at_end=name == "at the end") for name in samples}
        for number in range(CACHED_PROMPTS + 1):  # warm-up: the first writes to new memory are slow
            for client in clients.values():
                await ask(client, text(length, seed=10**7 + number))
        for number in range(options.rounds):
            for name, client in clients.items():
                sample = await ask(client, text(length, seed=number))
                if sample.error:
                    raise SystemExit(sample.error)
                samples[name].append(sample)
    left = {name: statistics.median(map(left_ms, found)) for name, found in samples.items()}
    whole = statistics.median(map(transfer_ms, samples["at the end"]))
    decoder = resolve(family_of(load_config(options.model)).adapter)(load_config(options.model)).decoder_config
    tokens = samples["by layer"][0].prompt_tokens
    dtype = ModelBundle(Checkpoint(options.model), engine).kv_dtype
    num_bytes = tokens * bytes_per_token(decoder.cache_specs(cache_format(dtype)))
    return {
        "prompt_tokens": tokens,
        "layers": decoder.num_layers,
        "mib": round(num_bytes / 2**20, 1),
        "whole_transfer_ms": round(whole, 1),
        "gb_per_s": round(num_bytes / whole / 1e6, 2),
        "of_memcpy": round(memcpy_ms(num_bytes) / whole, 3),
        "left_after_prefill_ms": {name: round(ms, 1) for name, ms in left.items()},
        "hidden": round(1 - left["by layer"] / whole, 3),
        "ttft_ms": {name: _median(s.ttft for s in found) for name, found in samples.items()},
        "first_to_second_token_ms": {name: _median(s.gaps[0] for s in found) for name, found in samples.items()},
        "decode_waits_ms": {
            name: _median(s.gaps[0] - statistics.median(s.gaps[1:]) for s in found) for name, found in samples.items()
        },
        "time_per_token_ms": {name: _median(s.tpot for s in found) for name, found in samples.items()},
    }


def memcpy_ms(num_bytes: int) -> float:
    """Return the time of a copy of ``num_bytes`` within this process, to memory that was used before."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _median(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000])
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fabric", nargs="+", default=FABRICS, choices=FABRICS)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "options": {n: str(v) for n, v in vars(options).items() if n != "out"},
    }
    for fabric in options.fabric:
        result[fabric] = [asyncio.run(of_fabric(options, fabric, length)) for length in options.tokens]
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
