"""Decoding audio beside soundfile and soxr: CPU time for clips of 20 s, as a table.

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
REPEATS = 9
CLIPS = {
    "WAV, mono, 16 kHz": ("wav", 16_000, 1, "pcm_s16le"),
    "WAV, stereo, 44.1 kHz": ("wav", 44_100, 2, "pcm_s16le"),
    "AIFF, stereo, 44.1 kHz": ("aiff", 44_100, 2, "pcm_s16be"),
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


def milliseconds(decode: Callable[[bytes], object], data: bytes) -> float:
    """Return the least CPU time of several runs."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        decode(data)
        times.append(time.process_time() - start)
    return 1000 * min(times)


def main() -> None:
    has_peers = all(importlib.util.find_spec(name) for name in ("soundfile", "soxr"))
    print("| clip of 20 s | Triptych, ms | soundfile + soxr, ms | ratio |\n| --- | --- | --- | --- |")
    for name, (container, rate, channels, codec) in CLIPS.items():
        noise = np.random.default_rng(0).normal(0, 0.05, (channels, SECONDS * rate)).astype(np.float32)
        data = sound(container, tone(SECONDS, rate, channels) + noise, rate, codec)
        ours = milliseconds(by_triptych, data)
        theirs = milliseconds(by_soundfile, data) if has_peers else float("nan")
        print(f"| {name} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
