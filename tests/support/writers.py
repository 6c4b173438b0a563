"""Files of other programs: Debian's ffmpeg, sox, libavif-bin, mkvtoolnix and gstreamer1.0-tools, and own encoders of
codecs that these don't write. Only the slow suite needs the programs (``scripts/setup-media``)."""

import ctypes
import ctypes.util
import random
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

_AMR_WB_MODE, _AMR_WB_BYTES, _AMR_WB_SAMPLES = 2, 64, 320


def made_by(path: Path, *command: str) -> bytes:
    """Run a program that writes a file. Skip the test if the program isn't installed, or can't write the file."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} isn't installed")
    done = subprocess.run([*command], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]}: {done.stderr.decode()[-200:]}")
    return path.read_bytes()


def ffmpeg(path: Path, *arguments: str) -> bytes:
    """Run ``ffmpeg`` as ``made_by`` does."""
    return made_by(path, "ffmpeg", "-v", "error", "-y", *arguments, str(path))


def amr_wb(samples: NDArray[np.float32]) -> bytes:
    """Return an AMR-WB file of samples at 16 kHz. Skip the test if libvo-amrwbenc isn't installed."""
    name = ctypes.util.find_library("vo-amrwbenc")
    if name is None:
        pytest.skip("libvo-amrwbenc isn't installed")
    library = ctypes.CDLL(name)
    library.E_IF_init.restype = ctypes.c_void_p
    state = ctypes.c_void_p(library.E_IF_init())
    made, out = b"#!AMR-WB\n", ctypes.create_string_buffer(_AMR_WB_BYTES)
    values = (samples * 2**15).astype(np.int16)
    for start in range(0, len(values) - _AMR_WB_SAMPLES + 1, _AMR_WB_SAMPLES):
        block = values[start : start + _AMR_WB_SAMPLES].tobytes()
        size = library.E_IF_encode(state, _AMR_WB_MODE, block, out, 0)
        made += out.raw[:size]
    library.E_IF_exit(state)
    return made


def mpeg_layer_1(frames: int) -> bytes:
    """Return MPEG audio of layer 1, mono at 32 kHz and 128 kbit/s: four bits in every third band, at random."""
    source = random.Random(frames)
    made = b""
    for _ in range(frames):
        bits = "".join(f"{3 if band % 3 == 0 else 0:04b}" for band in range(32))
        bits += "".join(f"{source.randrange(8, 40):06b}" for band in range(0, 32, 3))
        bits += "".join(f"{source.randrange(15):04b}" for _ in range(12) for band in range(0, 32, 3))
        body = int(bits.ljust(8 * 188, "0"), 2).to_bytes(188, "big")
        made += bytes((0xFF, 0xFF, 0x48, 0xC0)) + body
    return made


def pcm_wav(body: bytes, rate: int, channels: int = 2) -> bytes:
    """Return a WAV file that says that its content is 16-bit PCM."""
    layout = struct.pack("<HHLLHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<L", 16) + layout + b"data" + struct.pack("<L", len(body)) + body
    return b"RIFF" + struct.pack("<L", len(chunks)) + chunks
