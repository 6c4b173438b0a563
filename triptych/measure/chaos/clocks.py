"""A wall clock that can be set for the processes that this one starts, and for no others."""

import contextlib
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from triptych.errors import StartError
from triptych.layers.kernel_variants import find_compiler

_PRELOAD = "LD_PRELOAD"
_LIBRARY = "clock.so"
_AHEAD = struct.Struct("=q")
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long none, *ahead = &none; /* seconds */
static int (*read_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    int file = open(AHEAD, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *page = mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) ahead = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!read_clock) *(void **)&read_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = read_clock(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""
"""What the started processes read clocks with. Waits until a moment of the wall clock are left as they are: nothing
here has any."""


@contextlib.contextmanager
def settable_clock(folder: Path) -> Iterator[str]:
    """Let the processes that this one starts from now on read a wall clock that ``set_ahead`` sets, with files in an
    empty folder. Yields why it can't be done; empty if it is."""
    library, before = folder / _LIBRARY, os.environ.get(_PRELOAD)
    _write(folder, 0)
    options = ("-shared", "-fPIC", "-O1", f'-DAHEAD="{_file(folder)}"', "-xc", "-", "-o", str(library), "-ldl")
    try:
        command = [*find_compiler(), *options]
        subprocess.run(command, input=_SOURCE, text=True, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        yield str(error)
        return
    os.environ[_PRELOAD] = ":".join(filter(None, (before, str(library))))
    try:
        yield ""
    finally:
        os.environ.pop(_PRELOAD)
        if before is not None:
            os.environ[_PRELOAD] = before


def set_ahead(folder: Path, seconds: int) -> None:
    """Set the clock of a folder to that many seconds after the machine's; negative for before it. Raises StartError if
    it can't be set."""
    if not (folder / _LIBRARY).exists():
        raise StartError("no process reads a clock that can be set")
    _write(folder, seconds)


def _write(folder: Path, seconds: int) -> None:
    with os.fdopen(os.open(_file(folder), os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:  # its page is mapped
        file.write(_AHEAD.pack(seconds))


def _file(folder: Path) -> Path:
    return folder / "ahead"
