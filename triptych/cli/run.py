"""``triptych run``: one question about some pictures, answered on the terminal, and where the time went."""

import argparse
import asyncio
import base64
import dataclasses
import json
import mimetypes
import sys
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from triptych.api.app import TIMELINE_HEADER
from triptych.cli import flags
from triptych.cli.waterfall import waterfall
from triptych.cluster.service import LocalService
from triptych.config import EngineConfig, FrontDoorConfig, LeaseConfig, ServeConfig
from triptych.errors import ConfigError
from triptych.topology import Topology

SUMMARY = "ask one question about pictures, on the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    parser.add_argument("inputs", nargs="+", metavar="PICTURE|QUESTION", help="picture files, then the question")
    parser.add_argument("--topology", default="1EPD", help="instances to start for it (default: 1EPD)")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the checkpoint's own)")
    parser.add_argument("--verbose", action="store_true", help="show what the instances say")
    flags.add_settings(parser, "how instances compute", EngineConfig)
    flags.add_settings(parser, "what the front door accepts", FrontDoorConfig)
    flags.add_settings(parser, "how processes start, live and end", LeaseConfig)


def run(arguments: argparse.Namespace) -> int:
    config = flags.serve_config(arguments)
    config = dataclasses.replace(
        config, front_door=dataclasses.replace(config.front_door, port=0, served_model_name="m")
    )
    *pictures, question = arguments.inputs
    body: dict[str, Any] = {"model": "m", "messages": [_message(pictures, question)], "stream": True}
    body |= {name: value for name in ("max_tokens", "temperature") if (value := getattr(arguments, name)) is not None}
    return asyncio.run(_run(config, Topology.parse(arguments.topology), body, arguments.verbose))


async def _run(config: ServeConfig, topology: Topology, body: dict[str, Any], verbose: bool) -> int:
    console = Console(stderr=True)
    said: list[str] = []
    async with LocalService(config, topology, show=_say if verbose else said.append) as service:
        try:
            with console.status(f"starting {topology}"):
                await service.wait_until_ready()
        except BaseException:
            console.print("\n".join(said), markup=False, highlight=False)
            raise
        return await _ask(service.url, body, console)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _ask(url: str, body: dict[str, Any], console: Console) -> int:
    timeout = httpx.Timeout(None, connect=10.0)
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers={TIMELINE_HEADER: "true"}) as response,
    ):
        if response.status_code != httpx.codes.OK:
            console.print(f"[red]{json.loads(await response.aread())['error']['message']}[/]")
            return 1
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                console.print(f"\n[red]{chunk['error']['message']}[/]")
                return 1
            for choice in chunk["choices"]:
                sys.stdout.write(choice["delta"].get("content", ""))
                sys.stdout.flush()
            if "timeline" in chunk:
                print()
                console.print(waterfall(chunk["timeline"]))
    return 0


def _message(pictures: list[str], question: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _data_url(picture)}} for picture in pictures
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def _data_url(picture: str) -> str:
    try:
        data = Path(picture).read_bytes()
    except OSError as error:
        raise ConfigError(f"{picture}: {error.strerror}") from None
    kind = mimetypes.guess_type(picture)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
