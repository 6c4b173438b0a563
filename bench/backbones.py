"""Backbones beside transformers, vLLM and llama.cpp: time to the first token of a prompt of 1,024 tokens,
time per token, and peak memory, of random checkpoints with about 0.5 billion parameters each.

    scripts/setup-peers /tmp/peers
    python -m bench.backbones /tmp/backbones --tokenizer /tmp/peers/tokenizer --llama-cpp /tmp/peers/llama.cpp \\
        --vllm /tmp/peers/vllm --out bench/results/backbones.json --markdown backbones.md

The checkpoints are made in the folder, with their GGUF files beside; those that are there already stay
(``--prepare`` makes them and ends). All engines of a backbone run side by side, idle but for one, and answer one
request each in turn, so that changes in the machine's speed affect all of them. Rounds begin with different engines;
the first round warms up. Requests and figures are those of ``bench/peers.py``: Triptych, vLLM and llama.cpp are
served, transformers runs in process. Backbones that this version doesn't serve are left out.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peer_engines as engines
from bench.backbone_checkpoints import BACKBONES, config_of, make
from bench.peer_report import (
    GOAL_COLUMNS,
    Goal,
    circumstances,
    code,
    goal_cells,
    goals,
    header,
    notes,
    served_figures,
    spread,
    summary,
    title,
)
from bench.peers import alone, client_of, described, description, free_port, rotated, run, show
from bench.serve import WORDS, Load, closed_loop, request_body
from triptych.errors import CheckpointError
from triptych.models.registry import backbone_of
from triptych.prompt.prompt import PromptBuilder

PROMPT = 1024
DTYPES = ("float16", "bfloat16")
GOALS = (
    *(Goal("tpot_ms", (dtype,), 0.45, "Transformers", (dtype,)) for dtype in DTYPES),
    *(Goal("ttft_ms", (dtype,), 0.6, "Transformers", (dtype,)) for dtype in DTYPES),
    Goal("tpot_ms", ("float16",), 1.0, "llama.cpp", ("F16",)),
)
Answer = Callable[[int], Awaitable[dict[str, Any]]]
"""Returns the figures of the request with a seed."""


@dataclass(frozen=True)
class Peer:
    """An engine that is ready."""

    answer: Answer
    process: engines.Started | engines.InProcess


def load_of(folder: Path, output_tokens: int) -> Load:
    """Return requests with prompts of ``PROMPT`` tokens. A word is a token of Qwen's tokenizer, and a character one of
    a tokenizer that is made up."""
    builder = PromptBuilder(folder)
    are_words = len(builder.tokenizer.encode("".join(f" {word}" for word in WORDS))) == len(WORDS)

    def load(length: int) -> Load:
        return Load(images=0, words=are_words * length, text_length=length, output_tokens=output_tokens)

    body = request_body(engines.MODEL, load(PROMPT), 0)
    around = len(builder.build(body["messages"]).tokens) - PROMPT
    return load(PROMPT - around)


async def rows(options: argparse.Namespace, folder: Path, left_out: list[str], log: Path) -> list[engines.Row]:
    """All engines that serve the folder. Says in ``left_out`` which don't, and why."""
    found = [engines.triptych(folder, "1PD", f"--dtype {dtype}") for dtype in DTYPES]
    found += [engines.transformers(dtype) for dtype in DTYPES]
    try:
        if not options.vllm:
            raise engines.MissingPeer("--vllm isn't given")
        found.append(engines.vllm(options.vllm, folder, "bfloat16", 1))
    except engines.MissingPeer as missing:
        left_out.append(f"vLLM is left out: {missing}")
    try:
        if not options.llama_cpp:
            raise engines.MissingPeer("--llama-cpp isn't given")
        files = folder.with_name(f"{folder.name}-gguf")
        await engines.make_gguf(options.llama_cpp, folder, files, ["F16"], log)
        found.append(engines.llama_cpp(options.llama_cpp, files, "F16", 1))
    except engines.MissingPeer as missing:
        left_out.append(f"llama.cpp is left out: {missing}")
    return found


@asynccontextmanager
async def started(row: engines.Row, options: argparse.Namespace, log: Path) -> AsyncIterator[Peer]:
    """Run an engine. Raises NotStarted."""
    if row.server is None:
        async with engines.in_process(options.model, row.weights, options.load, log) as process:
            yield Peer(process.answer, process)
        return
    async with (
        engines.running(row.server, free_port(), log, options.limit) as server,
        client_of(server.url) as client,
    ):

        async def answer(seed: int) -> dict[str, Any]:
            samples = await closed_loop(client, [request_body(engines.MODEL, options.load, seed)], 1)
            return alone(samples, options.load.output_tokens)

        yield Peer(answer, server)


async def measured(name: str, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Return a result of one backbone in the form of ``bench/peers.py``'s."""
    folder = options.folder / name
    options = argparse.Namespace(**vars(options), model=folder, load=load_of(folder, options.output_tokens))
    found = description(options)
    all_rows = await rows(options, folder, found["left_out"], logs / f"{name}-convert.log")
    found["rows"] = {row.name: described(row) for row in all_rows}
    async with AsyncExitStack() as stack:

        async def start(number: int, row: engines.Row) -> tuple[str, Peer | None]:
            try:
                return row.name, await stack.enter_async_context(started(row, options, logs / f"{name}-{number}.log"))
            except engines.NotStarted as failure:
                found["runs"].append({"row": row.name, "round": 0, "failed": str(failure)})
                return row.name, None

        peers = dict(await asyncio.gather(*(start(number, row) for number, row in enumerate(all_rows))))
        ready = [row for row in all_rows if peers[row.name]]
        for number in range(options.rounds + 1):
            for row in rotated(ready, number, len(ready)):
                if (run := await one(row, peers, number)) is not None:
                    found["runs"].append(run)
    show(f"{name}: {', '.join(told(found))}")
    return found | {"summary": summary(found), "goals": goals(found, GOALS)}


async def one(row: engines.Row, peers: dict[str, Peer | None], number: int) -> dict[str, Any] | None:
    """Return the run of an engine in a round; None in the first one."""
    peer = peers[row.name]
    assert peer is not None
    run: dict[str, Any] = {"row": row.name, "round": number - 1}
    try:
        figures: dict[str, Any] = {"short": 0, "errors": []} | await peer.answer(number)
    except engines.NotStarted as failure:
        return run | {"failed": str(failure)}
    if number == 0 and not figures["errors"]:
        return None
    if figures["errors"]:
        return run | {"failed": figures["errors"][0]}
    return run | {"figures": figures | {"peak_mib": peer.process.peak_mib}}


def told(found: dict[str, Any]) -> Iterator[str]:
    for name, figures in summary(found).items():
        yield f"{name} {' '.join(spread(figures.get(figure)) for figure in served_figures(found))}"


async def compare(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Measure all backbones; saves after each one."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(ending, task.cancel)  # so that servers are ended
    versions = await engines.versions(options.vllm, options.llama_cpp, logs / "versions.log")
    result: dict[str, Any] = {"versions": versions, "left_out": [], "backbones": {}}
    for name in prepared(options, result["left_out"]):
        if options.prepare:
            await rows(options, options.folder / name, [], logs / "convert.log")
            continue
        found = await measured(name, options, logs)
        result |= {key: found[key] for key in ("date", "machine", "load")}
        result["backbones"][name] = found
        if options.out:
            options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        if options.markdown:
            options.markdown.write_text(markdown(result))
    return result


def prepared(options: argparse.Namespace, left_out: list[str]) -> Iterator[str]:
    """Yield the backbones that are served, each once its folder is made."""
    for name in options.backbones:
        config, folder = config_of(name, tiny=options.tiny), options.folder / name
        try:
            backbone_of(config)
        except CheckpointError as error:
            left_out.append(f"{name} is left out: {error}")
            continue
        if not (folder / "model.safetensors").exists():
            show(f"making {folder}")
            make(folder, config, options.tokenizer)
        yield name


def markdown(result: dict[str, Any]) -> str:
    """Return the whole report."""
    return "\n".join([*_figures(result), *_goals(result)]) + "\n"


def _figures(result: dict[str, Any]) -> Iterator[str]:
    yield from ["# Backbones beside other engines", ""]
    if "load" in result:
        yield from circumstances(result)
        load = result["load"]
        yield f"- load: {PROMPT:,} tokens in, {load['output_tokens']} out, greedy, one request at a time"
        yield f"- rounds: {load['rounds']}, of one request each; {result['date']}"
    yield from (f"- {note}" for note in result["left_out"])
    yield ""
    figures = ["ttft_ms", "tpot_ms", "peak_mib"]
    yield from header(["backbone", "parameters", "engine", "settings", *map(title, figures), "prompt tokens"])
    for name, found in result["backbones"].items():
        size = f"{found['model']['parameters'] / 1e6:.0f} M"
        for row_name, row in found["rows"].items():
            runs = [run["figures"] for run in found["runs"] if run["row"] == row_name and "figures" in run]
            counted = ", ".join(f"{count:g}" for count in sorted({run["prompt_tokens"] for run in runs})) or "–"
            cells = [spread(found["summary"][row_name].get(figure)) for figure in figures]
            yield f"| {name} | {size} | {row['engine']} | {code(row['settings'])} | {' | '.join(cells)} | {counted} |"
    yield ""
    for name, found in result["backbones"].items():
        yield from (f"- {name}: {note}" for note in notes(found))
    yield ""


def _goals(result: dict[str, Any]) -> Iterator[str]:
    yield from ["## Goals", ""]
    yield from header(["backbone", *GOAL_COLUMNS])
    for name, found in result["backbones"].items():
        for goal in found["goals"]:
            yield f"| {name} | {' | '.join(goal_cells(found, goal))} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and GGUF files are or go")
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, default=list(BACKBONES))
    parser.add_argument("--tokenizer", type=Path, help="a folder with a published Qwen tokenizer, for llama.cpp")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="has bin/llama-server, bin/llama-quantize and convert"
    )
    parser.add_argument("--vllm", type=Path, metavar="ENV", help="an environment with vLLM's CPU build")
    parser.add_argument("--prepare", action="store_true", help="make what is missing in the folder, and end")
    parser.add_argument("--tiny", action="store_true", help="make tiny checkpoints, to try this script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for an engine to start")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs in this folder")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--markdown", type=Path, help="where to write it as Markdown")
    options = parser.parse_args()
    options.requests, options.at_a_time, options.crowd_requests = 1, [], 0
    return options


def main() -> None:
    run(parse_arguments(), compare, markdown)


if __name__ == "__main__":
    main()
