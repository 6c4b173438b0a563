"""Reads an audio file's length, sample rate and channels from its header, without decoding anything.

Runs in the frontend on untrusted bytes, so it parses only the few fields that it needs, and raises only MediaError.
False information in a header is detected when the file is decoded.
"""

import struct

from triptych.errors import BadMediaSize, TruncatedMedia
from triptych.media.sound_bounds import check_sound
from triptych.prompt.containers.audio import probe_flac, probe_mp3, probe_ogg, probe_wav
from triptych.types import AudioHeader


def probe_audio(data: bytes) -> AudioHeader:
    """Return the header of a WAV, FLAC, MP3 or Ogg (Vorbis, Opus) file.

    Raises UnsupportedMedia for anything else and for sample rates and channel counts out of bounds. Raises
    TruncatedMedia for a header that ends early, and BadMediaSize for audio without samples; never another exception.
    """
    try:
        header = _probe(data)
    except (struct.error, IndexError):
        raise TruncatedMedia("the audio ends within its header") from None
    check_sound(header.rate, header.channels)
    if header.samples < 1:
        raise BadMediaSize("the audio is empty")
    return header


def _probe(data: bytes) -> AudioHeader:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return probe_wav(data)
    if data[:4] == b"fLaC":
        return probe_flac(data)
    if data[:4] == b"OggS":
        return probe_ogg(data)
    if not data:
        raise TruncatedMedia("the audio is empty")
    return probe_mp3(data, _behind_id3(data))


def _behind_id3(data: bytes) -> int:
    """Return where an ID3v2 tag ends, 0 if there is none. Its size has seven bits in each byte."""
    if data[:3] != b"ID3":
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size
