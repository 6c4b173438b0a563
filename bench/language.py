"""The language engine compared with other engines and with the machine's limits, on one checkpoint, in one run.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.language /tmp/mid --vllm /tmp/vllm --out bench/results/language-mid.json

Engines run as separate processes, started and stopped in alternating rounds, so that changes in the machine's speed
affect all of them: Triptych in several weight formats, transformers in float32 and, with ``--vllm``, vLLM in float32.
The limits of decoding and prefill, memory bandwidth and the speed of the model's matrix products, are measured next
to each of Triptych's runs, because they vary too.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from bench.language_limits import linear_ms, read_bandwidth, weight_bytes_read
from bench.language_steps import overhead
from bench.serve import Load, ask, request_body, run
from bench.topologies import memory
from triptych.cluster.service import LocalService
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.topology import Topology
from triptych.transfer_bench.measure import machine

MODEL = "m"
START_TIMEOUT = 600.0
LONG_PROMPT = 2000
TURN_IMAGES = 4
GROWTH = {64: (1, 2, 4, 8, 16, 32), 512: (1, 2, 4, 8, 16, 32), 2048: (1, 2, 4, 8), 8192: (1, 2), 16384: (1,)}
"""Numbers of sequences that decode at a time, by the length of their context."""
GROWTH_TOKENS = 24


def engine_config(name: str, threads: int, **settings: Any) -> EngineConfig:
    formats: dict[str, dict[str, Any]] = {"fp16": {}, "int8": {"quantization": "int8"}, "fp32": {"dtype": "float32"}}
    return EngineConfig(threads=threads, **formats[name], **settings)


@asynccontextmanager
async def triptych(folder: Path, engine: EngineConfig) -> AsyncIterator[str]:
    """Run a service in one process. Yields its URL."""
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    async with LocalService(config, Topology.parse("1EPD"), show=lambda _: None) as service:
        await service.wait_until_ready()
        yield service.url


@asynccontextmanager
async def vllm(environment: Path, folder: Path) -> AsyncIterator[str]:
    """Run vLLM's server on the same checkpoint. Yields its URL."""
    command = [environment / "bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--dtype", "float32", "--max-model-len", "4096", "--port", "8123", "--served-model-name", MODEL]
    command += ["--limit-mm-per-prompt", '{"image":1,"video":0}', "--no-enable-prefix-caching"]
    command += ["--skip-mm-profiling"]  # it would encode the largest images there may be, for over ten minutes
    # which cores it computes on is its own choice, which keeps one free
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = "http://127.0.0.1:8123"
    try:
        deadline = time.monotonic() + START_TIMEOUT
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while not await _answers(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("vLLM did not start")
                await asyncio.sleep(1.0)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers outlive it at times
        process.wait()


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def of_triptych(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """One round's figures in a weight format. What the machine reads is measured right before and after the requests
    that wait for it, since it changes within minutes where machines share memory."""
    async with triptych(options.model, engine_config(name, options.threads)) as url:
        before = await asyncio.to_thread(read_bandwidth, options.threads)
        found = await one_at_a_time(url, seed, options.requests)
        after = await asyncio.to_thread(read_bandwidth, options.threads)
        found = await eight_at_a_time(url, seed, found)
    products = asyncio.to_thread(linear_ms, options.model, Load(), int(found["prompt_tokens"]), options.threads)
    return found | {"read_gb_per_s": round((before + after) / 2, 2), "request_linear_ms": round(await products, 1)}


async def served(url: str, seed: int, requests: int) -> dict[str, Any]:
    """One round's figures of an endpoint, in ms and tokens/s."""
    return await eight_at_a_time(url, seed, await one_at_a_time(url, seed, requests))


async def one_at_a_time(url: str, seed: int, requests: int) -> dict[str, Any]:
    """One round's figures of an endpoint for one request at a time, in ms."""
    found = await run(url, MODEL, Load(), requests=requests, concurrency=1, seed=seed)
    return {
        "ttft_ms": found["ttft_ms"]["p50"],
        "tpot_ms": found["tpot_ms"]["p50"],
        "prompt_tokens": found["prompt_tokens"],
        **{f"{stage}_ms": ms for stage, ms in found["stages_ms"].items() if stage in {"encode", "prefill"}},
        "errors": found["errors"],
    }


async def eight_at_a_time(url: str, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """Those figures, and beside them how many tokens/s eight at a time get."""
    crowd = await run(url, MODEL, Load(), requests=2 * 8, concurrency=8, seed=seed + 1)
    return found | {
        "tokens_per_second_8": crowd["output_tokens_per_second"],
        "errors": found["errors"] + crowd["errors"],
    }


def of_transformers(folder: Path, threads: int, seed: int, requests: int) -> dict[str, Any]:
    """The same requests, one at a time, in a process of its own: without HTTP, tokenizer or template."""
    command = [sys.executable, "-m", "bench.transformers_peer", folder, "--threads", threads]
    command += ["--seed", seed, "--requests", requests]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def compare(options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Every engine, round after round; medians over the rounds so far, whenever an engine is done."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for name in ("fp16", "int8", "fp32"):
            found = await of_triptych(options, name, number * 10)
            rounds.setdefault(f"triptych {name}", []).append(found)
        peer = await asyncio.to_thread(of_transformers, options.model, options.threads, number * 10, options.requests)
        rounds.setdefault("transformers fp32", []).append(peer)
        yield {name: _medians(entries) for name, entries in rounds.items()}
        if options.vllm:
            async with vllm(options.vllm, options.model) as url:
                rounds.setdefault("vllm fp32", []).append(await served(url, number * 10, options.requests))
            yield {name: _medians(entries) for name, entries in rounds.items()}


def _medians(entries: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [error for entry in entries for error in entry.get("errors", ())]
    keys = [key for key in entries[0] if key != "errors"]
    return {key: round(statistics.median(entry[key] for entry in entries), 2) for key in keys} | {"errors": errors}


# ── what the product does while it is busy ───────────────────────────────────────────────────────────────────


async def while_a_long_prompt_prefills(options: argparse.Namespace) -> dict[str, Any]:
    """Gaps between the tokens of a running stream, alone and while a long prompt comes in, by budget."""
    found = {}
    for budget in (512, 64, 16, 8):
        engine = engine_config("fp16", options.threads, max_num_batched_tokens=budget)
        async with triptych(options.model, engine) as url, _client(url) as client:
            await ask(client, request_body(MODEL, Load(output_tokens=4), 0))
            alone = await ask(client, _text(64, 100, seed=1))
            stream = asyncio.create_task(ask(client, _text(64, 400, seed=2)))
            await asyncio.sleep(1.0)
            long = await ask(client, _text(LONG_PROMPT, 1, seed=3))
            running = await stream
            gaps = sorted(running.gaps)
            found[f"budget {budget}"] = {
                "alone_p50_ms": round(statistics.median(alone.gaps) * 1e3, 1),
                "beside_p99_ms": round(gaps[int(0.99 * (len(gaps) - 1))] * 1e3, 1),
                "beside_max_ms": round(gaps[-1] * 1e3, 1),
                "long_ttft_ms": round(long.ttft * 1e3, 1),
                "long_prompt_tokens": long.prompt_tokens,
            }
    return found


async def second_turn(options: argparse.Namespace) -> dict[str, Any]:
    """TTFT of a chat's second turn beside its first's, both with the same pictures."""
    ratios, first_ms, second_ms = [], [], []
    async with triptych(options.model, engine_config("fp16", options.threads)) as url, _client(url) as client:
        await ask(client, request_body(MODEL, Load(output_tokens=4), 999))
        for seed in range(options.rounds):
            body = request_body(MODEL, Load(images=TURN_IMAGES, output_tokens=8), seed)
            first = await ask(client, body)
            more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and now?"}]
            second = await ask(client, body | {"messages": body["messages"] + more})
            first_ms.append(first.ttft * 1e3)
            second_ms.append(second.ttft * 1e3)
            ratios.append(second.ttft / first.ttft)
    return {
        "first_ms": round(statistics.median(first_ms), 1),
        "second_ms": round(statistics.median(second_ms), 1),
        "ratio": round(statistics.median(ratios), 3),
    }


async def growth(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Text alone: output tokens/s and memory, by how many sequences run at a time and how long they are already."""
    found = []
    tokens = max(batch * context for context, batches in GROWTH.items() for batch in batches)
    engine = engine_config("fp16", options.threads, max_num_seqs=max(GROWTH[64]), kv_cache_tokens=tokens + 2**14)
    async with triptych(options.model, engine) as url, _client(url) as client:
        for context, batches in GROWTH.items():
            for batch in batches:
                bodies = [_text(context, GROWTH_TOKENS, seed=1000 * context + number) for number in range(batch)]
                # once for the prompts, so that what is measured begins with all of them in the prefix cache
                await asyncio.gather(*(ask(client, body | {"max_tokens": 1}) for body in bodies))
                samples = await asyncio.gather(*(ask(client, body) for body in bodies))
                tpot = statistics.median(sample.tpot for sample in samples)
                found.append(
                    {
                        "context": context,
                        "batch": batch,
                        "tpot_ms": round(1e3 * tpot, 1),
                        "tokens_per_second": round(batch / tpot, 1),
                        "memory_mib": round(sum(memory().values())),
                    }
                )
    return found


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Output tokens per second and memory over the number of sequences, a line for each context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, field, label in zip(
        figure.subplots(1, 2), ("tokens_per_second", "memory_mib"), ("output tokens/s", "memory, MiB"), strict=True
    ):
        for context in GROWTH:
            points = [point for point in found if point["context"] == context]
            axes.plot([p["batch"] for p in points], [p[field] for p in points], "o-", label=f"{context} tokens before")
        axes.set(xlabel="sequences at a time", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(GROWTH[64], [str(batch) for batch in GROWTH[64]])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _text(length: int, output_tokens: int, seed: int) -> dict[str, Any]:
    return request_body(MODEL, Load(images=0, text_length=length, output_tokens=output_tokens), seed)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0))


async def outside_the_model(options: argparse.Namespace) -> dict[str, float]:
    return await overhead(options.model, engine_config("fp16", options.threads), 8)


def ratios(engines: dict[str, Any], num_bytes: int) -> dict[str, float]:
    """What the issue of speed asks about: Triptych ÷ peer; below 1 is faster for times, above 1 for tokens/s.
    ``num_bytes`` of weights are read for a token in fp16."""
    found = {}
    for peer in ("vllm fp32", "transformers fp32"):
        if peer not in engines:
            continue
        for name in ("fp16", "int8", "fp32"):
            ours = engines[f"triptych {name}"]
            found[f"{name} time per token ÷ {peer}"] = ours["tpot_ms"] / engines[peer]["tpot_ms"]
            found[f"{name} TTFT ÷ {peer}"] = ours["ttft_ms"] / engines[peer]["ttft_ms"]
            if "tokens_per_second_8" in engines[peer]:
                rate = ours["tokens_per_second_8"] / engines[peer]["tokens_per_second_8"]
                found[f"{name} tokens/s at 8 ÷ {peer}"] = rate
    ours = engines["triptych fp16"]
    found["prefill and encode: time of F.linear alone ÷ time taken"] = ours["request_linear_ms"] / (
        ours["encode_ms"] + ours["prefill_ms"]
    )
    found["fp16: weight bytes read per second ÷ read bandwidth"] = (
        num_bytes / (1e6 * ours["tpot_ms"]) / ours["read_gb_per_s"]
    )
    return {name: round(value, 3) for name, value in found.items()}


async def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Fill in ``found``, and save it after each part."""
    parts: dict[str, Callable[[argparse.Namespace], Awaitable[Any]]] = {
        "outside_the_model": outside_the_model,
        "while_a_long_prompt_prefills": while_a_long_prompt_prefills,
        "second_turn": second_turn,
        "growth": growth,
    }
    found["machine"] = machine()
    found["options"] = {name: str(value) for name, value in vars(options).items() if name not in {"out", "plot"}}
    for name in options.parts or [*parts, "engines"]:
        if name in parts:
            found[name] = await parts[name](options)
            save(options, found)
            continue
        async for engines in compare(options):
            found["engines"] = engines
            save(options, found)


def save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if "engines" in found:
        found["ratios"] = ratios(found["engines"], weight_bytes_read(options.model))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot and "growth" in found:
        plot(found["growth"], options.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=3, help="per round, one at a time")
    parser.add_argument("--vllm", type=Path, help="an environment that has vLLM's CPU build")
    parser.add_argument("--parts", nargs="+", help="some of the result's parts; all unless given")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    parser.add_argument("--plot", type=Path, help="where to draw growth; needs matplotlib")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    asyncio.run(measure(options, found))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
