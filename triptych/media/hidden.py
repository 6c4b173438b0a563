"""Finds the packets of a video for which a decoder shows no frame, by their first bytes. Pure; no decoder is needed.

VP8 and VP9 have frames that are only referenced by later ones; they may be packets of their own. HEVC video that was
cut at an open GOP begins with frames that depend on what was cut away.
"""

from collections.abc import Iterable

_VP9_SUPERFRAME, _VP9_SUPERFRAME_MASK = 0xC0, 0xE0
_VP9_PROFILE_3 = 0x30

# Types of HEVC's units; those below 32 are slices. Before each, files have its length in four bytes.
_HEVC_SLICES, _HEVC_SKIPPED, _HEVC_LEADING = 32, (8, 9), (6, 7, 8, 9)
_HEVC_OPEN = (16, 17, 18, 21)
_MAX_UNITS = 64


def hidden_packets(codec: str, packets: Iterable[memoryview]) -> frozenset[int]:
    """Return the indexes of packets that show nothing. ``codec`` is FFmpeg's name; other codecs than VP8, VP9 and HEVC
    have none. Packets aren't empty."""
    if codec == "hevc":
        return frozenset(_skipped(packets))
    is_shown = {"vp8": _vp8_is_shown, "vp9": _vp9_is_shown}.get(codec)
    if is_shown is None:
        return frozenset()
    return frozenset(index for index, packet in enumerate(packets) if not is_shown(packet))


def _vp8_is_shown(packet: memoryview) -> bool:
    return bool(packet[0] & 0x10)


def _vp9_is_shown(packet: memoryview) -> bool:
    first = packet[0]
    if packet[-1] & _VP9_SUPERFRAME_MASK == _VP9_SUPERFRAME:
        return True
    # marker (2 bits), profile (2 bits, and a reserved one for profile 3), show_existing_frame, frame_type, show_frame
    bits = first << 1 if first & _VP9_PROFILE_3 == _VP9_PROFILE_3 else first
    return bool(bits & 0b1010)


def _skipped(packets: Iterable[memoryview]) -> list[int]:
    """Return the indexes of the frames that HEVC skips behind an open GOP's first frame, if the file begins with it."""
    skipped = []
    for index, packet in enumerate(packets):
        kind = _hevc_slice(packet)
        if kind not in (_HEVC_LEADING if index else _HEVC_OPEN):
            break
        if kind in _HEVC_SKIPPED:
            skipped.append(index)
    return skipped


def _hevc_slice(packet: memoryview) -> int | None:
    """Return the type of a frame's first slice."""
    start = 0
    for _ in range(_MAX_UNITS):
        if start + 4 >= len(packet):
            break
        kind = packet[start + 4] >> 1 & 0x3F
        if kind < _HEVC_SLICES:
            return kind
        start += 4 + int.from_bytes(packet[start : start + 4], "big")
    return None
