"""Triptych beside vLLM, llama.cpp and transformers on one checkpoint: the same client, the same requests, all cores.

    scripts/setup-peers /tmp/peers
    python -m bench.make_checkpoint /tmp/mid --preset mid --tokenizer /tmp/peers/tokenizer
    python -m bench.peers --model /tmp/mid --vllm /tmp/peers/vllm --llama-cpp /tmp/peers/llama.cpp \\
        --triptych "--dtype bfloat16" "--quantization int8" --out peers.json --markdown peers.md

Servers run one at a time, each started, warmed, measured and ended. Rounds begin with different rows, so that changes
in the machine's speed affect all of them. Each request has its own picture and text, so that no cache answers.
A row that fails is reported with its server's last line; the others go on. The result is written after each row.

For Triptych the bandwidth of the memory is measured right before and after the requests that wait for it. The share of
it that a token's weights take is an estimate: scales of quantized weights aren't counted, nor is anything but weights.
"""

import argparse
import asyncio
import json
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import torch

from bench import peer_engines as engines
from bench.language_limits import read_bandwidth
from bench.peer_report import goals, markdown, summary, with_accuracy
from bench.serve import Load, Sample, ask, closed_loop, report, request_body
from triptych.checkpoint.safetensors_header import read_folder
from triptych.layers.devices import stored_dtype
from triptych.measure.machine import machine

TRIPTYCH = ("--dtype float32", "--dtype float16", "--dtype bfloat16", "--quantization int8")
VLLM = ("float32", "bfloat16")
GGUF = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
WARM_UP = 2


async def rows(options: argparse.Namespace, left_out: list[str], log: Path) -> list[engines.Row]:
    """All rows that can be measured. Says in ``left_out`` what can't, and why."""
    sequences = max(options.at_a_time, default=1)
    found = [engines.triptych(options.model, options.topology, flags, options.device) for flags in options.triptych]
    try:
        if not options.vllm:
            raise engines.MissingPeer("--vllm isn't given")
        found += [engines.vllm(options.vllm, options.model, dtype, sequences) for dtype in options.vllm_dtypes]
    except engines.MissingPeer as missing:
        left_out.append(f"vLLM is left out: {missing}")
    try:
        if not options.llama_cpp:
            raise engines.MissingPeer("--llama-cpp isn't given")
        files = options.gguf or options.model.with_name(f"{options.model.name}-gguf")
        await engines.make_gguf(options.llama_cpp, options.model, files, options.gguf_formats, log)
        found += [engines.llama_cpp(options.llama_cpp, files, name, sequences) for name in options.gguf_formats]
    except engines.MissingPeer as missing:
        left_out.append(f"llama.cpp is left out: {missing}")
    return found + [engines.transformers(dtype) for dtype in options.transformers]


async def measure(row: engines.Row, options: argparse.Namespace, number: int, log: Path) -> dict[str, Any]:
    """One round's figures of a row. Raises NotStarted and TimeoutError."""
    if row.server is None:
        return await of_transformers(row, options, number, log)
    began = time.monotonic()
    async with engines.running(row.server, free_port(), log, options.limit) as server:
        ready = time.monotonic() - began
        async with asyncio.timeout(options.limit), client_of(server.url) as client:
            found = await served(
                client, options, number, with_bandwidth=row.engine == "Triptych" and options.device == "cpu"
            )
        found["peak_mib"] = server.peak_mib
    if not found["ttft_ms"]:
        raise engines.NotStarted(f"{found['errors'][0]}; its log: {engines.last_line(log.read_text())}")
    return {"ready_s": round(ready, 1)} | found


async def served(
    client: httpx.AsyncClient, options: argparse.Namespace, number: int, *, with_bandwidth: bool
) -> dict[str, Any]:
    """One round's figures of a server: each request alone, then several at a time, none of which was sent before."""
    seeds = iter(range(number * 1_000_003, (number + 1) * 1_000_003))

    def bodies(count: int) -> list[dict[str, Any]]:
        return [request_body(engines.MODEL, options.load, next(seeds)) for _ in range(count)]

    for body in bodies(1 if options.quick else WARM_UP):
        await ask(client, body)
    before = await bandwidth() if with_bandwidth else 0.0
    samples = await closed_loop(client, bodies(options.requests), 1)
    found = alone(samples, options.load.output_tokens)
    if with_bandwidth:
        found["read_gb_per_s"] = round((before + await bandwidth()) / 2, 2)
    for level in options.at_a_time:
        crowd = bodies(options.crowd_requests)
        began = time.perf_counter()
        samples = await closed_loop(client, crowd, level)
        at_a_time = report(samples, time.perf_counter() - began)
        if "ttft_ms" in at_a_time:
            found[f"tokens_per_second_{level}"] = at_a_time["output_tokens_per_second"]
            found[f"at_{level}"] = {name: at_a_time[name] for name in ("ttft_ms", "tpot_ms", "inter_token_ms")}
        found["errors"] += at_a_time["errors"]
        found["short"] += short(samples, options.load.output_tokens)
    return found


def alone(samples: Sequence[Sample], tokens: int) -> dict[str, Any]:
    """Figures of requests that ran one at a time, in ms, and of Triptych's stages."""
    good = [sample for sample in samples if not sample.error]
    stages = report(list(samples), 1.0).get("stages_ms", {})
    return {
        "ttft_ms": [round(sample.ttft * 1e3, 1) for sample in good],
        "tpot_ms": [round(sample.tpot * 1e3, 2) for sample in good],
        **({"prompt_tokens": statistics.median(sample.prompt_tokens for sample in good)} if good else {}),
        **{f"{stage}_ms": ms for stage, ms in stages.items() if stage in {"encode", "prefill"}},
        "short": short(samples, tokens),
        "errors": [sample.error for sample in samples if sample.error],
    }


def short(samples: Sequence[Sample], tokens: int) -> int:
    """Return how many answers have another number of tokens than was asked for."""
    return sum(not sample.error and sample.tokens != tokens for sample in samples)


async def bandwidth() -> float:
    return await asyncio.to_thread(read_bandwidth, len(engines.cores()))


async def of_transformers(row: engines.Row, options: argparse.Namespace, number: int, log: Path) -> dict[str, Any]:
    """The same requests one at a time, without HTTP, tokenizer or template. Raises NotStarted."""
    async with (
        asyncio.timeout(options.limit),
        engines.in_process(options.model, row.weights, options.load, log, options.device) as peer,
    ):
        first, *asked = [await peer.answer(number * 1_000_003 + one) for one in range(options.requests + 1)]
        by_figure = {name: [figures[name] for figures in asked] for name in ("ttft_ms", "tpot_ms")}
        return by_figure | {
            "prompt_tokens": first["prompt_tokens"],
            "peak_mib": peer.peak_mib,
            "short": 0,
            "errors": [],
        }


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0), limits=limits)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def rotated(all_rows: list[engines.Row], number: int, rounds: int) -> list[engines.Row]:
    """Return the rows in the order of a round: rounds begin at evenly spaced rows."""
    first = number * len(all_rows) // rounds
    return all_rows[first:] + all_rows[:first]


async def compare(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Measure all rows, round after round; saves after each one."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(ending, task.cancel)  # so that servers are ended
    found = with_accuracy(description(options), options.accuracy)
    found["versions"] = await engines.versions(options.vllm, options.llama_cpp, logs / "versions.log")
    all_rows = await rows(options, found["left_out"], logs / "convert.log")
    for note in found["left_out"]:
        show(note)
    found["rows"] = {row.name: described(row) for row in all_rows}
    for number in range(options.rounds):
        for row in rotated(all_rows, number, options.rounds):
            began = time.monotonic()
            run: dict[str, Any] = {"row": row.name, "round": number}
            log = logs / re.sub(r"\W+", "-", f"{row.name} {number}.log")
            try:
                run["figures"] = await measure(row, options, number, log)
            except engines.NotStarted as failure:
                run["failed"] = str(failure)
            except TimeoutError:
                run["failed"] = f"not done within {options.limit:g} s: {engines.last_line(log.read_text())}"
            run["seconds"] = round(time.monotonic() - began, 1)
            found["runs"].append(run)
            show(f"{number + 1}/{options.rounds} {row.name}, {run['seconds']} s: {told(run)}")
            save(options, found)
    return found


def told(run: dict[str, Any]) -> str:
    """A run in one line."""
    if "failed" in run:
        return f"failed: {run['failed']}"
    figures = run["figures"]
    rates = {name: value for name, value in figures.items() if name.startswith("tokens_per_second")}
    return f"{figures['ttft_ms']} ms, {figures['tpot_ms']} ms, {rates}"


def description(options: argparse.Namespace) -> dict[str, Any]:
    """The result before the first run: machine, model, load."""
    tensors = read_folder(options.model)
    words = set(Path("/proc/cpuinfo").read_text().split())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine() | {"instructions": [name for name in INSTRUCTIONS if name in words]},
        "model": {
            "name": options.model.name,
            "parameters": sum(torch.Size(info.shape).numel() for info in tensors.values()),
            "dtype": stored_dtype(tensors),
        },
        "load": asdict(options.load)
        | {
            "rounds": options.rounds,
            "requests": options.requests,
            "at_a_time": options.at_a_time,
            "crowd_requests": options.crowd_requests,
        },
        "left_out": [],
        "rows": {},
        "runs": [],
    }


def described(row: engines.Row) -> dict[str, Any]:
    """What the tables need to know of a row."""
    found: dict[str, Any] = {"engine": row.engine, "settings": row.settings, "weights": row.weights}
    if row.server:
        found["command"] = row.server.shown
    if row.weight_bytes:
        found["weight_bytes_read"] = row.weight_bytes
    return found


def save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write both files, with what follows from the runs so far."""
    for run in found["runs"]:
        num_bytes, figures = found["rows"][run["row"]].get("weight_bytes_read"), run.get("figures", {})
        if num_bytes and "read_gb_per_s" in figures:
            seconds = statistics.median(figures["tpot_ms"]) / 1e3
            figures["read_share"] = round(num_bytes / seconds / 1e9 / figures["read_gb_per_s"], 3)
    found |= {"summary": summary(found), "goals": goals(found)}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(found))


def show(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder that all engines can load")
    parser.add_argument("--triptych", nargs="*", default=TRIPTYCH, metavar="FLAGS", help="a row per string of flags")
    parser.add_argument("--topology", default="1EPD", help="Triptych's")
    parser.add_argument("--vllm", type=Path, metavar="ENV", help="an environment with vLLM's CPU build")
    parser.add_argument("--vllm-dtypes", nargs="*", default=VLLM, metavar="DTYPE", help="a row each")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="has bin/llama-server, bin/llama-quantize and convert"
    )
    parser.add_argument("--gguf", type=Path, metavar="DIR", help="where GGUF files are or go; default: MODEL-gguf")
    parser.add_argument("--gguf-formats", nargs="*", default=GGUF, metavar="FORMAT", help="a row each")
    parser.add_argument(
        "--transformers", nargs="*", default=(), metavar="DTYPE", help="add transformers in process, a row each"
    )
    parser.add_argument("--device", default="cpu", help="of Triptych and transformers: cpu or cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=3, help="per round, one at a time")
    parser.add_argument("--at-a-time", type=int, nargs="*", default=[8, 16], help="also with this many at a time")
    parser.add_argument("--crowd-requests", type=int, default=16, help="per round and number at a time")
    parser.add_argument("--images", type=int, default=1, help="of 448 x 448 pixels; 0: text alone")
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a row to start, and to be measured")
    parser.add_argument("--quick", action="store_true", help="one round of few requests, alone and 8 at a time")
    parser.add_argument(
        "--accuracy", type=Path, nargs="+", default=[], help="JSON of bench.accuracy: adds the accuracy of formats"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--markdown", type=Path, help="where to write it as Markdown")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.at_a_time, options.crowd_requests = 1, 2, [8], 8
    options.load = Load(images=options.images, words=options.words, output_tokens=options.output_tokens)
    return options


def run(
    options: argparse.Namespace,
    compare: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, dict[str, Any]]],
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    """Compare engines, with their logs in the folder that the options name or a temporary one, and print the result."""
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        with suppress(asyncio.CancelledError):
            print(markdown(asyncio.run(compare(options, logs))))
            return
    sys.exit("stopped by a signal")


def main() -> None:
    run(parse_arguments(), compare, markdown)


if __name__ == "__main__":
    main()
