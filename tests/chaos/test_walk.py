"""Walks: what their plans are, how they are judged, and the faults that only they have."""

import asyncio
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest

from triptych.checkpoint.safetensors_header import read_folder, weight_files
from triptych.config import ClusterConfig
from triptych.demo import MODEL_DIR
from triptych.errors import CheckpointError, StartError
from triptych.measure.chaos.acts import fills, loses_messages, steps_clock
from triptych.measure.chaos.another_model import make_another
from triptych.measure.chaos.clocks import set_ahead, settable_clock
from triptych.measure.chaos.connections import take_messages
from triptych.measure.chaos.load import End, Outcome
from triptych.measure.chaos.questions import Kind, Question
from triptych.measure.chaos.target import Held, Kin, Ranked, Target
from triptych.measure.chaos.walk import AT_ONCE, SPREAD_SECONDS, Ground, plan_walk
from triptych.measure.chaos.walking import Answer, Served, judge, questions
from triptych.measure.load.pictures import animation
from triptych.topology import Topology

MODEL, OTHER = Path("model"), Path("other")
GROUND = Ground(Topology.parse("2E1P2D"), MODEL, OTHER, (Path("disk"), Path("/dev/shm")), Path("clock"))
QUESTION = Question(0, Kind.TEXT)
RIGHT = {MODEL: {0: Answer(End.WHOLE, "", "one two")}, OTHER: {0: Answer(End.WHOLE, "", "three")}}


def test_a_number_decides_the_plan() -> None:
    plans = [[str(step) for step in plan_walk(seed, GROUND, 180.0)] for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_much_happens_at_once_and_models_take_turns() -> None:
    kinds: set[str] = set()
    for seed in range(30):
        steps = plan_walk(seed, GROUND, 180.0)
        assert len(steps) >= min(AT_ONCE) * 12
        assert steps[1].at - steps[0].at <= SPREAD_SECONDS
        assert [step.at for step in steps] == sorted(step.at for step in steps)
        models = [model for step in steps for model in step.act.models]
        assert len(models) < 2 or set(models) == {MODEL, OTHER}
        kinds |= {step.act.what.split()[0] for step in steps}
    assert kinds == {"SIGKILL", "SIGTERM", "SIGUSR1", "stop", "slow", "fill", "clock", "rollout", "scale", "set"}


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, ""),
        ({"text": "three"}, "wrong"),
        ({"text": "three", "ended": 12.0}, ""),
        ({"text": "one two", "sent": 21.0, "ended": 22.0}, "wrong"),
        ({"text": "four", "ended": 12.0}, "wrong"),
        ({"end": End.ERROR, "error": "instance_lost", "text": "one"}, "lost"),
        ({"end": End.BROKEN, "text": "one"}, "lost"),
        ({"broken": 1}, "the connection broke, and no frontend was killed"),
        ({"broken": 1, "sent": 24.0, "ended": 26.0, "text": "three"}, ""),
        ({"end": End.LEFT, "text": "one"}, ""),
        ({"end": End.LEFT, "text": "two"}, "wrong"),
        ({"end": End.HUNG}, "stuck"),
    ],
)
def test_verdicts(fields: dict[str, Any], verdict: str) -> None:
    """Either model may answer from 10 to 20 s, and the other one alone after that. A frontend is killed at 25 s."""
    served = Served([(0.0, frozenset({MODEL})), (10.0, frozenset({MODEL, OTHER})), (20.0, frozenset({OTHER}))])
    one = Outcome(**{"question": QUESTION, "sent": 1.0, "end": End.WHOLE, "ended": 2.0, "text": "one two", **fields})
    said = judge([one], RIGHT, served, [25.0])
    assert [line.partition(":")[0] for line in said] == ([verdict] if verdict else [])


def test_growth_is_held_against_a_service() -> None:
    before = Held({}, {}, threads={"e0": 9}, memory={"e0": 100 << 20})
    assert Held({}, {}, threads={"e0": 17, "e1": 40}, memory={"e0": 200 << 20, "e1": 900 << 20}).more_than(before) == []
    grown = Held({}, {}, threads={"e0": 18}, memory={"e0": 220 << 20}).more_than(before)
    assert grown == ["18 threads of e0 instead of 9", "220 MiB of e0 instead of 100"]


def test_another_model_has_the_same_tensors_and_other_values(tmp_path: Path) -> None:
    other = make_another(MODEL_DIR, tmp_path / "other")
    assert {path.name for path in other.iterdir()} == {path.name for path in MODEL_DIR.iterdir()}
    mine, theirs = (
        {name: (one.dtype, one.shape) for name, one in read_folder(folder).items()} for folder in (MODEL_DIR, other)
    )
    assert mine == theirs
    assert weight_files(MODEL_DIR)[0].read_bytes() != weight_files(other)[0].read_bytes()


def test_a_checkpoint_without_weights_has_no_other_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="neither"):
        make_another(tmp_path / "model", tmp_path / "other")


def test_questions_of_all_kinds_are_unique() -> None:
    asked = questions("http://127.0.0.1:1")
    bodies = [one.body("tiny", "salt") for one in asked]
    assert {one.kind for one in asked} == set(Kind)
    assert len(set(bodies)) == len(bodies)
    assert bodies == [one.body("tiny", "salt") for one in asked]


def test_an_animation_is_a_video() -> None:
    with av.open(io.BytesIO(animation(7)), "r", format="gif") as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 6
    assert len({frame.tobytes() for frame in frames}) == 6


INBOX = """
import socket, sys, time
inbox = socket.socket(socket.AF_UNIX)
inbox.bind(sys.argv[1].replace("@", chr(0)))
inbox.listen()
print(flush=True)
connection, _ = inbox.accept()
time.sleep(60)
"""


@pytest.fixture
def peer() -> Iterator[tuple[int, socket.socket]]:
    """A process that doesn't read its messages, and a connection to it."""
    name = f"@triptych-127.0.0.1-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", INBOX, name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(name.replace("@", "\0"))
                connection.settimeout(10)
                connection.sendall(bytes(1000))
                yield process.pid, connection
        finally:
            process.kill()


def test_messages_are_lost_with_their_connection(peer: tuple[int, socket.socket]) -> None:
    pid, connection = peer
    for _ in range(100):  # until it has accepted the connection
        if taken := take_messages(pid):
            break
        time.sleep(0.05)
    assert taken == 1000
    assert connection.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        connection.sendall(b"more")


READER = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


def test_a_clock_is_set_for_the_processes_that_are_started(tmp_path: Path) -> None:
    with settable_clock(tmp_path) as why:
        if why:
            pytest.skip(why)
        with subprocess.Popen([sys.executable, "-c", READER], stdin=-1, stdout=-1, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            for ahead in (0, 3600, -86_400, 0):
                set_ahead(tmp_path, ahead)
                process.stdin.write("\n")
                process.stdin.flush()
                wall, monotonic = map(float, process.stdout.readline().split())
                assert abs(wall - ahead - time.time()) < 60
                assert abs(monotonic - time.monotonic()) < 60
            process.stdin.close()
    assert "clock.so" not in os.environ.get("LD_PRELOAD", "")


def test_what_cannot_be_done_is_named(tmp_path: Path) -> None:
    target = Target(os.getpid(), "127.0.0.1:1", ClusterConfig())
    for act, why in (
        (loses_messages(Ranked(Kin.INSTANCE, 3), 0.0), "no process instance 3 runs"),
        (fills(Path("/"), 0.0), "/ is on a disk that others may need"),
        (steps_clock(tmp_path, 5, 0.0), "no process reads a clock that can be set"),
    ):
        with pytest.raises(StartError, match=why):
            asyncio.run(act.do(target))
