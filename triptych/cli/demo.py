"""``triptych demo``: serves the bundled model and asks it about the bundled pictures over HTTP."""

import argparse
import asyncio
import dataclasses
import json
import sys
from typing import Any

from rich.console import Console

from triptych.cli import flags
from triptych.cli.asking import request_body, show_answer
from triptych.cli.starting import started
from triptych.cluster.service import LocalService, unless_lost
from triptych.config import ServeConfig
from triptych.demo import PICTURES_DIR
from triptych.errors import ConfigError
from triptych.topology import Topology

TRY_NEXT = """\
Try it yourself while this runs (Ctrl-C ends it):

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "demo", "messages": [
    {{"role": "user", "content": [
                {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,'$(base64 -w0 {picture})'"}}}},
                {{"type": "text", "text": "{question}"}}]}}]}}'

  # pip install openai
  import base64, openai
  client = openai.OpenAI(base_url="{url}/v1", api_key="none")
  picture = base64.b64encode(open("{picture}", "rb").read()).decode()
  answer = client.chat.completions.create(model="demo", messages=[{{"role": "user", "content": [
      {{"type": "image_url", "image_url": {{"url": "data:image/png;base64," + picture}}}},
      {{"type": "text", "text": "{question}"}}]}}])
  print(answer.choices[0].message.content)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS]"
    parser.set_defaults(model=flags.DEMO)
    parser.add_argument("--topology", default="1E1PD", help="instances to start (default: 1E1PD)")
    parser.add_argument("--questions", type=int, default=5, help="number of questions to ask (default: 5)")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the instances")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.questions < 0:
        raise ConfigError(f"--questions {arguments.questions} is too small")
    config = flags.serve_config(arguments)
    config = dataclasses.replace(config, frontend=config.frontend.having({"served_model_name": flags.DEMO}))
    return asyncio.run(_run(config, Topology.parse(arguments.topology), arguments.questions, arguments.verbose))


async def _run(config: ServeConfig, topology: Topology, count: int, verbose: bool) -> int:
    console = Console(stderr=True)
    questions = json.loads((PICTURES_DIR / "questions.json").read_text())
    async with started(config, topology, console, verbose) as service:
        console.print(f"The demo model is served as [bold]{topology}[/] on {service.url}")
        answers = [await _ask(service, entry, console) for entry in questions[:count]]
        right = sum(answer == entry["answer"] for answer, entry in zip(answers, questions, strict=False))
        console.print(f"\n{right} of {len(answers)} answers are right\n")
        entry = next(entry for entry in questions if entry["pictures"][0].endswith(".png"))
        picture = PICTURES_DIR / entry["pictures"][0]
        print(TRY_NEXT.format(url=service.url, picture=picture, question=entry["question"]), flush=True)
        if sys.stdout.isatty():
            raise await service.lost
        return 1 if None in answers else 0


async def _ask(service: LocalService, entry: dict[str, Any], console: Console) -> str | None:
    console.print(f"\n[bold]{', '.join(entry['pictures'])}[/]: {entry['question']}")
    pictures = [PICTURES_DIR / name for name in entry["pictures"]]
    body = request_body(flags.DEMO, pictures, entry["question"])
    return await unless_lost(service.lost, show_answer(service.url, body, console))
