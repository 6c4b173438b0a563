"""Audio files of every container and codec that can be written here: planned and decoded as PyAV decodes them."""

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support import sandbox_handlers as handlers
from tests.support.mp4_edits import with_edits
from tests.support.sounds import decoded, sound, tone
from triptych.errors import DecodeFailed, MediaError, TruncatedMedia, UnsupportedMedia
from triptych.media.audio import decode_audio
from triptych.prompt.probe_audio import probe_audio
from triptych.sandbox.protocol import Limits, WorkerSpec
from triptych.sandbox.workers import WorkerPool

RATE = 16_000

CODECS = {
    "wav": "pcm_u8 pcm_s16le pcm_s24le pcm_f64le pcm_alaw adpcm_ms adpcm_ima_wav adpcm_yamaha mp2 libmp3lame ac3",
    "w64": "pcm_s16le",
    "aiff": "pcm_s16be pcm_s8 pcm_s24be pcm_f32be pcm_mulaw adpcm_ima_qt",
    "au": "pcm_s16be pcm_mulaw pcm_f32be",
    "caf": "pcm_s24le pcm_mulaw adpcm_ima_qt alac flac",
    "flac": "flac",
    "ogg": "libopus vorbis flac",
    "mp3": "libmp3lame",
    "mp2": "mp2",
    "adts": "aac",
    "ac3": "ac3",
    "eac3": "eac3",
    "amr": "libopencore_amrnb",
    "ipod": "aac alac",
    "mp4": "aac alac libopus flac libmp3lame ac3 eac3 mp2 vorbis",
    "mov": "pcm_s16le pcm_s24be pcm_f64be pcm_mulaw adpcm_ima_qt",
    "webm": "libopus vorbis",
    "matroska": "aac alac ac3 eac3 flac libmp3lame mp2 pcm_s16le pcm_f32le libopus vorbis",
}
MATRIX = [(container, codec) for container, codecs in CODECS.items() for codec in codecs.split()]


def made(container: str, codec: str, seconds: float = 0.73) -> bytes:
    rate, channels = (8_000, 1) if codec == "libopencore_amrnb" else (48_000, 2)
    return sound(container, tone(seconds, rate, channels), rate, codec)


@pytest.mark.parametrize(("container", "codec"), MATRIX)
def test_files_are_planned_and_decoded_as_pyav_decodes_them(container: str, codec: str) -> None:
    data = made(container, codec, 0.31)
    expected, rate = decoded(data)
    header = probe_audio(data)
    # Matroska's times are milliseconds, and a page of Vorbis may end within a packet
    assert header.seconds == pytest.approx(len(expected) / rate, abs=0.0201 if codec == "vorbis" else 0.0015)
    samples = decode_audio(data, header, rate)
    common = min(len(samples), len(expected))
    np.testing.assert_array_equal(samples[:common], expected[:common])


STEREO = tone(1.1, 48_000, 2)
FRAGMENTED = {"frag_duration": "300000"}
"""The first ones are in the header, the others behind it."""
ODD_FILES = {
    "header and fragments": lambda: sound("mp4", STEREO, 48_000, "aac", FRAGMENTED),
    "header and fragments, ALAC": lambda: sound("mp4", STEREO, 48_000, "alac", FRAGMENTED),
    "fragments, AAC": lambda: sound("mp4", STEREO, 48_000, "aac", {"movflags": "empty_moov+frag_keyframe"}),
    "fragments and an edit": lambda: sound("mp4", STEREO, 48_000, "aac", {"movflags": "delay_moov+frag_every_frame"}),
    "fragments, Opus": lambda: sound("mp4", STEREO, 48_000, "libopus", {"movflags": "empty_moov+frag_keyframe"}),
    "one packet of FLAC": lambda: sound("matroska", tone(0.06, 48_000, 2), 48_000, "flac"),
    "ALAC of whole packets": lambda: without_remainder(sound("caf", STEREO, 48_000, "alac")),
    "MP3 of half packets": lambda: without_remainder(sound("caf", tone(1.1, 16_000), 16_000, "libmp3lame")),
}


def without_remainder(data: bytes) -> bytes:
    """Declare all packets of a CAF file as whole, as FFmpeg 5 does."""
    description, table = data.index(b"desc") + 12, data.index(b"pakt") + 12
    (of_packet,) = struct.unpack_from(">L", data, description + 20)
    (packets,) = struct.unpack_from(">q", data, table)
    return data[: table + 8] + struct.pack(">qLL", packets * of_packet, 0, 0) + data[table + 24 :]


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_files_are_as_long_as_pyav_decodes_them(name: str) -> None:
    data = ODD_FILES[name]()
    expected, rate = decoded(data)
    header = probe_audio(data)
    assert header.seconds == pytest.approx(len(expected) / rate, abs=0.0015)
    samples = decode_audio(data, header, rate)
    common = min(len(samples), len(expected))
    np.testing.assert_array_equal(samples[:common], expected[:common])


EDITS = {
    "all": [(60_000, 0)],
    "a part": [(300, 5000)],
    "begins with a pause": [(200, -1), (300, 5000)],
    "two parts": [(200, 4096), (200, 20_000)],
    "two parts, backwards": [(200, 20_000), (200, 4096)],
    "the same twice": [(200, 8192), (200, 8192)],
}


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "aac"), ("mp4", "alac"), ("mp4", "ac3"), ("mov", "pcm_s16le")]
)
def test_edit_lists_hide_sound_as_in_ffmpeg(container: str, codec: str) -> None:
    whole = made(container, codec)
    for name, edits in EDITS.items():
        data = with_edits(whole, edits)
        expected, rate = decoded(data)
        header = probe_audio(data)
        # FFmpeg ends each edit of uncompressed sound behind 1,024 samples
        tolerance = 0.0214 * len(edits) if container == "mov" else 0.0015
        assert header.seconds == pytest.approx(len(expected) / rate, abs=tolerance), name
        samples = decode_audio(data, header, rate)
        common = min(len(samples), len(expected))
        np.testing.assert_array_equal(samples[:common], expected[:common], err_msg=name)


MP3, FLAC, OPUS = made("mp3", "libmp3lame"), made("flac", "flac"), made("ogg", "libopus")
MONO = sound("mp3", tone(0.73, 48_000), 48_000)
JUNK = random.Random(0).randbytes(3000)
ID3 = b"ID3\x03\x00\x00" + bytes([0, 7, 0, 0]) + bytes(7 << 14)
APE = struct.pack("<8sLLLL8x", b"APETAGEX", 2000, 2000, 0, 1 << 31 | 1 << 29) + bytes(2000)


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (MP3 + b"\n", 0.73),
        (MP3 + b"\xff", 0.73),
        (MP3 + b"TAG" + bytes(125), 0.73),
        (MP3 + bytes(150_000), 0.78),  # with the encoder's padding, as its table doesn't fit
        (MP3 + APE, 0.78),
        (JUNK + MP3, 0.73),
        (ID3 + ID3 + MP3, 0.73),
        (MP3 + MP3, 1.56),
        (MONO + MP3 + MONO, 2.33),
        (MP3[:5000] + JUNK + MP3[5000:], 0.73),
        (made("adts", "aac")[:3000] + JUNK + made("adts", "aac")[3000:], 0.77),
        (ID3 + FLAC, 0.73),
        (ID3 + made("wav", "pcm_s16le"), 0.73),
        (APE + made("aiff", "pcm_s16be"), 0.73),
        (ID3 + made("webm", "libopus"), 0.73),
        (FLAC[:21] + (int.from_bytes(FLAC[21:26]) & ~((1 << 36) - 1)).to_bytes(5) + FLAC[26:], 0.73),
        (OPUS + made("ogg", "libopus"), 1.46),
        (OPUS + OPUS, 0.73),
        (OPUS + JUNK, 0.73),
        (made("amr", "libopencore_amrnb") + b"\n", 0.74),
        (made("wav", "pcm_s16le")[:-400], 0.73),  # a size that counts headers, too
    ],
)
def test_what_is_around_and_between_frames_does_not_matter(data: bytes, seconds: float) -> None:
    header = probe_audio(data)
    assert header.seconds == pytest.approx(seconds, abs=0.06)
    samples = decode_audio(data, header, RATE)
    assert np.abs(samples[2000:-2000]).max() > 0.1


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (MP3[: len(MP3) * 2 // 3], TruncatedMedia, "MP3 audio ends after"),
        (bytes.fromhex("3026b2758e66cf11") + JUNK, UnsupportedMedia, "a WMA file.*FLAC.* are supported"),
        (b"wvpk" + MP3, UnsupportedMedia, "a WavPack file"),
        (b"RIFF" + bytes(4) + b"AVI " + MP3, UnsupportedMedia, "a RIFF file"),
        (b"#!AMR_MC1.0\n" + bytes(99), UnsupportedMedia, "several channels"),
        (made("w64", "pcm_s16le")[:56] + b"\xff" * 8 + bytes(40), TruncatedMedia, "ends within its header"),
        (JUNK * 100, UnsupportedMedia, "not audio of a known format: WAV"),
        (
            bytes.fromhex("47") + bytes(187) + bytes.fromhex("47") + bytes(999),
            UnsupportedMedia,
            "transport stream: WAV",
        ),
    ],
)
def test_other_files_are_refused_with_what_is_supported(data: bytes, error: type[MediaError], match: str) -> None:
    with pytest.raises(error, match=match):
        probe_audio(data)


def test_a_codec_without_a_decoder_is_refused() -> None:
    data = made("caf", "pcm_s24le").replace(b"lpcm", b"xxxx")
    with pytest.raises(UnsupportedMedia, match="unknown way"):
        decode_audio(data, probe_audio(data), RATE)


def mutated(data: bytes, source: random.Random) -> bytes:
    """Return the file with some bits flipped, bytes repeated, or its end cut off."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 6)):
        place = source.randrange(min(len(changed), source.choice([64, 1024, len(changed)])))
        changed[place] ^= source.choice([1 << source.randrange(8), 0xFF])
    if source.random() < 0.2:
        place = source.randrange(len(changed))
        changed[place:place] = changed[max(0, place - 200) : place]
    return bytes(changed[: source.choice([len(changed), len(changed), source.randrange(len(changed))])])


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    limits = Limits(memory_bytes=2**30, output_bytes=2**20, seconds=30.0)
    made = WorkerPool(WorkerSpec(f"{handlers.__name__}:obedient", "", limits), 1, DecodeFailed)
    made.wait_until_ready()
    yield made
    made.close()


@pytest.mark.parametrize(("container", "codec"), [("aiff", "pcm_s16be"), ("caf", "pcm_s16le")])
def test_channels_in_an_order_of_the_file_do_not_end_a_worker(workers: WorkerPool, container: str, codec: str) -> None:
    """Of which FFmpeg allocates a table."""
    before = workers.pids
    data = sound(container, tone(0.5, 48_000, 8), 48_000, codec)
    for _ in range(3):
        assert list(workers.results(b"hear", data))
    assert workers.pids == before


@pytest.mark.parametrize("times", [1, pytest.param(150, marks=pytest.mark.slow)])
def test_mutated_files_never_end_a_worker(workers: WorkerPool, times: int) -> None:
    source = random.Random(times)
    before = workers.pids
    for container, codec in MATRIX:
        data = made(container, codec, 0.2)
        for _ in range(times):
            try:
                assert list(workers.results(b"hear", mutated(data, source)))
            except DecodeFailed as error:
                assert "longer" in str(error) or "memory" in str(error), (container, codec)
                before = workers.pids
            except MediaError:
                continue
    assert workers.pids == before
