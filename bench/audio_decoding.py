"""Decoding audio beside soundfile and soxr: CPU time for clips of 20 s, as a table. Medians of calls in turn.

Prints Triptych's own time where the two aren't installed.

    python -m bench.audio_decoding
"""

import importlib.util
import io
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.support.sounds import sound, tone
from triptych.media.audio import decode_audio
from triptych.prompt.probe_audio import probe_audio

SECONDS, RATE = 20, 16_000
REPEATS = 31
CLIPS = {
    "WAV, mono, 16 kHz": ("wav", 16_000, 1, "pcm_s16le"),
    "WAV, stereo, 44.1 kHz": ("wav", 44_100, 2, "pcm_s16le"),
    "AIFF, stereo, 44.1 kHz": ("aiff", 44_100, 2, "pcm_s16be"),
    "FLAC, mono, 16 kHz": ("flac", 16_000, 1, "flac"),
    "MP3, mono, 16 kHz": ("mp3", 16_000, 1, "libmp3lame"),
    "MP3, stereo, 44.1 kHz": ("mp3", 44_100, 2, "libmp3lame"),
    "Vorbis, stereo, 44.1 kHz": ("ogg", 44_100, 2, "vorbis"),
    "FLAC, stereo, 44.1 kHz": ("flac", 44_100, 2, "flac"),
    "Opus, stereo, 48 kHz": ("ogg", 48_000, 2, "libopus"),
}


def by_soundfile(data: bytes) -> NDArray[np.float32]:
    """Decode a file as vLLM and librosa do."""
    import soundfile  # type: ignore[import-not-found]  # in an environment of its own
    import soxr  # type: ignore[import-not-found]

    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    made: NDArray[np.float32] = mono if rate == RATE else soxr.resample(mono, rate, RATE)
    return made


def by_triptych(data: bytes) -> NDArray[np.float32]:
    return decode_audio(data, probe_audio(data), RATE)


def compared(data: bytes, decoders: list[Callable[[bytes], object]]) -> tuple[list[float], float]:
    """Return the median CPU time of each decoder in milliseconds, and the median of the first one's time over the
    last one's. They take turns, because other processes slow both down."""
    times = np.array([[cpu_seconds(decode, data) for decode in decoders] for _ in range(REPEATS)])
    medians: list[float] = (1000 * np.median(times, axis=0)).tolist()
    return medians, float(np.median(times[:, 0] / times[:, -1]))


def cpu_seconds(decode: Callable[[bytes], object], data: bytes) -> float:
    start = time.process_time()
    decode(data)
    return time.process_time() - start


def main() -> None:
    has_peers = all(importlib.util.find_spec(name) for name in ("soundfile", "soxr"))
    print("| clip of 20 s | Triptych, ms | soundfile + soxr, ms | ratio |\n| --- | --- | --- | --- |")
    for name, (container, rate, channels, codec) in CLIPS.items():
        noise = np.random.default_rng(0).normal(0, 0.05, (channels, SECONDS * rate)).astype(np.float32)
        data = sound(container, tone(SECONDS, rate, channels) + noise, rate, codec)
        medians, ratio = compared(data, [by_triptych, by_soundfile] if has_peers else [by_triptych])
        theirs = f"{medians[1]:.2f} | {ratio:.2f}" if has_peers else "— | —"
        print(f"| {name} | {medians[0]:.2f} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
