"""Media files of other programs and damaged ones, compared with PyAV's and Pillow's own decoding.

Other programs write them (``tests/support/writers.py``).
"""

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.support.clips import clip
from tests.support.image_cases import picture
from tests.support.sounds import tone
from tests.support.tiny import TINY, write_settings
from tests.support.writers import ffmpeg, made_by
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.encode.workers import PreprocessWorkers
from triptych.errors import MediaError, UnsupportedMedia
from triptych.media.video import decode_frames
from triptych.models.base import Planner
from triptych.models.registry import FAMILIES, resolve
from triptych.models.shared.images import decode_image
from triptych.prompt.caps import MediaBudget, MediaCaps, VideoLimits
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_video import probe_video
from triptych.sandbox.protocol import Limits
from triptych.types import ImageHeader, MediaHeader

SOURCE = ["-f", "lavfi", "-i", "testsrc2=s=96x64:r=25:d=1.6"]
SOUND = ["-f", "lavfi", "-i", "sine=d=2"]
CODECS = {
    "h264": ["-c:v", "libx264", "-g", "12", "-bf", "2"],
    "hevc": ["-c:v", "libx265", "-x265-params", "keyint=10:min-keyint=10:bframes=3:open-gop=0:log-level=error"],
    "vp8": ["-c:v", "libvpx", "-auto-alt-ref", "1", "-lag-in-frames", "12", "-b:v", "200k"],
    "vp9": ["-c:v", "libvpx-vp9", "-cpu-used", "8", "-lag-in-frames", "12"],
    "av1": ["-c:v", "libsvtav1", "-preset", "12"],
}
OPTIONS = {
    "plain": [],
    "odd sides": ["-vf", "scale=95:61", "-pix_fmt", "yuv444p"],
    "10 bits": ["-pix_fmt", "yuv420p10le"],
    "uneven": ["-vf", "select='not(mod(n,3))+eq(n,4)'", "-fps_mode", "vfr"],
    "longer sound": ["-shortest"],
    "fields": ["-flags", "+ildct+ilme"],
    "all keyframes": ["-g", "1"],
    "4:2:2": ["-pix_fmt", "yuv422p"],
    "grey": ["-pix_fmt", "gray"],
    "transparent": ["-pix_fmt", "yuva420p", "-auto-alt-ref", "0"],
    "full range": ["-vf", "scale=out_range=pc", "-color_range", "pc"],
    "HDR": [
        "-pix_fmt",
        "yuv420p10le",
        "-colorspace",
        "bt2020nc",
        "-color_primaries",
        "bt2020",
        "-color_trc",
        "smpte2084",
    ],
    "wide pixels": ["-vf", "setsar=2"],
    "one frame": ["-frames:v", "1"],
    "29.97 a second": ["-r", "30000/1001"],
    "240 a second": ["-r", "240"],
    "one in two seconds": ["-r", "0.5"],
}
CONTAINERS = {
    "mp4": ("h264", "hevc", "vp9", "av1"),
    "mov": ("h264", "hevc"),
    "mkv": ("h264", "hevc", "vp8", "vp9", "av1"),
    "webm": ("vp8", "vp9", "av1"),
}
PIXELS = {
    "h264": ("odd sides", "10 bits", "4:2:2", "grey", "HDR"),
    "hevc": ("odd sides", "10 bits", "4:2:2", "grey", "HDR"),
    "vp8": ("transparent",),
    "vp9": ("odd sides", "10 bits", "4:2:2", "transparent", "HDR"),
    "av1": ("10 bits", "HDR"),
}
"""The options by which the encoders write other pixels than usual ones."""
FFMPEG = [
    (container, codec, option)
    for container, codecs in CONTAINERS.items()
    for codec in codecs
    for option in OPTIONS
    if option in PIXELS[codec] or option not in ("odd sides", "10 bits", "4:2:2", "grey", "transparent", "HDR")
    if option != "fields" or codec == "h264"
]
REFUSED = {
    "mp4": "mpeg4 mpeg2video mpeg1video mjpeg png jpeg2000",
    "mov": "mpeg4 mjpeg prores prores_ks png qtrle rawvideo v210 h263 cinepak svq1 jpeg2000 ffv1 hap r210",
    "3gp": "mpeg4 h263",
    "mkv": "mpeg4 mpeg2video mjpeg prores libtheora msmpeg4v3 msmpeg4v2 wmv1 wmv2 ffv1 huffyuv ffvhuff utvideo "
    "rawvideo flv1 h263p snow png magicyuv",
}
MOVFLAGS = [
    "faststart",
    "isml+frag_keyframe",
    "frag_keyframe+empty_moov",
    "frag_every_frame+delay_moov",
    "negative_cts_offsets",
    "cmaf",
]
GSTREAMER = {
    "matroska": "x264enc ! matroskamux",
    "mp4": "x264enc ! mp4mux",
    "mov": "x264enc ! qtmux",
    "fragments": "x264enc ! mp4mux fragment-duration=400",
    "webm, hidden frames": "vp8enc auto-alt-ref=true lag-in-frames=10 ! webmmux",
    "webm, streamed": "vp9enc ! webmmux streamable=true",
}
AVIF = {
    "turned": ["--irot", "1"],
    "mirrored": ["--imir", "0"],
    "turned, mirrored": ["--irot", "3", "--imir", "1"],
    "cropped": ["--clap", "48,1,32,1,0,1,0,1"],
    "wide pixels": ["--pasp", "2,1"],
    "10 bits": ["-d", "10"],
    "12 bits": ["-d", "12"],
    "lossless": ["-l"],
    "grey": ["-y", "400"],
}


def shown(data: bytes) -> list[NDArray[np.uint8]]:
    """Every frame of the first stream, turned as FFmpeg says."""
    with av.open(io.BytesIO(data), "r") as file:
        return [np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90) for frame in file.decode(video=0)]


def assert_same(data: bytes) -> None:
    """The plan has the frames that a full decoding shows, and those that are decoded alone are equal to them."""
    whole = shown(data)
    header = probe_video(data)
    assert header.frames == len(whole)
    source = random.Random(len(data))
    for numbers in [range(len(whole)), sorted(source.choices(range(len(whole)), k=5))]:
        for number, frame in zip(numbers, decode_frames(data, header, numbers), strict=True):
            np.testing.assert_array_equal(frame, whole[number])


@pytest.mark.slow
@pytest.mark.parametrize(("container", "codec", "option"), FFMPEG)
def test_videos_of_ffmpeg(tmp_path: Path, container: str, codec: str, option: str) -> None:
    sound = SOUND if option == "longer sound" else []
    assert_same(ffmpeg(tmp_path / f"made.{container}", *SOURCE, *sound, *CODECS[codec], *OPTIONS[option]))


@pytest.mark.slow
@pytest.mark.parametrize("flags", MOVFLAGS)
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_mp4_files_of_ffmpeg(tmp_path: Path, codec: str, flags: str) -> None:
    assert_same(ffmpeg(tmp_path / "made.mp4", *SOURCE, *SOUND, *CODECS[codec], "-movflags", flags))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["-frag_duration 300000", "-frag_size 3000", "-itsoffset 0.7", "-ss 0.3"])
@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_headers_with_fragments_and_offsets(tmp_path: Path, codec: str, options: str) -> None:
    option = options.split()
    inputs, outputs = (option, []) if option[0] in ("-itsoffset", "-ss") else ([], option)
    assert_same(ffmpeg(tmp_path / "made.mp4", *inputs, *SOURCE, *CODECS[codec], *outputs))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", ["90", "180", "270"])
@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_turned_videos(tmp_path: Path, container: str, degrees: str) -> None:
    ffmpeg(tmp_path / "whole.mp4", *SOURCE, *CODECS["h264"], "-metadata:s:v:0", f"rotate={degrees}")
    turned = ["-i", str(tmp_path / "whole.mp4"), "-c", "copy", "-metadata:s:v:0", f"rotate={degrees}"]
    data = ffmpeg(tmp_path / f"turned.{container}", *turned)
    with av.open(io.BytesIO(data), "r") as file:
        rotation = next(file.decode(video=0)).rotation
    assert probe_video(data).rotation == -rotation % 360 != 0
    assert_same(data)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["0.1", "0.37", "0.9"])
@pytest.mark.parametrize(("codec", "container"), [("h264", "mp4"), ("h264", "mkv"), ("hevc", "mov"), ("vp9", "webm")])
def test_trimmed_videos(tmp_path: Path, codec: str, container: str, start: str) -> None:
    """As ``ffmpeg -ss -c copy`` and phones trim."""
    ffmpeg(tmp_path / f"whole.{container}", *SOURCE, *CODECS[codec])
    cut = ["-ss", start, "-t", "0.6", "-i", str(tmp_path / f"whole.{container}"), "-c", "copy"]
    assert_same(ffmpeg(tmp_path / f"cut.{container}", *cut))


@pytest.mark.slow
def test_hevc_cut_at_an_open_gop(tmp_path: Path) -> None:
    options = "keyint=10:min-keyint=10:bframes=4:open-gop=1:scenecut=0:log-level=error"
    ffmpeg(tmp_path / "whole.mkv", *SOURCE, "-c:v", "libx265", "-x265-params", options)
    assert_same(ffmpeg(tmp_path / "cut.mkv", "-ss", "0.9", "-i", str(tmp_path / "whole.mkv"), "-c", "copy"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--compression", "0:zlib"], ["--enable-durations", "--cluster-length", "5"]])
@pytest.mark.parametrize("codec", ["h264", "vp8"])
def test_videos_of_mkvmerge(tmp_path: Path, codec: str, options: list[str]) -> None:
    ffmpeg(tmp_path / "whole.mkv", *SOURCE, *SOUND, *CODECS[codec])
    made = tmp_path / "made.mkv"
    assert_same(made_by(made, "mkvmerge", "-q", "-o", str(made), *options, str(tmp_path / "whole.mkv")))


@pytest.mark.slow
@pytest.mark.parametrize("name", GSTREAMER)
def test_videos_of_gstreamer(tmp_path: Path, name: str) -> None:
    pipeline = f"videotestsrc num-buffers=40 ! video/x-raw,width=96,height=64 ! {GSTREAMER[name]} ! filesink"
    assert_same(made_by(tmp_path / "made", "gst-launch-1.0", "-q", *pipeline.split(), f"location={tmp_path / 'made'}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", AVIF)
def test_images_of_avifenc(tmp_path: Path, name: str) -> None:
    picture(96, 64, 1).save(tmp_path / "picture.png")
    made = tmp_path / "made.avif"
    data = made_by(made, "avifenc", "-s", "10", *AVIF[name], str(tmp_path / "picture.png"), str(made))
    header = probe_image(data)
    with Image.open(io.BytesIO(data)) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    np.testing.assert_array_equal(decode_image(data, "AVIF", (header.width, header.height)), expected)


@pytest.mark.parametrize("container", ["avi", "mpegts", "flv", "asf", "mxf", "ivf"])
def test_other_containers_are_named(container: str) -> None:
    codec = {"ivf": "libvpx", "mxf": "mpeg2video"}.get(container, "libx264")
    data = clip(container, frames=4, codec=codec, rate=25)
    with pytest.raises(UnsupportedMedia, match=r"animated GIF video: it is an? (AVI|MPEG|FLV|Windows|MXF|IVF)"):
        probe_video(data)


@pytest.mark.slow
@pytest.mark.parametrize(("container", "codec"), [(name, codec) for name in REFUSED for codec in REFUSED[name].split()])
def test_other_codecs_are_named(tmp_path: Path, container: str, codec: str) -> None:
    size = ["-s", "128x96"] if codec == "h263" else []
    data = ffmpeg(tmp_path / f"made.{container}", *SOURCE, *size, "-c:v", codec, "-strict", "-2")
    with pytest.raises(UnsupportedMedia, match=r"is encoded as '[^']+', which isn't supported"):
        probe_video(data)


# ── damaged files, through the workers ───────────────────────────────────────────────────────────────────────────


FAMILY = "qwen2_vl"


def encoded(name: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture(90, 70, 3).save(out, name, **options)
    return out.getvalue()


IMAGES = {
    **{name: encoded(name) for name in ("PNG", "WEBP", "GIF", "BMP", "AVIF")},
    "JPEG": encoded("JPEG"),
    "JPEG, progressive": encoded("JPEG", progressive=True),
}
VIDEOS: dict[str, Callable[[], bytes]] = {
    "MP4": lambda: clip("mp4", frames=20, options={"movflags": "faststart"}),
    "MP4, fragments": lambda: clip("mp4", frames=20, options={"movflags": "frag_keyframe+empty_moov"}),
    "MP4, VP9": lambda: clip("mp4", frames=20, codec="libvpx-vp9"),
    "MP4, HEVC": lambda: clip(
        "mp4", frames=20, codec="libx265", codec_options={"x265-params": "log-level=none:pools=1"}
    ),
    "Matroska": lambda: clip("matroska", frames=20, codec="libx264"),
    "WebM": lambda: clip("webm", frames=20, sound=tone(2.2, 48_000)),
    "WebM, VP8": lambda: clip("webm", frames=20, codec="libvpx"),
    "WebM, recorded": lambda: clip("webm", frames=20, options={"live": "1"}),
    "GIF": lambda: clip("gif", frames=10),
}


def mutated(data: bytes, source: random.Random) -> bytes:
    """Flip, overwrite, remove or repeat some bytes, more often near the file's ends; or cut the file."""
    made = bytearray(data)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(min(source.choice([64, 1024, len(made)]), len(made)))
        place = place if source.random() < 0.7 else len(made) - 1 - place
        how = source.randrange(5)
        if how == 0:
            made[place] ^= 1 << source.randrange(8)
        elif how == 1:
            made[place] = source.choice([0, 255, source.randrange(256)])
        elif how == 2:
            made[place : place + 4] = source.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", source.randbytes(4)])
        elif how == 3:
            del made[place : place + source.randint(1, 64)]
        else:
            made[place:place] = made[place : place + source.randint(1, 64)]
        made = made or bytearray(b"\0")
    return bytes(made[: source.choice([len(made), len(made), source.randrange(len(made)) + 1])])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_settings(folder, TINY[FAMILY])
    return folder


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    made: Planner = resolve(FAMILIES[FAMILY].planner)(
        load_config(folder), load_preprocessor_config(folder), load_video_config(folder)
    )
    return made


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[PreprocessWorkers]:
    made = PreprocessWorkers(folder, 1, Limits())
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.close()


def assert_survives(
    workers: PreprocessWorkers, planner: Planner, data: bytes, probe: Callable[[bytes], MediaHeader]
) -> None:
    """The file is used as planned or refused by a typed error, and the worker lives on."""
    pids = workers.pids
    try:
        header = probe(data)
        MediaBudget(MediaCaps(pixels=10**6, video=VideoLimits(gigapixels=0.01))).add_header(header)
        plan = planner.plan(header)
        made = list(workers(data, plan))
        assert sum(len(part.patches) for part in made) == plan.patches
        assert isinstance(header, ImageHeader) or len(made) == len(plan.parts)
    except MediaError:
        pass
    assert workers.pids == pids, "the worker crashed"


@pytest.mark.parametrize("number", [3, pytest.param(1500, marks=pytest.mark.slow)])
def test_mutated_images_do_not_crash_a_worker(workers: PreprocessWorkers, planner: Planner, number: int) -> None:
    source = random.Random(number)
    for data in IMAGES.values():
        for _ in range(number):
            assert_survives(workers, planner, mutated(data, source), probe_image)


@pytest.mark.parametrize(
    ("kinds", "number"), [(("MP4", "WebM"), 2), pytest.param(tuple(VIDEOS), 1100, marks=pytest.mark.slow)]
)
def test_mutated_videos_do_not_crash_a_worker(
    workers: PreprocessWorkers, planner: Planner, kinds: tuple[str, ...], number: int
) -> None:
    source = random.Random(number)
    for kind in kinds:
        data = VIDEOS[kind]()
        for _ in range(number):
            assert_survives(workers, planner, mutated(data, source), probe_video)
