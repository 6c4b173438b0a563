"""Load generator for any OpenAI-compatible endpoint: random JPEGs and text, closed-loop or open-loop. Reports TTFT,
TPOT, inter-token latency and throughput.

    python -m bench.serve --url http://127.0.0.1:8000 --model mid --concurrency 1 --requests 5
    python -m bench.serve --url http://127.0.0.1:8000 --model mid --rate 0.5 --requests 20

Closed-loop (``--concurrency``) keeps a number of requests running. Open-loop (``--rate``) starts them at Poisson times,
whether or not earlier ones are done. Every request has its own images and text, so that no cache helps.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

from triptych.measure.load import client as load_client
from triptych.measure.load.client import STREAMED, Sample

__all__ = [
    "STREAMED",
    "Load",
    "Sample",
    "ask",
    "closed_loop",
    "open_loop",
    "random_jpeg",
    "report",
    "request_body",
    "run",
]

WORDS = ("stone", "river", "lamp", "seven", "under", "cloud", "quick", "paper", "green", "north", "wheel", "salt")


@dataclass(frozen=True)
class Load:
    """Contents of a request. ``text_length`` is in characters: the tokens of random checkpoints, and about four times
    the tokens of a real tokenizer. With ``words`` the text is that many words, whatever their length."""

    images: int = 1
    width: int = 448
    height: int = 448
    text_length: int = 128
    output_tokens: int = 32
    words: int = 0


def request_body(model: str, load: Load, seed: int) -> dict[str, Any]:
    """Return a chat request with random JPEGs before its text, for exactly ``output_tokens`` tokens."""
    rng = random.Random(seed)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": random_jpeg(load.width, load.height, rng.randrange(2**32))}}
        for _ in range(load.images)
    ]
    text = " ".join(rng.choices(WORDS, k=load.words or load.text_length))
    parts.append({"type": "text", "text": text if load.words else text[: load.text_length]})
    return {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": load.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **STREAMED,
    }


def random_jpeg(width: int, height: int, seed: int) -> str:
    """A data: URL of a picture that no two requests share. Smooth, so that it has a photograph's size."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Sample:
    """Send one request and return its answer."""
    return await load_client.ask(client, _json(body))


async def closed_loop(client: httpx.AsyncClient, bodies: list[dict[str, Any]], concurrency: int) -> list[Sample]:
    """Keep ``concurrency`` requests running until all are done."""
    return await load_client.closed_loop(client, [_json(body) for body in bodies], concurrency)


async def open_loop(client: httpx.AsyncClient, bodies: list[dict[str, Any]], rate: float, seed: int) -> list[Sample]:
    """Start requests at Poisson times, ``rate`` a second on average."""
    times = load_client.poisson_times(rate, len(bodies), seed)
    return await load_client.open_loop(client, [_json(body) for body in bodies], times)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def report(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Medians and p99s in milliseconds, throughputs per second."""
    good = [sample for sample in samples if not sample.error]
    result: dict[str, Any] = {
        "requests": len(samples),
        "errors": [sample.error for sample in samples if sample.error],
        "seconds": round(seconds, 2),
    }
    if good:
        gaps = [gap for sample in good for gap in sample.gaps] or [0.0]
        result |= {
            "prompt_tokens": statistics.median(sample.prompt_tokens for sample in good),
            "ttft_ms": _spread([sample.ttft for sample in good]),
            "tpot_ms": _spread([sample.tpot for sample in good]),
            "inter_token_ms": _spread(gaps),
            "requests_per_second": round(len(good) / seconds, 3),
            "output_tokens_per_second": round(sum(sample.tokens for sample in good) / seconds, 2),
            "stages_ms": _stages(good),
        }
    return result


def _stages(samples: list[Sample]) -> dict[str, float]:
    """Median over requests of the time that each stage took in all; only Triptych says."""
    totals: dict[str, list[float]] = {}
    for sample in samples:
        per_stage: dict[str, float] = {}
        for interval in sample.timeline:
            took = interval["end_ms"] - interval["start_ms"]
            per_stage[interval["stage"]] = per_stage.get(interval["stage"], 0.0) + took
        for stage, took in per_stage.items():
            totals.setdefault(stage, []).append(took)
    return {stage: round(statistics.median(times), 1) for stage, times in totals.items()}


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50": round(statistics.median(ordered) * 1000, 1), "p99": round(p99 * 1000, 1)}


async def run(
    url: str, model: str, load: Load, *, requests: int, concurrency: int = 1, rate: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """One measurement, after one request that isn't counted."""
    bodies = [request_body(model, load, seed * 1_000_003 + number) for number in range(requests + 1)]
    async with httpx.AsyncClient(
        base_url=url,
        trust_env=False,
        timeout=httpx.Timeout(None, connect=10.0),
        limits=httpx.Limits(max_connections=None),
    ) as client:
        await ask(client, bodies.pop())
        began = time.perf_counter()
        if rate:
            samples = await open_loop(client, bodies, rate, seed)
        else:
            samples = await closed_loop(client, bodies, concurrency)
        return report(samples, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--concurrency", type=int, default=1, help="closed loop: requests that run at a time")
    how.add_argument("--rate", type=float, default=0.0, help="open loop: requests that begin each second")
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    given = parser.parse_args()
    load = Load(**{name: getattr(given, name) for name in asdict(Load())})
    how_many = {"requests": given.requests, "concurrency": given.concurrency, "rate": given.rate, "seed": given.seed}
    result = asyncio.run(run(given.url, given.model, load, **how_many))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
