"""``triptych demo``: serves the bundled model and asks it about the bundled pictures over HTTP."""

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import webbrowser
from typing import Any

import httpx
from rich.console import Console

from triptych import running_time
from triptych.cli import flags
from triptych.cli.asking import client_of, request_body, show_answer
from triptych.cli.gentle_load import Tally, keep_asking
from triptych.cli.seeing import NEEDS_KEY, is_on_desktop, ways_to_see
from triptych.cli.starting import started
from triptych.cluster.service import Service, unless_lost
from triptych.config import ServeConfig
from triptych.demo import PICTURES_DIR
from triptych.errors import ConfigError, StartError
from triptych.server.http_socket import reserve
from triptych.topology import Topology

QUESTIONS = 5

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
    parser.description = (
        f"{parser.description}; with --ui, print the address of the page that shows the service at work, and keep "
        "asking about drawn pictures until interrupted"
    )
    parser.set_defaults(model=flags.DEMO)
    parser.add_argument("--topology", default="1E1PD", help="instances to start (default: 1E1PD)")
    parser.add_argument("--questions", type=int, help=f"number of questions to ask (default: {QUESTIONS})")
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="with --ui, open the page in a browser (default: on a desktop, if this is a terminal there)",
    )
    parser.add_argument("--verbose", action="store_true", help="show the logs of the instances")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    # given to this command, the setting's flag asks to see the page
    shows_page, count = bool(arguments.ui), QUESTIONS if arguments.questions is None else arguments.questions
    if count < 0:
        raise ConfigError(f"--questions {count} is too small")
    if shows_page and arguments.questions is not None:
        raise ConfigError("--questions and --ui exclude each other: with --ui, questions are asked until interrupted")
    if arguments.open is not None and not shows_page:
        raise ConfigError("--open is for --ui")
    config = flags.serve_config(arguments)
    port = config.frontend.http.port
    if not flags.is_given("port", arguments) and not is_free(config.frontend.http.host, port):
        port = 0
    config = dataclasses.replace(
        config, frontend=config.frontend.having({"served_model_name": flags.DEMO, "port": port})
    )
    topology = Topology.parse(arguments.topology)
    if shows_page:
        opens = is_on_desktop() if arguments.open is None else arguments.open
        return running_time.run(_show_page(config, topology, arguments.verbose, opens=opens))
    return running_time.run(_run(config, topology, count, arguments.verbose))


def is_free(host: str, port: int) -> bool:
    """Return whether a service can listen there, as far as that is known before it does."""
    try:
        reserve(host, port).close()
    except StartError:
        return False
    return True


async def _show_page(config: ServeConfig, topology: Topology, verbose: bool, *, opens: bool) -> int:
    """Ask questions until interrupted, for the page to show."""
    console, tally = Console(stderr=True), Tally()
    config = dataclasses.replace(config, frontend=config.frontend.having({"ui_kills": True}))
    async with started(config, topology, console, verbose, restart=True) as service:
        ways = ways_to_see(config.frontend, service.url)
        print(f"The demo model is served as {topology}, until Ctrl-C ends it. See it at work:\n")
        print("".join(f"  {way}\n" for way in ways or (NEEDS_KEY,)), flush=True)
        if opens and ways and not await asyncio.to_thread(webbrowser.open, ways[0]):
            console.print("no browser could be opened")
        async with client_of(service.url, config.frontend) as client:
            try:
                asking = keep_asking(client, flags.DEMO, tally, random.Random())
                await unless_lost(service.lost, asking)
            finally:
                console.print(str(tally), markup=False)
    return 0


async def _run(config: ServeConfig, topology: Topology, count: int, verbose: bool) -> int:
    console = Console(stderr=True)
    questions = json.loads((PICTURES_DIR / "questions.json").read_text())
    async with (
        started(config, topology, console, verbose) as service,
        client_of(service.url, config.frontend) as client,
    ):
        console.print(f"The demo model is served as [bold]{topology}[/] on {service.url}")
        answers = [await _ask(service, client, entry, console) for entry in questions[:count]]
        right = sum(answer == entry["answer"] for answer, entry in zip(answers, questions, strict=False))
        console.print(f"\n{right} of {len(answers)} answers are right\n")
        entry = next(entry for entry in questions if entry["pictures"][0].endswith(".png"))
        picture = PICTURES_DIR / entry["pictures"][0]
        print(TRY_NEXT.format(url=service.url, picture=picture, question=entry["question"]), flush=True)
        if sys.stdout.isatty():
            raise await service.lost
        return 1 if None in answers else 0


async def _ask(service: Service, client: httpx.AsyncClient, entry: dict[str, Any], console: Console) -> str | None:
    console.print(f"\n[bold]{', '.join(entry['pictures'])}[/]: {entry['question']}")
    pictures = [PICTURES_DIR / name for name in entry["pictures"]]
    body = request_body(flags.DEMO, pictures, entry["question"])
    return await unless_lost(service.lost, show_answer(client, body, console))
