"""Audio tracks of videos: the length in the header matches what is decoded, as for audio files."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.clips import clip, picture
from tests.support.sounds import tone
from triptych.errors import MediaError, MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.media import frames
from triptych.media.audio import decode_audio
from triptych.media.video import decode_frames
from triptych.prompt.caps import MediaCaps
from triptych.prompt.containers import mp4, mp4_edits
from triptych.prompt.probe_video import probe_audio_track, probe_video
from triptych.types import AudioHeader

RATE = 16_000
SECONDS = 1.3

FILES: dict[str, Callable[[], bytes]] = {
    "mp4": lambda: clip("mp4", frames=13, sound=tone(SECONDS, 48_000)),
    "mp4, stereo": lambda: clip("mp4", frames=13, sound=tone(SECONDS, 44_100, 2), sound_rate=44_100),
    "mp4, header first": lambda: clip("mp4", frames=13, sound=tone(SECONDS, 48_000), options={"movflags": "faststart"}),
    "mp4, in fragments": lambda: clip(
        "mp4", frames=13, sound=tone(SECONDS, 48_000), options={"movflags": "frag_keyframe+empty_moov"}
    ),
    "mp4, opus": lambda: clip("mp4", frames=13, sound=tone(SECONDS, 48_000), sound_codec="libopus"),
    "mp4, mp3": lambda: clip("mp4", frames=13, sound=tone(SECONDS, 48_000), sound_codec="libmp3lame"),
    "mov, uncompressed": lambda: clip("mov", frames=13, codec="libx264", sound=tone(SECONDS, 48_000)),
    "webm": lambda: clip("webm", frames=13, sound=tone(SECONDS, 48_000)),
    "webm, vorbis": lambda: clip(
        "webm", frames=13, sound=tone(SECONDS, 44_100, 2), sound_rate=44_100, sound_codec="vorbis"
    ),
    "webm as it is recorded": lambda: clip("webm", frames=13, sound=tone(SECONDS, 48_000), options={"live": "1"}),
    "webm in many clusters": lambda: clip(
        "webm", frames=13, sound=tone(SECONDS, 48_000), options={"cluster_time_limit": "300"}
    ),
    "matroska, flac": lambda: clip("matroska", frames=13, codec="libx264", sound=tone(SECONDS, 48_000)),
    "matroska, aac": lambda: clip(
        "matroska", frames=13, codec="libx264", sound=tone(SECONDS, 48_000), sound_codec="aac"
    ),
}


def difference(decoded: NDArray[np.float32], recorded: NDArray[np.float32]) -> float:
    """Root mean square at the best alignment, because encoders start slightly early or late."""
    middle = recorded[4000:-4000]
    places = range(4000 - 1200, 4000 + 1200)
    return min(float(np.sqrt(((decoded[at : at + len(middle)] - middle) ** 2).mean())) for at in places)


@pytest.mark.parametrize("name", FILES)
def test_decoded_samples_match_the_recording(name: str) -> None:
    data = FILES[name]()
    header = probe_audio_track(data)
    assert header.in_video
    assert header.seconds == pytest.approx(SECONDS, abs=0.06)
    decoded = decode_audio(data, header, RATE)
    assert len(decoded) == header.resampled(RATE)
    channels = 2 if "stereo" in name or "vorbis" in name else 1
    assert difference(decoded, tone(SECONDS, RATE, channels).mean(axis=0)) < 0.1


@pytest.mark.parametrize("container", ["mp4", "webm"])
@pytest.mark.parametrize(("frames", "seconds"), [(10, 4.0), (40, 0.5)])
def test_sound_need_not_be_as_long_as_the_video(container: str, frames: int, seconds: float) -> None:
    data = clip(container, frames=frames, sound=tone(seconds, 48_000))
    header = probe_audio_track(data)
    assert header.seconds == pytest.approx(seconds, abs=0.06)
    assert len(decode_audio(data, header, RATE)) == header.resampled(RATE)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


def rejected(data: bytes, kind: type[MediaError], match: str) -> None:
    with pytest.raises(kind, match=match):
        decode_audio(data, probe_audio_track(data), RATE)


def test_files_without_sound_are_rejected() -> None:
    rejected(clip("mp4"), UnsupportedMedia, "the MP4 video has no audio track")
    rejected(clip("webm"), UnsupportedMedia, "the WebM video has no audio track")
    rejected(clip("gif"), UnsupportedMedia, "no audio track: GIFs")
    packed = frames.pack_frames(frames.PackedFrames(1.0, [picture(0, 16, 16).tobytes()]))
    rejected(packed, UnsupportedMedia, "no audio track: GIFs and lists of frames")
    rejected(b"", UnsupportedMedia, "no audio track")


def test_unsupported_sound_is_rejected() -> None:
    unknown = clip("mp4", sound=tone(1, 48_000)).replace(b"mp4a", b"mlpa")
    rejected(unknown, UnsupportedMedia, "'mlpa', which isn't")
    matroska = clip("matroska", codec="libx264", sound=tone(1, 48_000), sound_codec="tta")
    rejected(matroska, UnsupportedMedia, "'A_TTA1', which isn't")


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_truncated(container: str) -> None:
    options = {"movflags": "faststart"} if container == "mp4" else None
    data = clip(container, frames=40, sound=tone(4.0, 48_000), options=options)
    if container == "mp4":
        rejected(data[: len(data) * 2 // 3], MediaError, "sound ends after|damaged")
    else:  # whose length is read at its end
        cut = data[: len(data) * 2 // 3]
        header = probe_audio_track(cut)
        assert header.seconds < 3.5
        assert len(decode_audio(cut, header, RATE)) == header.resampled(RATE)
    rejected(data[:30], MediaError, ".")


@pytest.mark.parametrize("uneven", [False, True])
def test_rounded_times_are_counted_whole_and_gaps_are_not(uneven: bool) -> None:
    """Such as 48 kHz on a clock of milliseconds."""
    durations = np.array([21, 21, 22] * 500 + [700] + [21, 21, 22] * 500)
    counts = np.ones(0 if uneven else len(durations), np.int64)
    track = mp4.Mp4Track((0, 0), (0, 0), 1, 0, 0, b"mp4a", 1000, len(durations), (counts, durations[: len(counts)]))
    if uneven:
        track.uneven = [durations[:700].astype(">u4"), durations[700:].astype(">u4")]
    assert track.ticks() == 1000 * 64 + 700
    edits = [] if uneven else [mp4_edits.Edit(0, 10**6)]
    assert track.sound_ticks(edits) == 1000 * 64 + 21


def test_a_track_is_limited_by_its_decoded_samples() -> None:
    data = clip("mp4", frames=20, sound=tone(2.0, 48_000))
    MediaCaps().audio.check(AudioHeader("MP4", 10_000_000, 2, 640_000_000, in_video=True))
    with pytest.raises(UnsupportedMedia, match="the MP4 video's sound has more than 1000000000 samples"):
        decode_audio(data, AudioHeader("MP4", 1000, 1, 25_000_000, in_video=True), RATE)


@pytest.mark.parametrize("damage", [bytes(17), b"\x9f\xff", b"\x9f\x8f"])
def test_damage_to_the_sounds_description_only_affects_sound(damage: bytes) -> None:
    """An invalid element, and channel elements of unknown and of excessive size."""
    data = clip("matroska", codec="libx264", sound=tone(1.2, 48_000), sound_codec="aac")
    place = data.index(b"\xe1\x91\x9f\x81\x01\xb5\x88") + 2
    damaged = data[:place] + damage + data[place + len(damage) :]
    rejected(damaged, UnsupportedMedia, "the WebM video's sound is damaged")
    header = probe_video(damaged)
    assert header == probe_video(data)
    seen, expected = (list(decode_frames(file, header, [0, 11])) for file in (damaged, data))
    np.testing.assert_array_equal(seen, expected)


def test_wrong_headers_are_detected() -> None:
    data = clip("mp4", frames=20, sound=tone(2.0, 48_000))
    with pytest.raises(MediaMismatch, match=r"the MP4 video's sound is longer than the 1\.0 s"):
        decode_audio(data, AudioHeader("MP4", 48_000, 1, 48_000, in_video=True), RATE)
    with pytest.raises(TruncatedMedia, match=r"the MP4 video's sound ends after 2\.0 s of 3\.0 s"):
        decode_audio(data, AudioHeader("MP4", 48_000, 1, 144_000, in_video=True), RATE)
    clock = AudioHeader("MP4", 1000, 1, 2000, in_video=True)
    assert decode_audio(data, clock, RATE).any(), "its clock isn't its sample rate"


@pytest.mark.parametrize("times", [15, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mp4", "mp4, in fragments", "webm", "webm as it is recorded", "matroska, aac"])
def test_mutated_files_raise_only_typed_errors(name: str, times: int) -> None:
    source = random.Random(name)
    data = FILES[name]()
    for _ in range(times):
        mutated = bytearray(data)
        for _ in range(source.randint(1, 4)):
            place = source.randrange(min(source.choice([64, 1024, len(mutated)]), len(mutated)))
            place = place if source.random() < 0.5 else len(mutated) - 1 - place
            mutated[place] ^= 1 << source.randrange(8)
        cut = bytes(mutated[: source.choice([len(mutated), source.randrange(len(mutated))])])
        try:
            header = probe_audio_track(cut)
            if header.seconds < 60:
                assert len(decode_audio(cut, header, RATE)) == header.resampled(RATE)
        except MediaError:
            continue
