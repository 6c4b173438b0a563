"""Audio files: headers match what is decoded, and features match Whisper's."""

import random
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from tests.support.sounds import sound, tone
from triptych.errors import BadMediaSize, CheckpointError, MediaError, MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.media.audio import decode_audio
from triptych.media.log_mel import LogMel
from triptych.prompt.probe_audio import probe_audio
from triptych.types import AudioHeader

FILES: dict[str, tuple[dict[str, Any], float]] = {
    "wav": ({"container": "wav", "rate": 16_000}, 1e-4),
    "wav in floats": ({"container": "wav", "rate": 16_000, "codec": "pcm_f32le"}, 1e-6),
    "wav, telephone": ({"container": "wav", "rate": 8_000, "codec": "pcm_mulaw"}, 0.03),
    "flac": ({"container": "flac", "rate": 16_000}, 1e-4),
    "flac, studio": ({"container": "flac", "rate": 96_000}, 0.02),
    "mp3": ({"container": "mp3", "rate": 16_000}, 0.05),
    "mp3, compact disc": ({"container": "mp3", "rate": 44_100}, 0.05),
    "opus": ({"container": "ogg", "rate": 48_000}, 0.05),
    "vorbis": ({"container": "ogg", "rate": 44_100, "codec": "vorbis"}, 0.1),
}


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("name", FILES)
def test_decoded_samples_match_the_recording(name: str, channels: int) -> None:
    settings, error = FILES[name]
    rate = settings["rate"]
    if channels == 6 and settings["container"] == "mp3":
        pytest.skip("MP3 has two channels at most")
    if "vorbis" in name and channels != 2:
        pytest.skip("FFmpeg's own encoder makes stereo alone")
    recorded = tone(1.3, rate, channels)
    data = sound(samples=recorded, **settings)
    header = probe_audio(data)
    assert (header.rate, header.channels) == (rate, channels)
    assert header.samples == pytest.approx(recorded.shape[1], abs=0 if error < 0.01 else 0.05 * rate)
    decoded = decode_audio(data, header, 16_000)
    assert decoded.dtype == np.float32
    assert len(decoded) == header.resampled(16_000)
    expected = tone(1.3, 16_000, channels).mean(axis=0)
    common = min(len(decoded), len(expected)) - 200
    middle = slice(1000, common)
    difference = decoded[middle] - expected[middle]
    assert np.sqrt((difference**2).mean()) < error + 1e-4, "root mean square"


@pytest.mark.parametrize(
    ("container", "codec", "channels"),
    [("wav", "pcm_s16le", n) for n in (3, 7, 8, 16)]
    + [("flac", "flac", 7), ("flac", "flac", 8), ("ogg", "libopus", 7), ("ogg", "libopus", 8)],
)
def test_any_number_of_channels_is_averaged(container: str, codec: str, channels: int) -> None:
    recorded = tone(0.5, 48_000, channels)
    data = sound(container, recorded, 48_000, codec)
    header = probe_audio(data)
    assert header.channels == channels
    made = decode_audio(data, header, 48_000)
    np.testing.assert_allclose(made, recorded.mean(axis=0), atol=0.05 if codec == "libopus" else 1e-4)


@pytest.mark.parametrize("channels", [9, 33, 64])
def test_channels_without_a_layout_are_averaged(channels: int) -> None:
    samples = np.random.default_rng(channels).integers(-(2**15), 2**15, (1000, channels), dtype=np.int16)
    data = wav(1000, channels)[:44] + samples.tobytes()
    made = decode_audio(data, probe_audio(data), 16_000)
    np.testing.assert_allclose(made, (samples / 2**15).mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "mp3, compact disc"])
@pytest.mark.parametrize("seconds", [0.03, 0.5, 7.77])
def test_declared_lengths_are_exact(name: str, seconds: float) -> None:
    settings, _ = FILES[name]
    recorded = tone(seconds, settings["rate"])
    header = probe_audio(sound(samples=recorded, **settings))
    assert header.samples == recorded.shape[1]


def test_an_mp3_without_a_declared_length_is_counted() -> None:
    data = sound("mp3", tone(5.0, 44_100), 44_100)
    place = data.index(b"Xing") if b"Xing" in data else data.index(b"Info")
    plain = data[:place] + bytes(4) + data[place + 4 :]
    header = probe_audio(plain)
    assert header.seconds == pytest.approx(5.0, abs=0.1)
    assert len(decode_audio(plain, header, 16_000)) == header.resampled(16_000)


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("samples", [400, 401, 12_345, 16_000 * 11])
def test_features_match_whisper(bands: int, samples: int) -> None:
    noise = np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
    decoded = noise * np.linspace(0, 0.5, samples, dtype=np.float32)
    assert_as_whisper(decoded, bands)


def test_silence_has_features_too() -> None:
    assert_as_whisper(np.zeros(16_000, dtype=np.float32), 128)


def assert_as_whisper(samples: NDArray[np.float32], bands: int) -> None:
    reference = WhisperFeatureExtractor(feature_size=bands)
    expected = reference(samples, sampling_rate=16_000, return_tensors="np", padding="longest")["input_features"][0]
    made = LogMel(bands)(samples)
    assert made.dtype == np.float32
    assert made.shape == expected.T.shape == (LogMel(bands).num_frames(len(samples)), bands)
    np.testing.assert_allclose(made, expected.T, atol=1e-4)


def test_feature_settings() -> None:
    made = LogMel.from_config({"feature_size": 80, "n_fft": 512, "hop_length": 128, "sampling_rate": 8000})
    assert (made.num_bands, made.window, made.hop, made.rate) == (80, 512, 128, 8000)
    wrong: dict[str, Any] = {"feature_size": 0, "hop_length": "a", "n_fft": 1.5, "sampling_rate": True, "dither": 1e-4}
    for name, value in wrong.items():
        with pytest.raises(CheckpointError, match=name):
            LogMel.from_config({name: value})


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


def rejected(data: bytes, kind: type[MediaError], match: str) -> None:
    with pytest.raises(kind, match=match):
        header = probe_audio(data)
        LogMel().num_frames(header.resampled(16_000))
        decode_audio(data, header, 16_000)


def wav(samples: int, channels: int = 1, rate: int = 16_000, code: int = 1) -> bytes:
    layout = struct.pack("<HHLLHH", code, channels, rate, rate * channels * 2, channels * 2, 16)
    body = bytes(samples * channels * 2)
    chunks = b"fmt " + struct.pack("<L", 16) + layout + b"data" + struct.pack("<L", len(body)) + body
    return b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WAVE" + chunks


def test_data_that_is_not_audio_is_rejected() -> None:
    rejected(b"", TruncatedMedia, "empty")
    rejected(b"hello" * 100, UnsupportedMedia, "not audio of a known format: WAV")
    rejected(wav(0)[:44], BadMediaSize, "empty")
    rejected(wav(399), BadMediaSize, "shorter than 25 ms")
    rejected(wav(1000, rate=1000), UnsupportedMedia, "1000 samples per second")
    rejected(wav(1000, channels=65), UnsupportedMedia, "65 channels")
    rejected(wav(1000, code=85), UnsupportedMedia, "format 85, but none of its frames")
    rejected(wav(1000, code=353), UnsupportedMedia, "format 353, which isn't supported")
    rejected(b"OggS" + bytes(100), UnsupportedMedia, "neither Vorbis nor Opus")


def test_silent_audio_is_audio() -> None:
    header = probe_audio(wav(16_000))
    assert not decode_audio(wav(16_000), header, 16_000).any()


@pytest.mark.parametrize("container", ["wav", "flac", "mp3", "ogg"])
def test_truncated(container: str) -> None:
    rate = 48_000
    data = sound(container, tone(3.0, rate), rate)
    rejected(data[: len(data) * 2 // 3], MediaError, "ends|damaged")
    rejected(data[:30], MediaError, ".")


def test_wrong_headers_are_detected() -> None:
    data = sound("flac", tone(2.0, 16_000))
    with pytest.raises(MediaMismatch, match=r"longer than the 1\.0 s"):
        decode_audio(data, AudioHeader("FLAC", 16_000, 1, 16_000), 16_000)
    with pytest.raises(TruncatedMedia, match=r"ends after 2\.0 s of 3\.0 s"):
        decode_audio(data, AudioHeader("FLAC", 16_000, 1, 48_000), 16_000)
    with pytest.raises(TruncatedMedia, match=r"ends after 2\.0 s of 4\.0 s"):
        decode_audio(data, AudioHeader("FLAC", 8_000, 1, 32_000), 16_000)
    with pytest.raises(TruncatedMedia, match=r"ends after 0\.0 s of 2\.0 s"):
        decode_audio(b"\x1a\x45\xdf\xa3" + bytes(99), AudioHeader("FLAC", 8_000, 1, 16_000), 16_000)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e300, 1e38])
def test_samples_that_features_can_not_be_made_of_are_refused(value: float) -> None:
    data = sound(samples=tone(0.5, 8_000, 2), rate=8_000, codec="pcm_f64le")
    last = np.array([value, value])
    spoiled = data[: -last.nbytes] + last.tobytes()
    with pytest.raises(UnsupportedMedia, match="samples that aren't numbers or are far too large"):
        decode_audio(spoiled, probe_audio(spoiled), 16_000)
    loud = data[: -last.nbytes] + np.array([2.0**30, 2.0**30]).tobytes()
    assert np.isfinite(LogMel()(decode_audio(loud, probe_audio(loud), 16_000))).all()


@pytest.mark.parametrize("times", [20, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_mutated_files_raise_only_typed_errors(name: str, times: int) -> None:
    source = random.Random(name)
    settings, _ = FILES[name]
    data = sound(samples=tone(0.4, settings["rate"], 2), **settings)
    for _ in range(times):
        mutated = bytearray(data)
        for _ in range(source.randint(1, 4)):
            mutated[source.randrange(min(len(mutated), source.choice([64, 1024, 10**9])))] ^= 1 << source.randrange(8)
        cut = bytes(mutated[: source.choice([len(mutated), source.randrange(len(mutated))])])
        try:
            header = probe_audio(cut)
            if header.seconds < 60:
                assert len(decode_audio(cut, header, 16_000)) == header.resampled(16_000)
        except MediaError:
            continue
