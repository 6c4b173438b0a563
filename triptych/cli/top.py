"""``triptych top``: a running service at work, on the terminal, over HTTP."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing

import msgspec
from rich.console import Console
from rich.live import Live

from triptych import running_time
from triptych.cli.pipeline_drawing import draw
from triptych.cli.running_service import DEFAULT_URL, add_ca_file, base_url, key, trust
from triptych.cli.watching import Outage, Source, follow, snapshots
from triptych.observe.pipeline import Pipeline

DEFAULT_WIDTH = 160
"""Columns when the output isn't a terminal."""
ONCE_LINES = 100
"""Lines of one snapshot that stays on the terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"address of the frontend's HTTP server (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file whose first line is an API key of the service; only its owner may have access (default: none, or "
        "the key in TRIPTYCH_API_KEY)",
    )
    add_ca_file(parser)
    parser.add_argument("--once", action="store_true", help="show one snapshot and end, as without a terminal")
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each snapshot until interrupted; with --once, one"
    )


def run(arguments: argparse.Namespace) -> int:
    source = Source(base_url(arguments.url), key=key(arguments), trust=trust(arguments.ca_file))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars, in an encoding that has none
    console = Console(highlight=False, width=None if sys.stdout.isatty() else DEFAULT_WIDTH)
    if arguments.json:
        work = _print_json(source, once=arguments.once)
    elif arguments.once or not console.is_terminal or console.is_dumb_terminal:
        work = _print_once(source, console)
    else:
        work = _show_live(source, console)
    try:
        return running_time.run(_until_interrupted(work))
    except BrokenPipeError:  # the reader of a pipe has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's last flush would fail, too
        return 0


async def _until_interrupted(work: Coroutine[None, None, None]) -> int:
    """Run the work until it is done or a signal ends it, which is how a viewer leaves."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 0


async def _print_once(source: Source, console: Console) -> None:
    async with aclosing(snapshots(source)) as stream:
        console.print(draw(await anext(stream), console.width, ONCE_LINES))


async def _print_json(source: Source, *, once: bool) -> None:
    async with aclosing(follow(source)) as news:
        async for one in news:
            if isinstance(one, Outage):
                print(f"triptych: {one.reason}; trying again", file=sys.stderr, flush=True)
                continue
            print(json.dumps(msgspec.to_builtins(one)), flush=True)  # in ASCII, whatever names have
            if once:
                break


async def _show_live(source: Source, console: Console) -> None:
    last: Pipeline | None = None
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    # a screen of its own, so that what the terminal showed before comes back
    with _on_key("q", task.cancel), Live(console=console, screen=True, auto_refresh=False) as live:
        async with aclosing(follow(source)) as news:
            async for one in news:
                notice = ""
                if isinstance(one, Outage):
                    notice = f"{one.reason}; trying again. What is below was before"
                else:
                    last = one
                if last is not None:
                    live.update(draw(last, console.width, console.height, notice), refresh=True)


@contextlib.contextmanager
def _on_key(key: str, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` when that key is pressed. Needs a terminal as standard input; without one, or in the background of
    one, nothing happens."""
    if not sys.stdin.isatty() or _is_in_background(sys.stdin.fileno()):
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        if key.encode() in typed.lower():
            act()
        if not typed:  # the terminal is gone
            loop.remove_reader(descriptor)

    tty.setcbreak(descriptor)  # keys at once and unseen; Ctrl-C stays a signal
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_in_background(descriptor: int) -> bool:
    """Return whether the kernel would stop this process for a change of its terminal: a shell has started it as a job
    in the background."""
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:  # a terminal that doesn't control this process
        return False
