"""Handlers that the workers of these tests run."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from triptych.errors import InternalError, TruncatedMedia
from triptych.media.audio import decode_audio
from triptych.prompt.probe_audio import probe_audio
from triptych.sandbox.child import Handler
from triptych.sandbox.libraries import import_library
from triptych.sandbox.protocol import Limits

Results = Iterator[tuple[bytes, Sequence[bytes]]]


def obedient(argument: str) -> Handler:
    return lambda request, data: globals()[request.decode()](argument, data)


def broken(argument: str) -> Handler:
    sys.exit("can't start")


def echo(argument: str, data: bytes) -> Results:
    yield argument.encode(), [data]


def count(argument: str, data: bytes) -> Results:
    for number in range(int(data)):
        yield b"%d" % number, []


def environment(argument: str, data: bytes) -> Results:
    yield "\n".join(os.environ).encode(), []


def pid(argument: str, data: bytes) -> Results:
    yield b"%d" % os.getpid(), []


def crash(argument: str, data: bytes) -> Results:
    os.kill(os.getpid(), signal.SIGSEGV)
    yield b"", []


def crash_later(argument: str, data: bytes) -> Results:
    yield b"0", []
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_once(argument: str, data: bytes) -> Results:
    yield b"0", []
    try:
        os.close(os.open(data.decode(), os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        yield b"1", []


def hang(argument: str, data: bytes) -> Results:
    time.sleep(60)
    yield b"", []


def spin(argument: str, data: bytes) -> Results:
    while True:
        pass
    yield b"", []


def hoard(argument: str, data: bytes) -> Results:
    kept = [bytes(2**24) for _ in range(1000)]
    yield b"%d" % len(kept), []


def import_late(argument: str, data: bytes) -> Results:
    yield import_library(data.decode()).__name__.encode(), []


def import_within_the_limit(argument: str, data: bytes) -> Results:
    yield importlib.import_module(data.decode()).__name__.encode(), []


def write_much(argument: str, data: bytes) -> Results:
    yield b"", [bytes(2**20)] * 100


def refuse(argument: str, data: bytes) -> Results:
    raise TruncatedMedia("it ends early")
    yield b"", []


def misfire(argument: str, data: bytes) -> Results:
    raise RuntimeError("secret of /the/server")
    yield b"", []


def fail(argument: str, data: bytes) -> Results:
    raise InternalError("it failed")
    yield b"", []


def length(argument: str, data: bytes) -> Results:
    yield b"%d" % len(data), []


def priority(argument: str, data: bytes) -> Results:
    yield b"%d" % os.nice(0), []


def files(argument: str, data: bytes) -> Results:
    yield ",".join(sorted(os.listdir("/proc/self/fd"))).encode(), []


def busy(argument: str, data: bytes) -> Results:
    """Use a tenth of a second of processor time."""
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    yield b"", []


def hear(argument: str, data: bytes) -> Results:
    """Probe and decode an audio file; yield its number of samples."""
    header = probe_audio(data)
    if header.seconds < 60:
        samples = decode_audio(data, header, 16_000)
        assert len(samples) == header.resampled(16_000)
    yield b"%d" % header.samples, []


LIMITS = Limits(memory_bytes=2**28, output_bytes=2**25, seconds=1.0)
