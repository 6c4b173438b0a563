"""``triptych`` as a user starts it: a process whose lines are collected."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from tests.support.serving import image_part, text_part

ROOT = Path(__file__).parents[2]
FORBIDDEN = Path(__file__).parent / "forbidden"
KEPT = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_") or name == "LD_LIBRARY_PATH"}
"""Variables that processes inherit: what makes them measure their coverage, when the tests' is measured, and where a
GPU's driver is."""


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All arguments of a parser."""
    return parser._actions


def flag_names(parser: argparse.ArgumentParser) -> set[str]:
    """What its flags may be called."""
    return {name for action in actions(parser) for name in action.option_strings}


def walked(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and all below it."""
    yield parser
    for action in actions(parser):
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from walked(below)


@dataclass
class Command:
    """A running ``triptych`` command. ``lines`` are what it wrote to both outputs, ``errors`` to the second."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    descendants: list[psutil.Process] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(match for line in list(self.lines) if (match := re.search(pattern, line)))
            return bool(found)

        wait_for(lambda: look() or self.process.poll() is not None, seconds, self)
        assert look(), f"it ended without saying {pattern!r}:\n{self.text}"
        return found[0]

    def wait_until_ready(self) -> str:
        """The URL that the ready line gives. From here on the descendants are known."""
        url = self.wait_for_line(r"^ready: .* on (https?://\S+)/v1$")[1]
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)
        return url

    def child(self, name: str) -> psutil.Process:
        return next(child for child in self.descendants if name in child.cmdline())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 20.0) -> int:
        """Waits for the exit code and for all descendants to be gone."""
        code = self.process.wait(seconds)
        wait_for(lambda: not any(_is_alive(child) for child in self.descendants), 5.0, self)
        wait_for(lambda: not any(thread.is_alive() for thread in self.readers), 5.0, self)
        return code

    readers: list[threading.Thread] = field(default_factory=list)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], object], seconds: float, command: Command) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s:\n{command.text}"
        time.sleep(0.01)


@contextmanager
def triptych(
    *arguments: str | Path,
    prefix: Sequence[str] = (),
    folder: Path | None = None,
    internal: Mapping[str, Any] | None = None,
    **environment: str,
) -> Iterator[Command]:
    """Runs a command, by way of the one that ``prefix`` begins, in the checkout or as an installed one in ``folder``;
    whatever is left of it is killed on the way out. A process of it that imports transformers ends. ``internal`` are
    values of settings that have no flag."""
    environment = {"PYTHONPATH": os.pathsep.join((str(FORBIDDEN), *([str(ROOT)] if folder else [])))} | environment
    module = ["tests.support.constructed", json.dumps(dict(internal))] if internal else ["triptych"]
    words = [*prefix, sys.executable, *(["-P"] if folder else []), "-m", *module, *map(str, arguments)]
    with running(words, folder or ROOT, environment) as command:
        yield command


@contextmanager
def running(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Command]:
    """Runs what ``words`` say in ``folder``, with few other variables; whatever is left of it is killed on the way
    out."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"} | KEPT | dict(environment),
    )
    command = Command(process)
    assert process.stdout is not None
    assert process.stderr is not None
    for stream, lists in ((process.stdout, [command.lines]), (process.stderr, [command.lines, command.errors])):
        command.readers.append(threading.Thread(target=_collect, args=[stream, lists], daemon=True))
        command.readers[-1].start()
    try:
        yield command
    finally:
        left = [process.pid, *(child.pid for child in command.descendants)]
        with suppress(psutil.NoSuchProcess):
            left += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        for pid in set(left):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        process.wait(10)
        for thread in command.readers:
            thread.join(10)
        process.stdout.close()
        process.stderr.close()


def _collect(stream: IO[str], lists: list[list[str]]) -> None:
    for line in stream:
        for lines in lists:
            lines.append(line.rstrip("\n"))


@contextmanager
def stream_of(url: str, model: str, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=30) as client,
        client.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": max_tokens}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


FAST = ("--port", "0", "--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "4096")


def picture_answer(url: str, model: str) -> str:
    content = [image_part(), text_part("What is it?")]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=30)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def one_line_error(command: Command, code: int = 1) -> str:
    """The message of a command that failed: its last line, and no traceback anywhere."""
    assert command.end(30) == code, command.text
    assert "Traceback" not in command.text
    assert command.errors[-1].startswith("triptych: ")
    return command.errors[-1]


def worker(command: Command) -> psutil.Process:
    """Rank 1, once it runs."""
    found: list[psutil.Process] = []

    def look() -> bool:
        children = psutil.Process(command.process.pid).children(recursive=True)
        found.extend(child for child in children if "triptych.server.rank_main" in child.cmdline())
        return bool(found)

    wait_for(look, 30, command)
    return found[0]
