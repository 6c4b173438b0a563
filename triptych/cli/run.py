"""``triptych run``: answers one question about some files on the terminal, and shows where the time went."""

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from triptych import running_time
from triptych.cli import flags
from triptych.cli.asking import check_media, client_of, request_body, show_answer
from triptych.cli.starting import started
from triptych.cluster.service import unless_lost
from triptych.config import ServeConfig
from triptych.errors import ConfigError
from triptych.topology import Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL [FILE ...] QUESTION [OPTIONS]"
    flags.add_model(parser)
    parser.add_argument(
        "inputs", nargs="+", metavar="FILE|QUESTION", help="picture, video and audio files, then the question"
    )
    parser.add_argument("--topology", help="instances to start (default: 1EPD; for text-only models: 1PD)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="maximum tokens of the answer (default: the rest of the model's context)",
    )
    parser.add_argument("--temperature", type=flags.number, help="0 is greedy (default: the checkpoint's own)")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the instances")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    *files, question = arguments.inputs
    if Path(question).is_file():
        raise ConfigError(f"the question is missing: {question} is a file, and the last argument must be a question")
    for file in files:
        check_media(Path(file))
    config = flags.serve_config(arguments)
    name = flags.model_name(arguments, config)
    config = dataclasses.replace(config, frontend=config.frontend.having({"port": 0, "served_model_name": name}))
    given = {name: getattr(arguments, name) for name in ("max_tokens", "temperature")}
    settings = {name: value for name, value in given.items() if value is not None}
    body = request_body(name, files, question, **settings)
    topology = flags.topology(arguments, config, "1EPD")
    return running_time.run(_run(config, topology, body, shlex.quote(arguments.model), arguments.verbose))


async def _run(config: ServeConfig, topology: Topology, body: dict[str, Any], given: str, verbose: bool) -> int:
    console = Console(stderr=True)
    async with (
        started(config, topology, console, verbose) as service,
        client_of(service.url, config.frontend) as client,
    ):
        answer = await unless_lost(service.lost, show_answer(client, body, console))
        if answer is not None and console.is_terminal:
            console.print(f"\nto go on: triptych chat {given}; to serve it: triptych serve {given}", highlight=False)
        return 1 if answer is None else 0
