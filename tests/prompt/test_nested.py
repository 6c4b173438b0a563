"""Files with millions of small pieces within each other, which take long to walk through though they aren't large."""

import struct
import time
from collections.abc import Callable

import pytest

from tests.support.clips import clip
from triptych.errors import UnsupportedMedia
from triptych.prompt.probe_video import probe_video

SIZE = 6 * 2**20


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">L4s", 8 + len(content), kind) + content


def element(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack(">Q", len(content) | 1 << 56) + content


def many_tracks() -> bytes:
    track = box(b"trak", box(b"free", b"") * 1000)
    return box(b"ftyp", b"isom") + box(b"moov", track * (SIZE // len(track)))


def many_fragments() -> bytes:
    return fragmented(box(b"free", b"") * 500 + box(b"tfhd", struct.pack(">LL", 0, 99)))


def many_empty_runs() -> bytes:
    """Of samples that last as long as all do, and as each says."""
    runs = box(b"trun", struct.pack(">LL", 0, 0)) + box(b"trun", struct.pack(">LL", 0x100, 0))
    return fragmented(box(b"tfhd", struct.pack(">LL", 0, 1)) + runs * 250)


def fragmented(content: bytes) -> bytes:
    """A file whose frames are all in fragments of that content."""
    fragment = box(b"moof", box(b"traf", content))
    data = clip("mp4", frames=4)
    start = data.index(b"stsz") + 12
    data = data[:start] + struct.pack(">L", 0) + data[start + 4 :]
    times = data.index(b"stts") + 8
    return data[:times] + bytes(4) + data[times + 4 :] + fragment * (SIZE // len(fragment))


def many_elements() -> bytes:
    track = element(b"\xae", b"\xec\x80" * 500)
    tracks = element(b"\x16\x54\xae\x6b", track * (SIZE // len(track)))
    return element(b"\x1a\x45\xdf\xa3", b"") + element(b"\x18\x53\x80\x67", tracks)


@pytest.mark.parametrize("make", [many_tracks, many_fragments, many_empty_runs, many_elements])
def test_their_walk_is_bounded(make: Callable[[], bytes]) -> None:
    data = make()
    began = time.thread_time()
    with pytest.raises(UnsupportedMedia, match=r"more than (262144|524288)"):
        probe_video(data)
    assert time.thread_time() - began < 1.5
