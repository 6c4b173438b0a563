"""A process with a real instance's parts, which does pieces of work for the command that started it."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from triptych import children
from triptych.config import InstanceSpec
from triptych.errors import StartError, TriptychError
from triptych.heap import gc_paused
from triptych.measure.profile.work import Command, Facts, MeasureWork, Repeats, Spin, Timed, Work
from triptych.observe.machine import pin_to_cores

START_TIMEOUT = 600.0
"""Seconds that loading the model may take."""
ANSWER_TIMEOUT = 300.0


@dataclass(frozen=True)
class Failure:
    """A command has failed in the process."""

    reason: str


class StageProcess:
    """Runs one instance's parts, pinned to cores as by ``--cpus``."""

    def __init__(self, spec: InstanceSpec, cores: frozenset[int], sink: str = "") -> None:
        """Start it. ``sink`` is the address that its loops' messages go to. Call ``wait`` before anything else."""
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(spec.to_bytes(), cores, sink, theirs), daemon=False)
        with children.inherited():
            self._process.start()
        theirs.close()
        self._spinning = False
        self.facts: Facts | None = None

    def __enter__(self) -> "StageProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> Facts:
        """Wait until the model is loaded. Raises StartError when it can't be."""
        facts: Facts = self._answer(START_TIMEOUT)
        self.facts = facts
        return facts

    def ask(self, command: Command) -> Any:
        """Have a command done, and return its answer. Raises StartError when the process fails."""
        self._spinning = False
        try:
            self._pipe.send(command)
        except OSError:
            raise StartError("a process of the profile has exited") from None
        return self._answer(ANSWER_TIMEOUT)

    def measure(self, work: Work, repeats: Repeats) -> Timed | None:
        """Return the times of work; None if it doesn't fit in the KV cache."""
        timed: Timed | None = self.ask(MeasureWork(work, repeats))
        return timed

    def spin(self, work: Work) -> None:
        """Repeat work until the next command."""
        self.ask(Spin(work))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(timeout):
                raise StartError(f"a process of the profile doesn't answer within {timeout:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise StartError("a process of the profile has exited") from None
        if isinstance(answer, Failure):
            raise StartError(answer.reason)
        return answer


def _run(spec_bytes: bytes, cores: frozenset[int], sink: str, pipe: Connection) -> None:
    """Main function of the process, which ends when the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which closes the pipe
    try:
        pin_to_cores(cores)
        spec = InstanceSpec.from_bytes(spec_bytes)
        os.environ["OMP_NUM_THREADS"] = str(spec.engine.threads)
        with gc_paused():
            # imported now, because torch reads that variable once, when it is imported
            from triptych.measure.profile.stages import Stages
        with Stages(spec, sink) as stages:
            pipe.send(stages.facts())
            while True:
                _do(stages, pipe.recv(), pipe)
    except (EOFError, BrokenPipeError):
        return
    except TriptychError as error:
        pipe.send(Failure(str(error)))


def _do(stages: Any, command: Command, pipe: Connection) -> None:
    match command:
        case MeasureWork():
            pipe.send(stages.measure(command.work, command.repeats))
        case Spin():
            with stages.prepared(command.work) as (_, work):
                pipe.send(None)
                while not pipe.poll():
                    work()
        case _:
            pipe.send(stages.gaps(command))
