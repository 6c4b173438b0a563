"""Sound of other programs (``tests/support/writers.py``): as long as PyAV decodes it, and with the same samples."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.sounds import decoded, sound, tone
from tests.support.writers import amr_wb, ffmpeg, made_by, mpeg_layer_1, pcm_wav
from triptych.errors import MediaError, UnsupportedMedia
from triptych.media.audio import decode_audio
from triptych.prompt.probe_audio import probe_audio

pytestmark = pytest.mark.slow

SECONDS = 1.37
FFMPEG = {
    "wav": "pcm_u8 pcm_s16le pcm_s24le pcm_s32le pcm_f32le pcm_f64le pcm_alaw pcm_mulaw adpcm_ms adpcm_ima_wav "
    "adpcm_yamaha g722 g726 libgsm_ms mp2 libmp3lame ac3 dca",
    "w64": "pcm_s16le pcm_s24le pcm_f32le adpcm_ms",
    "aiff": "pcm_s16be pcm_s8 pcm_s24be pcm_s32be pcm_f32be pcm_f64be pcm_mulaw pcm_alaw pcm_s16le adpcm_ima_qt",
    "au": "pcm_s16be pcm_s8 pcm_s24be pcm_f32be pcm_f64be pcm_mulaw pcm_alaw",
    "caf": "pcm_s16le pcm_s24le pcm_f32be pcm_mulaw adpcm_ima_qt alac flac ac3 libgsm libmp3lame",
    "flac": "flac",
    "ogg": "libvorbis libopus flac libspeex vorbis",
    "mp3": "libmp3lame libshine",
    "mp2": "mp2 libtwolame",
    "aac": "aac",
    "ac3": "ac3",
    "eac3": "eac3",
    "dts": "dca",
    "m4a": "aac alac",
    "mp4": "aac alac libopus flac libmp3lame mp2 ac3 eac3 dca libvorbis",
    "mov": "pcm_s16le pcm_s16be pcm_u8 pcm_s24le pcm_s32be pcm_f32le pcm_f64le pcm_alaw pcm_mulaw adpcm_ima_qt "
    "adpcm_ms aac alac ac3 libmp3lame",
    "3gp": "aac",
    "webm": "libopus libvorbis",
    "mka": "aac alac ac3 eac3 dca flac libmp3lame mp2 pcm_s16le pcm_s16be pcm_f32le pcm_u8 pcm_s24le libopus libvorbis",
}
SHAPES = [(8_000, 1), (16_000, 1), (44_100, 2), (48_000, 2), (48_000, 6), (48_000, 8), (96_000, 2)]
"""(samples per second, channels)"""

REFUSED = {
    ("mka", "tta"): "'A_TTA1', which isn't supported",
    ("mka", "wavpack"): "'A_WAVPACK4', which isn't supported",
    ("mka", "adpcm_ms"): "'A_MS/ACM', which isn't supported",
    ("wav", "wmav2"): "the format 353, which isn't supported",
    ("wav", "flac"): "the format 61868, which isn't supported",
    ("au", "g722"): "format 24, which isn't supported",
    ("wv", "wavpack"): "a WavPack file, which isn't supported",
    ("wma", "wmav2"): "a WMA file, which isn't supported",
    ("tta", "tta"): "a TTA file, which isn't supported",
    ("spdif", "ac3"): "a S/PDIF file, which isn't supported",
    ("gsm", "libgsm"): "not audio of a known format",
}

CUTS = {
    "aac": "m4a mka",
    "alac": "m4a mka",
    "libopus": "webm mka ogg",
    "libmp3lame": "mp4 mka mp3",
    "pcm_s16le": "mov wav",
    "ac3": "mka mp4",
    "flac": "mka",
    "libvorbis": "webm",
}
MOVFLAGS = ["faststart", "frag_keyframe+empty_moov", "frag_every_frame+delay_moov", "cmaf", "isml+frag_keyframe"]
SOX = {
    "wav": "ms-adpcm ima-adpcm gsm-full-rate a-law u-law floating-point signed-integer unsigned-integer",
    "aiff": "signed-integer",
    "aifc": "signed-integer a-law u-law floating-point",
    "au": "signed-integer a-law u-law floating-point",
    "caf": "signed-integer a-law u-law floating-point",
    "w64": "signed-integer floating-point a-law u-law ms-adpcm",
    "flac": "signed-integer",
    "ogg": "vorbis",
    "mp3": "mp3",
    "mp2": "mp2",
    "amr-nb": "amr-nb",
}
OPUS = "audio/x-raw,rate=48000 ! opusenc"
GSTREAMER = {
    "wav": "wavenc",
    "wav, mu-law": "mulawenc ! wavenc",
    "aiff": "audio/x-raw,format=S16BE ! aiffmux",
    "flac": "flacenc",
    "ogg, flac": "flacenc ! oggmux",
    "ogg, vorbis": "vorbisenc ! oggmux",
    "ogg, opus": f"{OPUS} ! oggmux",
    "ogg, speex": "speexenc ! oggmux",
    "mp3": "lamemp3enc",
    "mp3, xing": "lamemp3enc ! xingmux",
    "mp3, id3v2": "lamemp3enc ! id3v2mux",
    "mp3, ape": "lamemp3enc ! apev2mux",
    "mp2": "twolamemp2enc",
    "adts": "avenc_aac ! aacparse ! audio/mpeg,stream-format=adts",
    "mp4, aac": "avenc_aac ! aacparse ! mp4mux",
    "mp4, fragments": "avenc_aac ! aacparse ! mp4mux fragment-duration=300",
    "mp4, opus": f"{OPUS} ! mp4mux",
    "mp4, mp3": "lamemp3enc ! mpegaudioparse ! mp4mux",
    "mp4, ac3": "avenc_ac3 ! ac3parse ! mp4mux",
    "mov, aac": "avenc_aac ! aacparse ! qtmux",
    "mov, pcm": "qtmux",
    "mov, alac": "avenc_alac ! qtmux",
    "3gp, amr": "audio/x-raw,rate=8000,channels=1 ! amrnbenc ! 3gppmux",
    "mka, aac": "avenc_aac ! aacparse ! matroskamux",
    "mka, pcm": "matroskamux",
    "mka, flac": "flacenc ! flacparse ! matroskamux",
    "webm, opus": f"{OPUS} ! webmmux",
    "webm, opus, streamed": f"{OPUS} ! webmmux streamable=true",
    "webm, vorbis": "vorbisenc ! webmmux",
    "ac3": "avenc_ac3",
    "eac3": "avenc_eac3",
}


def source(folder: Path, rate: int = 48_000, channels: int = 2) -> str:
    """Write a WAV file and return its path."""
    made = folder / "source.wav"
    made.write_bytes(sound("wav", tone(SECONDS, rate, channels), rate))
    return str(made)


def assert_same(data: bytes, tolerance: float = 0.0015) -> None:
    """The plan has PyAV's length, and the samples are PyAV's."""
    expected, rate = decoded(data)
    header = probe_audio(data)
    assert header.seconds == pytest.approx(len(expected) / rate, abs=tolerance)
    samples = decode_audio(data, header, rate)
    common = min(len(samples), len(expected))
    np.testing.assert_allclose(samples[:common], expected[:common], atol=1e-6)


def tolerance(container: str, codec: str) -> float:
    """Seconds by which a plan may differ: FFmpeg leaves out a first packet of Vorbis, and what some writers declare
    wrongly of codecs with a priming or with whole blocks."""
    if "vorbis" in codec:
        return 0.033
    return {("mov", "adpcm_ms"): 0.02, ("mp4", "libopus"): 0.006, ("mka", "alac"): 0.006}.get(
        (container, codec), 0.0025
    )


@pytest.mark.parametrize(("container", "codec"), [(name, codec) for name in FFMPEG for codec in FFMPEG[name].split()])
def test_sound_of_ffmpeg(tmp_path: Path, container: str, codec: str) -> None:
    written = 0
    for rate, channels in SHAPES:
        if codec.startswith(("adpcm", "g72", "libshine")) and channels > 2:
            continue
        try:
            data = ffmpeg(
                tmp_path / f"made.{container}", "-i", source(tmp_path, rate, channels), "-c:a", codec, "-strict", "-2"
            )
        except pytest.skip.Exception:
            continue
        if data:
            written += 1
            assert_same(data, tolerance(container, codec))
    if not written:
        pytest.skip("the encoder is missing")


@pytest.mark.parametrize(("container", "codec"), REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, container: str, codec: str) -> None:
    rate, channels = (8_000, 1) if codec == "libgsm" else (16_000, 1) if codec == "g722" else (48_000, 2)
    data = ffmpeg(
        tmp_path / f"made.{container}", "-i", source(tmp_path, rate, channels), "-c:a", codec, "-strict", "-2"
    )
    with pytest.raises(UnsupportedMedia, match=REFUSED[container, codec]):
        probe_audio(data)


@pytest.mark.parametrize("options", ["-ss 0.2", "-ss 0.777", "-ss 0.2 -t 0.5", "-itsoffset 0.6"])
@pytest.mark.parametrize(("codec", "container"), [(codec, name) for codec in CUTS for name in CUTS[codec].split()])
def test_sound_that_is_cut_or_begins_later(tmp_path: Path, codec: str, container: str, options: str) -> None:
    whole = tmp_path / f"whole.{container}"
    ffmpeg(whole, "-i", source(tmp_path), "-c:a", codec)
    data = ffmpeg(tmp_path / f"cut.{container}", *options.split(), "-i", str(whole), "-c", "copy")
    assert_same(data, tolerance(container, codec))


@pytest.mark.parametrize("flags", MOVFLAGS)
@pytest.mark.parametrize("codec", ["aac", "alac", "libopus", "flac"])
def test_headers_of_mp4(tmp_path: Path, codec: str, flags: str) -> None:
    options = ["-i", source(tmp_path), "-c:a", codec, "-strict", "-2"]
    assert_same(ffmpeg(tmp_path / "made.mp4", *options, "-movflags", flags))
    assert_same(ffmpeg(tmp_path / "made.mp4", *options, "-frag_duration", "300000"))


@pytest.mark.parametrize("samples", [2049, 4097, 9001])
@pytest.mark.parametrize(
    ("codec", "container"),
    [("flac", "mka"), ("flac", "flac"), ("aac", "m4a"), ("libmp3lame", "mp3"), ("libopus", "ogg"), ("alac", "caf")],
)
def test_short_sound(tmp_path: Path, codec: str, container: str, samples: int) -> None:
    options = ["-i", source(tmp_path), "-af", f"atrim=end_sample={samples}", "-c:a", codec]
    assert_same(ffmpeg(tmp_path / f"made.{container}", *options))


@pytest.mark.parametrize(("container", "encoding"), [(name, kind) for name in SOX for kind in SOX[name].split()])
def test_sound_of_sox(tmp_path: Path, container: str, encoding: str) -> None:
    rate, channels = (8_000, 1) if encoding in ("gsm-full-rate", "amr-nb") else (44_100, 2)
    options = [] if encoding in ("vorbis", "mp3", "mp2", "amr-nb") else ["-e", encoding]
    options += {"floating-point": ["-b", "32"], "unsigned-integer": ["-b", "8"]}.get(encoding, [])
    made = tmp_path / f"made.{container}"
    assert_same(made_by(made, "sox", source(tmp_path, rate, channels), *options, str(made)), tolerance("", encoding))


@pytest.mark.parametrize("name", GSTREAMER)
def test_sound_of_gstreamer(tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    chain = f"wavparse ! audioconvert ! audioresample ! {GSTREAMER[name]} ! filesink location={made}"
    data = made_by(made, "gst-launch-1.0", "-q", "filesrc", f"location={source(tmp_path, 44_100)}", "!", *chain.split())
    # its last frame of MP2 isn't whole, and its Opus in MP4 declares a wrong delay
    assert_same(data, {"mp2": 0.027, "mp4, opus": 0.007}.get(name, tolerance("", name)))


@pytest.mark.parametrize("container", ["amr", "3gp", "mov"])
def test_wideband_amr(tmp_path: Path, container: str) -> None:
    plain = tmp_path / "plain.amr"
    plain.write_bytes(amr_wb(tone(SECONDS, 16_000)[0]))
    copied = tmp_path / f"made.{container}"
    assert_same(plain.read_bytes() if container == "amr" else ffmpeg(copied, "-i", str(plain), "-c", "copy"))


@pytest.mark.parametrize("container", ["mp3", "mka"])
def test_mpeg_audio_of_layer_1(tmp_path: Path, container: str) -> None:
    plain = tmp_path / "plain.mp3"
    plain.write_bytes(mpeg_layer_1(60))
    copied = tmp_path / f"made.{container}"
    assert_same(plain.read_bytes() if container == "mp3" else ffmpeg(copied, "-i", str(plain), "-c", "copy"))


@pytest.mark.parametrize("how", ["plain", "swapped", "S/PDIF"])
def test_dts_in_wav_files_marked_as_pcm(tmp_path: Path, how: str) -> None:
    """FFmpeg finds it; a player of PCM would play noise. Such files have as many bits as PCM of their length."""
    rate = 48_000 if how == "S/PDIF" else 44_100
    options = ["-i", source(tmp_path, rate), "-c:a", "dca", "-strict", "-2"]
    options += ["-f", "spdif"] if how == "S/PDIF" else []
    data = ffmpeg(tmp_path / "made.dts", *options)
    if how == "swapped":
        data = np.frombuffer(data[: len(data) // 2 * 2], np.uint16).byteswap().tobytes()
    assert_same(pcm_wav(data, rate), 0.012)


@pytest.mark.parametrize("mode", ["always", "auto"])
def test_rf64(tmp_path: Path, mode: str) -> None:
    assert_same(ffmpeg(tmp_path / "made.wav", "-i", source(tmp_path), "-rf64", mode))


@pytest.mark.parametrize("container", ["mp3", "flac", "m4a", "ogg", "webm", "mka", "wav", "aac", "ac3", "caf", "aiff"])
def test_damaged_tails(tmp_path: Path, container: str) -> None:
    """A file whose end is damaged or cut off is used as far as PyAV decodes it, or refused."""
    whole = ffmpeg(tmp_path / f"made.{container}", "-i", source(tmp_path))
    for data in (whole[:-1], whole[:-40], whole[:-40] + bytes(40), whole + bytes(1000), whole[: len(whole) * 9 // 10]):
        try:
            header = probe_audio(data)
            samples = decode_audio(data, header, 48_000)
        except MediaError:
            continue
        expected, _ = decoded(data)
        assert len(samples) == pytest.approx(len(expected), abs=0.1 * 48_000)
