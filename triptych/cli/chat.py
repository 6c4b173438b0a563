"""``triptych chat``: talks to a model in turns, on a terminal or through pipes."""

import argparse
import asyncio
import contextlib
import dataclasses
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from triptych import exit_codes, running_time
from triptych.cli import flags, running_service
from triptych.cli.asking import check_media, client_of, file_part, model_of, show_answer
from triptych.cli.starting import started
from triptych.cluster.service import unless_lost
from triptych.config import ServeConfig
from triptych.errors import ConfigError
from triptych.topology import Topology

HELP = """\
/image FILE, /video FILE, /audio FILE    send a file with the next message, or with one that follows on this line
/system TEXT                             begin again, with these instructions
/clear                                   begin again
/timings                                 show after each answer how long it took, or no longer
/bye                                     end, as Ctrl-D; Ctrl-C stops an answer
A line that ends with \\ goes on in the next."""
PROMPT, GOES_ON = ">>> ", "... "
ENDS = ("/bye", "/exit", "/quit")

Ask = Callable[[dict[str, Any], bool], Coroutine[Any, Any, str | None]]
"""Sends a request and shows the answer, with timings or without; None if that failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL [OPTIONS]\n       %(prog)s --url URL [MODEL] [OPTIONS]"
    parser.description = (
        f"{parser.description}; from a pipe, each line is a message, and only answers are written to standard output"
    )
    flags.add_model(parser, required=False)
    parser.add_argument(
        "--url", help=f"talk to a running service, such as {running_service.DEFAULT_URL} (default: one is started)"
    )
    running_service.add_ca_file(parser)
    parser.add_argument("--topology", help="instances to start (default: 1EPD; for text-only models: 1PD)")
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model (default: none)")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens of an answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=flags.number, help="0 is greedy (default: the checkpoint's own)")
    parser.add_argument("--timings", action="store_true", help="show after each answer how long it took")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the instances")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in ("max_tokens", "temperature")}
    settings = {name: value for name, value in given.items() if value is not None}
    talk = Conversation(settings, arguments.system or "", shows_timings=arguments.timings)
    if arguments.url:
        return running_time.run(_with_running(arguments, talk))
    if arguments.model is None:
        raise ConfigError("MODEL is missing: give a folder, ORG/NAME or demo, or --url for a running service")
    config = flags.serve_config(arguments)
    name = flags.model_name(arguments, config)
    config = dataclasses.replace(config, frontend=config.frontend.having({"port": 0, "served_model_name": name}))
    topology = flags.topology(arguments, config, "1EPD")
    return running_time.run(_with_own(config, topology, talk, verbose=arguments.verbose))


@dataclass
class Conversation:
    """What was said, and what the next message has."""

    settings: dict[str, Any]
    """Fields of every request."""
    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    """Parts that the next message begins with."""
    shows_timings: bool = False

    def begin(self, system: str | None = None) -> None:
        """Forget what was said, and take other instructions if given."""
        self.turns, self.files = [], []
        self.system = self.system if system is None else system

    def ask(self, text: str) -> dict[str, Any]:
        """Add a message of the user, and return the request."""
        content: Any = [*self.files, {"type": "text", "text": text}] if self.files else text
        self.turns.append({"role": "user", "content": content})
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        request = {"messages": instructions + self.turns, "stream": True, "stream_options": {"include_usage": True}}
        return request | self.settings

    def answer(self, text: str | None) -> None:
        """Add the answer, or take the message back where there is none. Its files stay for the next message."""
        if text is None:
            self.turns.pop()
        else:
            self.files = []
            self.turns.append({"role": "assistant", "content": text})

    def command(self, line: str) -> str:
        """Do what a line that begins with / says. Return the message that it has, or empty. Raises ConfigError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/image" | "/video" | "/audio" if rest:
                file, text = _file_and_text(rest)
                path, modality = Path(file).expanduser(), name[1:]
                check_media(path, modality)
                self.files.append(file_part(path, modality))
                return text
            case "/system":
                self.begin(rest)
            case "/clear":
                self.begin()
            case "/timings":
                self.shows_timings = not self.shows_timings
            case _:
                raise ConfigError(HELP)
        return ""


def _file_and_text(rest: str) -> tuple[str, str]:
    """Return a file's name, in quotes or with escaped spaces if it has any, and what follows it."""
    if Path(rest).expanduser().is_file():
        return rest, ""
    stream = io.StringIO(rest)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars="")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        file = lexer.get_token() or ""
    except ValueError:
        raise ConfigError(f"{rest}: a quotation mark is missing") from None
    return file, stream.read().strip()


async def _with_own(config: ServeConfig, topology: Topology, talk: Conversation, *, verbose: bool) -> int:
    console = Console(stderr=True)
    async with (
        started(config, topology, console, verbose) as service,
        client_of(service.url, config.frontend) as client,
    ):
        talk.settings["model"] = config.frontend.http.served_model_name

        async def ask(body: dict[str, Any], timings: bool) -> str | None:
            return await unless_lost(service.lost, show_answer(client, body, console, timings=timings))

        return await _talk(talk, ask, console)


async def _with_running(arguments: argparse.Namespace, talk: Conversation) -> int:
    console, key = Console(stderr=True), running_service.key(arguments)
    async with httpx.AsyncClient(
        base_url=running_service.base_url(arguments.url),
        headers={"authorization": f"Bearer {key}"} if key else {},
        trust_env=False,
        verify=running_service.trust(arguments.ca_file),
        timeout=httpx.Timeout(None, connect=10.0),
    ) as client:
        talk.settings["model"] = arguments.model or await model_of(client)

        async def ask(body: dict[str, Any], timings: bool) -> str | None:
            return await show_answer(client, body, console, timings=timings)

        return await _talk(talk, ask, console)


async def _talk(talk: Conversation, ask: Ask, console: Console) -> int:
    """Answer what is typed until its end. Return the exit code: 1 for the first line of a pipe that has no answer."""
    loop = asyncio.get_running_loop()
    is_typed = sys.stdin.isatty()
    working: asyncio.Task[Any] | None = None
    me = asyncio.current_task()
    assert me is not None

    def interrupt() -> None:
        (working or me).cancel()

    if is_typed:
        console.print(f"{talk.settings['model']} is ready; /help lists commands, Ctrl-D ends", markup=False)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        async for line in _messages(console if is_typed else None):
            if line in ENDS:
                break
            failed = False
            try:
                text = talk.command(line) if line.startswith("/") else line
                if not text:
                    continue
                working = asyncio.create_task(ask(talk.ask(text), talk.shows_timings))
                talk.answer(answer := await working)
                failed = answer is None
            except ConfigError as error:
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)
                failed = True
            except asyncio.CancelledError:
                if working is None:
                    raise
                talk.answer(None)
            finally:
                working = None
            if failed and not is_typed:
                return 1  # what follows may depend on it
    except asyncio.CancelledError:
        me.uncancel()
        return exit_codes.INTERRUPTED
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return 0


async def _messages(console: Console | None) -> AsyncIterator[str]:
    """Yield the messages of standard input; with a console, ask for each there."""
    before = ""

    def prompt() -> None:
        if console is not None:
            console.print(GOES_ON if before else PROMPT, end="", style="bold")

    prompt()
    async for line in _lines(sys.stdin.fileno()):
        if line.endswith("\\"):
            before += line[:-1] + "\n"
        else:
            message, before = (before + line).strip(), ""
            if message:
                yield message
        prompt()
    if before.strip():
        yield before.strip()
    if console is not None:
        console.print()


async def _lines(descriptor: int) -> AsyncIterator[str]:
    """Yield the lines of a file, a pipe or a terminal, as they come."""
    loop, found = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

    def read() -> None:
        rest = b""
        # a loop that has ended, or a terminal that is gone
        with contextlib.suppress(RuntimeError, OSError):
            while data := os.read(descriptor, 1 << 16):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    loop.call_soon_threadsafe(found.put_nowait, line)
            if rest:
                loop.call_soon_threadsafe(found.put_nowait, rest)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(found.put_nowait, None)

    # a thread, because a file can't be waited for by the loop; a daemon, because nothing ends its wait for a line
    threading.Thread(target=read, daemon=True, name="standard input").start()
    while (line := await found.get()) is not None:
        yield line.decode(errors="replace")
