"""Tells packets that a decoder shows no frame for from the others, by their first byte. Pure; no decoder is needed.

VP8 and VP9 have frames that are only referenced by later ones. They may be packets of their own.
"""

_VP9_SUPERFRAME, _VP9_SUPERFRAME_MASK = 0xC0, 0xE0
_VP9_PROFILE_3 = 0x30


def is_shown(codec: str, data: bytes | memoryview, start: int, end: int) -> bool:
    """Whether a frame of the packet ``data[start:end]`` is shown. ``codec`` is FFmpeg's name."""
    if start >= end:
        return False
    first = data[start]
    if codec == "vp8":
        return bool(first & 0x10)
    if codec != "vp9" or data[end - 1] & _VP9_SUPERFRAME_MASK == _VP9_SUPERFRAME:
        return True
    # marker (2 bits), profile (2 bits, and a reserved one for profile 3), show_existing_frame, frame_type, show_frame
    bits = first << 1 if first & _VP9_PROFILE_3 == _VP9_PROFILE_3 else first
    return bool(bits & 0b1000 or bits & 0b10)
