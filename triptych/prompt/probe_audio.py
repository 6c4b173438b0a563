"""Reads an audio file's length, sample rate and channels from its headers, without decoding anything.

Runs in the frontend on untrusted bytes, so it parses only the few fields that it needs, and raises only MediaError.
False information in a header is detected when the file is decoded.
"""

import struct

from triptych.errors import BadMediaSize, TruncatedMedia, UnsupportedMedia
from triptych.media.sound_bounds import MAX_RATE, MIN_RATE, check_sound
from triptych.media.sound_tags import behind_tags
from triptych.prompt.containers.audio_chunks import is_chunked, probe_chunked
from triptych.prompt.containers.audio_frames import probe_amr, probe_frames
from triptych.prompt.containers.flac import probe_flac
from triptych.prompt.containers.known import described
from triptych.prompt.containers.ogg import probe_ogg
from triptych.prompt.probe_video import is_video, probe_audio_track
from triptych.types import AudioHeader

_SUPPORTED = "WAV, AIFF, CAF, AU, FLAC, MP3, AAC, M4A, Ogg, Opus, WebM, Matroska, AMR, AC-3 and DTS are supported"

_CLOCK = 48_000

# What isn't read, by the first bytes: known before frames of MP3 are looked for, which may be in any file.
_OTHERS = {
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "WMA",
    b"MAC ": "Monkey's Audio",
    b"wvpk": "WavPack",
    b"TTA1": "TTA",
    b"tBaK": "TAK",
    b"MPCK": "Musepack",
    b"MP+": "Musepack",
    b"DSD ": "DSF",
    b"FRM8": "DSDIFF",
    b"MThd": "MIDI",
    b".RMF": "RealMedia",
    b"FLV\x01": "FLV",
    b"#EXTM3U": "playlist",
    b"\x00\x00\x01\xba": "MPEG program stream",
    b"%PDF": "PDF",
    b"PK\x03\x04": "ZIP",
    b"\x1f\x8b": "gzip",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"\xff\xd8\xff": "JPEG",
    b"NIST_1A": "SPHERE",
    b"Creative Voice File": "VOC",
    b"\x72\xf8\x1f\x4e": "S/PDIF",
    b"RIFF": "RIFF",
    b"FORM": "IFF",
}


def probe_audio(data: bytes) -> AudioHeader:
    """Return the header of an audio file, or of the first audio track of an MP4 or Matroska file.

    Raises UnsupportedMedia for anything else and for sample rates and channel counts out of bounds. Raises
    TruncatedMedia for a header that ends early, and BadMediaSize for audio without samples; never another exception.
    """
    try:
        header = _probe(data)
    except (struct.error, IndexError, OverflowError):  # the last at sizes of 64 bits
        raise TruncatedMedia("the audio ends within its header") from None
    check_sound(header.rate, header.channels)
    if header.samples < 1:
        raise BadMediaSize("the audio is empty")
    return header


def _probe(data: bytes) -> AudioHeader:
    if not data:
        raise TruncatedMedia("the audio is empty")
    start = behind_tags(data)
    if start:
        data = data[start:]
    if is_chunked(data):
        return probe_chunked(data)
    if data[:4] == b"fLaC":
        return probe_flac(data)
    if data[:4] == b"OggS":
        return probe_ogg(data)
    if data[:5] == b"#!AMR":
        return probe_amr(data)
    if is_video(data):
        return _on_a_usual_clock(probe_audio_track(data))
    for magic, name in _OTHERS.items():
        if data.startswith(magic):
            raise UnsupportedMedia(f"a {name} file, which isn't supported as audio: {_SUPPORTED}")
    header = probe_frames(data)
    if header is None:
        raise UnsupportedMedia(f"not audio of a known format{described(data)}: {_SUPPORTED}")
    return header


def _on_a_usual_clock(track: AudioHeader) -> AudioHeader:
    """Return the header of a track as of a file. Its clock isn't its sample rate, and may be one of nanoseconds."""
    rate = track.rate if MIN_RATE <= track.rate <= MAX_RATE else _CLOCK
    return AudioHeader(track.format, rate, track.channels, track.samples * rate // track.rate)
