"""Videos: headers match FFmpeg's, and selected frames match those of a complete decoding."""

import io
import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import av
import numpy as np
import pytest

from tests.support import clips
from tests.support.clips import all_frames, clip
from tests.support.mp4_edits import behind_an_empty_track, with_edits, with_matrix, without_size
from tests.support.sounds import tone
from tests.support.timing import cpu_seconds
from tests.support.webm_edits import damaged_between_clusters, grouped, laced, tracks_last
from triptych.errors import BadMediaSize, MediaError, MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.media import frames
from triptych.media.video import decode_frames
from triptych.prompt.probe_video import probe_video

FILES = {
    "mp4": lambda: clip("mp4", frames=40),
    "mp4, header first": lambda: clip("mp4", frames=40, options={"movflags": "faststart"}),
    "mp4, in fragments": lambda: clip("mp4", frames=40, options={"movflags": "frag_keyframe+empty_moov"}),
    "mp4, fragments of one frame": lambda: clip("mp4", frames=9, options={"movflags": "frag_every_frame+empty_moov"}),
    "mp4, header and fragments": lambda: clip("mp4", frames=20, options={"frag_duration": "500000"}),
    "mov": lambda: clip("mov", frames=20, codec="libx264"),
    "mp4 with sound": lambda: clip("mp4", frames=20, sound=tone(2.0, 48_000)),
    "mp4 at 29.97": lambda: clip("mp4", frames=31, rate=Fraction(30000, 1001)),
    "mp4, one frame": lambda: clip("mp4", frames=1),
    "mp4, uneven": lambda: clip("mp4", frames=8, times=[0, 40, 80, 500, 540, 2000, 2040, 3000]),
    "mp4, long gops": lambda: clip("mp4", frames=60, codec_options={"g": "250", "bf": "3"}),
    "mp4, vp9": lambda: clip("mp4", frames=14, codec="libvpx-vp9"),
    "webm": lambda: clip("webm", frames=40),
    "webm, vp8": lambda: clip("webm", frames=14, codec="libvpx"),
    "webm at 29.97": lambda: clip("webm", frames=31, rate=Fraction(30000, 1001)),
    "matroska, h264": lambda: clip("matroska", frames=20, codec="libx264"),
    "webm as it is recorded": lambda: clip("webm", frames=40, options={"live": "1"}),
    "gif": lambda: clip("gif", frames=12),
    "gif at 50": lambda: clip("gif", frames=12, rate=50),
}


@pytest.mark.parametrize("name", FILES)
def test_headers_and_frames(name: str) -> None:
    data = FILES[name]()
    header = probe_video(data)
    whole = all_frames(data)
    assert (header.frames, header.height, header.width) == (len(whole), *whole[0].shape[:2])
    with av.open(io.BytesIO(data)) as file:
        said = file.streams.video[0].average_rate
        if name not in ("gif", "gif at 50", "webm as it is recorded", "mp4, one frame"):
            assert header.rate == pytest.approx(float(said or 0), rel=1e-3)
    source = random.Random(name)
    choices = [[0], [len(whole) - 1], list(range(len(whole))), [0, 0, len(whole) - 1, len(whole) - 1]]
    choices += [sorted(source.choices(range(len(whole)), k=source.randrange(1, 8))) for _ in range(2)]
    for numbers in choices:
        decoded = list(decode_frames(data, header, numbers))
        assert len(decoded) == len(numbers)
        for number, frame in zip(numbers, decoded, strict=True):
            np.testing.assert_array_equal(frame, whole[number])


def test_few_packets_are_decoded_for_few_selected_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip("mp4", frames=120)
    header = probe_video(data)
    sent = []
    original: Any = av.video.codeccontext.VideoCodecContext.decode

    class Counting:
        def __init__(self, context: Any) -> None:
            object.__setattr__(self, "context", context)

        def __getattr__(self, name: str) -> object:
            return getattr(self.context, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(self.context, name, value)

        def decode(self, packet: Any) -> object:
            sent.append(packet)
            return original(self.context, packet)

    from triptych.media import video

    class Watched(video.FrameDecoder):
        def __init__(self, decoder: object, *rest: object) -> None:
            super().__init__(Counting(decoder), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(video, "FrameDecoder", Watched)
    list(decode_frames(data, header, [0, 60, 119]))
    assert len(sent) < 30, "a keyframe is never more than 6 frames away"


TURNS = {
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
}
MIRRORED = {
    "left to right": ((-1, 0, 0, 1), lambda frame: frame[:, ::-1]),
    "upside down": ((1, 0, 0, -1), lambda frame: frame[::-1]),
    "sides swapped": ((0, 1, 1, 0), lambda frame: frame.transpose(1, 0, 2)),
    "sides swapped, turned": ((0, -1, -1, 0), lambda frame: frame[::-1, ::-1].transpose(1, 0, 2)),
}


@pytest.mark.parametrize("of_movie", [False, True])
@pytest.mark.parametrize("degrees", TURNS)
def test_rotation_is_applied(degrees: int, of_movie: bool) -> None:
    data = with_matrix(clip("mp4", frames=3), TURNS[degrees], of_movie=of_movie)
    header = probe_video(data)
    assert (header.rotation, header.mirrored) == (degrees, False)
    with av.open(io.BytesIO(data), "r") as file:
        assert next(file.decode(video=0)).rotation % 360 == -degrees % 360
    assert (header.width, header.height) == ((96, 64) if degrees == 180 else (64, 96))
    for frame, stored in zip(decode_frames(data, header, [0, 1, 2]), all_frames(data), strict=True):
        np.testing.assert_array_equal(frame, np.rot90(stored, -degrees // 90))


@pytest.mark.parametrize("name", MIRRORED)
def test_mirrored_frames_are_turned_back(name: str) -> None:
    matrix, mirrored = MIRRORED[name]
    data = with_matrix(clip("mp4", frames=2), matrix)
    header = probe_video(data)
    for frame, stored in zip(decode_frames(data, header, [0, 1]), all_frames(data), strict=True):
        np.testing.assert_array_equal(frame, mirrored(stored))
        assert frame.shape == (header.height, header.width, 3)


def test_other_angles_are_not_applied() -> None:
    header = probe_video(with_matrix(clip("mp4", frames=2), (1, 1, -1, 1)))
    assert (header.rotation, header.width, header.height) == (0, 96, 64)


small = partial(clip, "mp4", width=32, height=32)

EDITED = {
    "out of order": small(frames=24),
    "in order": small(frames=24, codec_options={"bf": "0"}),
    "open GOPs": small(frames=24, codec_options={"x264-params": "open-gop=1"}),
    "negative shifts": small(frames=24, options={"movflags": "negative_cts_offsets"}),
    "uneven": small(frames=10, times=[0, 40, 80, 500, 540, 700, 740, 1500, 1540, 1600]),
}
EDITS: dict[str, list[tuple[int, int]]] = {
    "whole": [(60_000, 0)],
    "begins later": [(60_000, 4096)],
    "begins within a frame": [(60_000, 5000)],
    "ends earlier": [(800, 2048)],
    "within one group": [(300, 3072)],
    "begins with a pause": [(500, -1), (1000, 3072)],
    "two pauses": [(500, -1), (200, -1), (1000, 3072)],
    "ends with a pause": [(700, 3072), (250, -1)],
    "two parts": [(400, 2048), (500, 14_336)],
    "two parts, backwards": [(400, 14_336), (500, 2048)],
    "the same twice": [(600, 5120), (600, 5120)],
    **{
        f"random {seed}": [
            (source.randrange(2500), source.choice([-1, source.randrange(30_000)]))
            for _ in range(source.choice([1, 2, 3]))
        ]
        for seed in range(8)
        for source in [random.Random(seed)]
    },
}


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("file", EDITED)
def test_edit_lists_hide_frames_as_in_ffmpeg(file: str, version: int) -> None:
    for name, edits in list(EDITS.items())[:: 4 if version else 1]:
        if file == "open GOPs" and len(edits) > 1:
            continue  # what a second part's first frames depend on is gone, so they are seldom the same
        data = with_edits(EDITED[file], edits, version)
        whole = all_frames(data)
        if not whole:
            with pytest.raises(MediaError, match="no frames"):
                list(decode_frames(data, probe_video(data), [0]))
            continue
        header = probe_video(data)
        assert header.frames == len(whole), name
        some = sorted(random.Random(name).choices(range(len(whole)), k=4))
        for numbers in [some] if version else [range(len(whole)), some]:
            for number, frame in zip(numbers, decode_frames(data, header, numbers), strict=True):
                np.testing.assert_array_equal(frame, whole[number], err_msg=name)


def test_many_edits_are_refused() -> None:
    data = with_edits(EDITED["in order"], [(10, 0)] * 100_000)
    with pytest.raises(UnsupportedMedia, match="has 100000 edits; at most 1024"):
        probe_video(data)


@pytest.mark.parametrize("edit", [without_size, behind_an_empty_track])
def test_odd_headers_of_mp4(edit: Callable[[bytes], bytes]) -> None:
    data = clip("mp4", frames=5)
    whole = all_frames(data)
    edited = edit(data)
    header = probe_video(edited)
    assert (header.frames, header.width, header.height) == (5, 96, 64)
    np.testing.assert_array_equal(list(decode_frames(edited, header, range(5))), whole)


HIDDEN_FRAMES = {"auto-alt-ref": "1", "lag-in-frames": "16", "arnr-maxframes": "7", "b": "200k"}
LIVE = {"live": "1"}
"""A recorder's file: clusters of unknown size, no duration, no index."""

WEBM_FILES = {
    "longer sound": lambda: clip("webm", frames=10, sound=tone(1.1, 48_000)),
    "one frame and sound": lambda: clip("webm", frames=1, sound=tone(0.5, 48_000)),
    "uneven": lambda: clip("webm", frames=8, times=[0, 40, 80, 500, 540, 2000, 2040, 2960], rate=25),
    "hidden frames": lambda: clip("webm", frames=30, codec="libvpx", codec_options=HIDDEN_FRAMES),
    "hidden frames, recorded": lambda: clip("webm", frames=30, codec_options=HIDDEN_FRAMES, options=LIVE),
    "av1": lambda: clip(
        "matroska", frames=30, codec="libsvtav1", codec_options={"preset": "12", "svtav1-params": "lp=1"}
    ),
    "open GOPs": lambda: clip("matroska", frames=30, codec="libx264", codec_options={"x264-params": "open-gop=1"}),
    "pictures refreshed in parts": lambda: clip(
        "matroska", frames=40, codec="libx264", codec_options={"x264-params": "intra-refresh=1:bframes=0:keyint=8"}
    ),
    "many clusters": lambda: clip("webm", frames=20, sound=tone(2.0, 48_000), options={"cluster_time_limit": "200"}),
    "tracks behind clusters": lambda: tracks_last(clip("webm", frames=10)),
    "laced": lambda: laced(clip("webm", frames=10)),
    "block groups": lambda: grouped(clip("webm", frames=10)),
    "damaged": lambda: damaged_between_clusters(clip("webm", frames=20, options={"cluster_time_limit": "500"})),
    "cut": lambda: clip("webm", frames=20, sound=tone(2.0, 48_000))[:-4000],
    "cut, recorded": lambda: clip("webm", frames=20, options=LIVE)[:-2000],
}


@pytest.mark.parametrize("name", WEBM_FILES)
def test_frames_of_webm_are_those_in_the_file(name: str) -> None:
    """Whatever its header says, and however long its sound is."""
    data = WEBM_FILES[name]()
    header = probe_video(data)
    whole = all_frames(data)
    assert header.frames == len(whole) > 0
    source = random.Random(name)
    for numbers in [range(len(whole)), sorted(source.sample(range(len(whole)), 1 + len(whole) // 4))]:
        for number, frame in zip(numbers, decode_frames(data, header, numbers), strict=True):
            np.testing.assert_array_equal(frame, whole[number])


@pytest.mark.parametrize("name", ["uneven", "longer sound", "cut"])
def test_rate_of_webm_is_the_mean(name: str) -> None:
    header = probe_video(WEBM_FILES[name]())
    assert header.rate == pytest.approx(7 / 2.96 if name == "uneven" else 10, rel=1e-6)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


def rejected(data: bytes, kind: type[MediaError], match: str) -> None:
    with pytest.raises(kind, match=match):
        header = probe_video(data)
        list(decode_frames(data, header, [0, header.frames // 2, header.frames - 1]))


def test_data_that_is_not_video_is_rejected() -> None:
    rejected(b"", TruncatedMedia, "empty")
    rejected(b"hello", UnsupportedMedia, "not an MP4, WebM or animated GIF")
    rejected(clips.sound_only(), UnsupportedMedia, "no video track")
    rejected(clip("gif", frames=1)[:60], UnsupportedMedia, "isn't animated")
    rejected(clip("mp4", codec="mpeg4", codec_options={"g": "12", "bf": "0"}), UnsupportedMedia, "'mp4v', which isn't")
    rejected(frames.pack_frames(frames.PackedFrames(1.0, [])), TruncatedMedia, "no frames")
    rejected(b"triptych/frames\x00\xff\xff", UnsupportedMedia, "damaged")


@pytest.mark.parametrize("container", ["mp4", "gif"])
def test_truncated(container: str) -> None:
    data = clip(container, frames=30, options={"movflags": "faststart"} if container == "mp4" else None)
    rejected(data[: len(data) * 2 // 3], MediaError, "ends after|of the 30 frames|ends within")
    rejected(data[:20], MediaError, ".")


def test_wrong_headers_are_detected() -> None:
    data = bytearray(clip("mp4", frames=12))
    count = data.index(b"stts")
    rejected(
        bytes(data[: count + 12] + b"\x00\x00\x00\x0d" + data[count + 16 :]), UnsupportedMedia, "contradicts itself"
    )
    sizes = data.index(b"avc1", data.index(b"stsd"))
    wider = bytes(data[: sizes + 28] + b"\x01\x00" + data[sizes + 30 :])
    rejected(wider, MediaMismatch, "a frame of 96 by 64 pixels; its header says 256 by 64")
    tall = probe_video(clip("gif", frames=3))
    with pytest.raises(MediaMismatch, match="has 5 frames; its header says 3"):
        list(decode_frames(clip("gif", frames=5), tall, [0]))


def test_frames_of_different_sizes() -> None:
    from tests.support.image_cases import picture, png

    packed = frames.PackedFrames(2.0, [png(picture(64, 32, 1)), png(picture(32, 64, 1))])
    with pytest.raises(BadMediaSize, match="must all have the same size"):
        probe_video(frames.pack_frames(packed))


@pytest.mark.parametrize("times", [20, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mp4", "mp4, in fragments", "webm", "webm as it is recorded", "gif"])
def test_mutated_files_raise_only_typed_errors(name: str, times: int) -> None:
    source = random.Random(name)
    data = FILES[name]()
    for _ in range(times):
        mutated = bytearray(data)
        for _ in range(source.randint(1, 4)):
            reach = source.choice([64, 1024, len(mutated)])
            place = source.randrange(min(reach, len(mutated)))
            place = place if source.random() < 0.5 else len(mutated) - 1 - place
            mutated[place] ^= 1 << source.randrange(8)
        cut = bytes(mutated[: source.choice([len(mutated), source.randrange(len(mutated))])])
        try:
            header = probe_video(cut)
            if header.frames < 1000 and header.width * header.height < 10**6:
                list(decode_frames(cut, header, [0, header.frames // 2, header.frames - 1]))
        except MediaError:
            continue


def test_planning_time_does_not_grow_with_length() -> None:
    """A forged header of two hours: 216,000 frames of different durations."""
    data = clip("mp4", frames=12, options={"movflags": "faststart", "use_editlist": "0"})
    entries = np.empty((216_000, 2), dtype=">u4")
    entries[:, 0] = 1
    entries[:, 1] = np.arange(216_000) % 7 + 500
    times, sizes = data.index(b"stts"), data.index(b"stsz")
    table = b"stts" + bytes(4) + (216_000).to_bytes(4, "big") + entries.tobytes()
    grown = len(table) + 4 - int.from_bytes(data[times - 4 : times], "big")
    long = bytearray(data[: sizes + 12] + (216_000).to_bytes(4, "big") + data[sizes + 16 :])
    end = times - 4 + int.from_bytes(data[times - 4 : times], "big")
    long[times - 4 : end] = (len(table) + 4).to_bytes(4, "big") + table
    for box in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        place = data.index(box) - 4
        long[place : place + 4] = (int.from_bytes(data[place : place + 4], "big") + grown).to_bytes(4, "big")
    assert probe_video(bytes(long)).frames == 216_000
    assert min(cpu_seconds(lambda: probe_video(bytes(long))) for _ in range(3)) < 0.05
