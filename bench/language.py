"""The language engine under load, on one checkpoint: overhead of a step, streams beside a long prompt, second turns,
and growth with batch and context. ``bench/peers.py`` compares it with other engines.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.language /tmp/mid --out bench/results/language-mid.json
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.language_steps import overhead
from bench.serve import Load, ask, request_body
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.machine import machine
from triptych.topology import Topology

MODEL = "m"
LONG_PROMPT = 2000
TURN_IMAGES = 4
GROWTH = {64: (1, 2, 4, 8, 16, 32), 512: (1, 2, 4, 8, 16, 32), 2048: (1, 2, 4, 8), 8192: (1, 2), 16384: (1,)}
"""Numbers of sequences that decode at a time, by the length of their context."""
GROWTH_TOKENS = 24


@asynccontextmanager
async def triptych(folder: Path, engine: EngineConfig) -> AsyncIterator[str]:
    """Run a service in one process. Yields its URL."""
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    async with Service(config, Topology.parse("1EPD"), show=lambda _: None) as service:
        await service.wait_until_ready()
        yield service.url


async def while_a_long_prompt_prefills(options: argparse.Namespace) -> dict[str, Any]:
    """Gaps between the tokens of a running stream, alone and while a long prompt comes in, by budget."""
    found = {}
    for budget in (512, 64, 16, 8):
        engine = EngineConfig(threads=options.threads, max_num_batched_tokens=budget)
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
    async with triptych(options.model, EngineConfig(threads=options.threads)) as url, _client(url) as client:
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
    engine = EngineConfig(threads=options.threads, max_num_seqs=max(GROWTH[64]), kv_cache_tokens=tokens + 2**14)
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
                        "memory_mib": round(memory()),
                    }
                )
    return found


def memory() -> float:
    """Proportional set size of all processes of the service, in MiB: shared pages count in equal parts."""
    own = psutil.Process()
    return sum(process.memory_full_info().pss for process in (own, *own.children())) / 2**20


def _text(length: int, output_tokens: int, seed: int) -> dict[str, Any]:
    return request_body(MODEL, Load(images=0, text_length=length, output_tokens=output_tokens), seed)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0))


async def outside_the_model(options: argparse.Namespace) -> dict[str, float]:
    return await overhead(options.model, EngineConfig(threads=options.threads), 8)


async def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Fill in ``found``, and save it after each part."""
    parts: dict[str, Callable[[argparse.Namespace], Awaitable[Any]]] = {
        "outside_the_model": outside_the_model,
        "while_a_long_prompt_prefills": while_a_long_prompt_prefills,
        "second_turn": second_turn,
        "growth": growth,
    }
    found["machine"] = machine()
    found["options"] = {name: str(value) for name, value in vars(options).items() if name != "out"}
    for name in options.parts or parts:
        found[name] = await parts[name](options)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of the second turn")
    parser.add_argument("--parts", nargs="+", help="some of the result's parts; all unless given")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    asyncio.run(measure(options, found))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
