"""Planning and preprocessing of media with one thread, compared with transformers' processors on the same machine.

    python -m bench.preprocess --reference DIR/bin/python --out bench/results/preprocess.json

Inputs are a 2000 × 2000 JPEG, 30 s of 720p video (H.264, 30 frames per second, sampled at two) and 30 s of audio (MP3),
each from file to encoder input. Planning is measured separately, also for a video of hours. ``--reference`` names the
Python of an environment with torchvision (see ``tests/models/golden/make_videos.py``); without it, transformers' video
processor isn't measured. Both sides run in separate processes, alternately.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZE = {"shortest_edge": 4096, "longest_edge": 25165824}
IMAGE_SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
STATISTICS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
CONFIG: dict[str, Any] = {
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "text_config": {"max_position_embeddings": 262144},
    "vision_config": {
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 1152,
        "intermediate_size": 4304,
    },
}
FILES = {"image": "picture.jpg", "video": "clip.mp4", "audio": "sound.mp3"}
RATE = 16_000


def make_files(folder: Path, seconds: int, side: int, height: int, long_frames: int) -> None:
    """Create the input files. The long video has tiny frames."""
    from PIL import Image

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    Image.fromarray(blocks).resize((side, side), Image.Resampling.BICUBIC).save(folder / FILES["image"], quality=90)
    make_video(folder / FILES["video"], 30 * seconds, height * 16 // 9, height)
    make_video(folder / "long.mp4", long_frames, 32, 32)
    make_sound(folder / FILES["audio"], seconds)


def make_video(path: Path, frames: int, width: int, height: int, seed: int = 1) -> None:
    """Write a video of a moving pattern, at 30 frames per second."""
    import av

    random = np.random.default_rng(seed)
    scene = np.kron(
        random.integers(0, 256, (height // 8 + 1, width // 4, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8)
    )
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=30, options={"preset": "veryfast", "crf": "26"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            left = number % (scene.shape[1] - width)
            pixels = np.ascontiguousarray(scene[:height, left : left + width])
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))


def make_sound(path: Path, seconds: int) -> None:
    """Write stereo noise."""
    import av

    samples = np.random.default_rng(2).standard_normal((2, 44_100 * seconds)).astype(np.float32) * 0.1
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libmp3lame", rate=44_100, layout="stereo")
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate = 44_100
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def milliseconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Return the time of each run, after a warm-up run."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return times


def ours(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Triptych's times, in ms."""
    from triptych.media.audio import decode_audio
    from triptych.media.log_mel import LogMel
    from triptych.models.qwen3_vl.plan import Qwen3VLPlanner
    from triptych.models.qwen3_vl.preprocess import Qwen3VLPreprocessor
    from triptych.prompt.probe import probe_image
    from triptych.prompt.probe_audio import probe_audio
    from triptych.prompt.probe_video import probe_video

    image, video, audio = ((folder / name).read_bytes() for name in FILES.values())
    long = (folder / "long.mp4").read_bytes()
    processors = {"size": IMAGE_SIZE, **STATISTICS, **PATCHES}, {"size": SIZE, **STATISTICS, **PATCHES}
    planner, preprocessor = Qwen3VLPlanner(CONFIG, *processors), Qwen3VLPreprocessor(CONFIG, *processors)
    features = LogMel()
    image_plan, video_plan = planner.plan(probe_image(image)), planner.plan(probe_video(video))
    header = probe_audio(audio)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "image": (lambda: list(preprocessor(image, image_plan)), repeats),
        "video": (lambda: sum(len(part.patches) for part in preprocessor(video, video_plan)), repeats),
        "audio": (lambda: features(decode_audio(audio, header, RATE)), repeats),
        "audio, features alone": (features_alone(features, decode_audio(audio, header, RATE)), repeats),
        "plan image": (lambda: planner.plan(probe_image(image)), 100),
        "plan video": (lambda: planner.plan(probe_video(video)), 100),
        "plan long video": (lambda: planner.plan(probe_video(long)), 100),
        "plan audio": (lambda: features.num_frames(probe_audio(audio).resampled(RATE)), 100),
    }
    return {name: milliseconds(work, times) for name, (work, times) in works.items()}


def features_alone(features: Callable[[Any], object], samples: Any) -> Callable[[], object]:
    """What turns samples that are decoded already into features."""
    return lambda: features(samples)


def reference(folder: Path, repeats: int, seconds: int) -> dict[str, list[float]]:
    """Transformers' times, in ms."""
    import torch

    torch.set_num_threads(1)
    from PIL import Image
    from transformers import WhisperFeatureExtractor

    image = (folder / FILES["image"]).read_bytes()
    pictures = reference_images()
    works: dict[str, Callable[[], object]] = {
        "image": lambda: pictures(Image.open(io.BytesIO(image)), return_tensors="np")
    }
    extractor = WhisperFeatureExtractor(feature_size=128)
    samples = np.random.default_rng(3).standard_normal(RATE * seconds).astype(np.float32)
    works["audio, features alone"] = lambda: extractor(
        samples, sampling_rate=RATE, return_tensors="np", padding="longest", return_attention_mask=True
    )
    try:
        from transformers import Qwen3VLVideoProcessor
        from transformers.video_utils import read_video_pyav

        settings: dict[str, Any] = {"size": SIZE, "cap_pixels_per_frame": False, **STATISTICS, **PATCHES}
        videos = Qwen3VLVideoProcessor(**settings)
    except ImportError as error:
        print(f"transformers' video processor isn't measured: {error}", file=sys.stderr)
        return {name: milliseconds(work, repeats) for name, work in works.items()}

    def video() -> object:
        frames, metadata = read_video_pyav(str(folder / FILES["video"]), videos.sample_frames)
        return videos(videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt")

    works["video"] = video
    return {name: milliseconds(work, repeats) for name, work in works.items()}


def reference_images() -> Any:
    """The Pillow processor that this family's images are held equal to."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings: dict[str, Any] = {"size": IMAGE_SIZE, **STATISTICS, **PATCHES}
    return Qwen2VLImageProcessorPil(**settings)


def measured(python: str, side: str, folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """One side's times, taken in a process of its own with one thread."""
    numbers = ["--repeats", str(arguments.repeats), "--seconds", str(arguments.seconds)]
    command = [python, __file__, "--side", side, "--folder", str(folder), *numbers]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both sides in turns; medians over all rounds, and their ratios."""
    make_files(folder, arguments.seconds, arguments.side_pixels, arguments.height, arguments.long_frames)
    times: dict[str, dict[str, list[float]]] = {"ours": {}, "reference": {}}
    for _ in range(arguments.rounds):
        for side, python in (("ours", sys.executable), ("reference", arguments.reference or sys.executable)):
            for name, values in measured(python, side, folder, arguments).items():
                times[side].setdefault(name, []).extend(values)
    medians = {side: {name: statistics.median(values) for name, values in of.items()} for side, of in times.items()}
    ratios = {name: medians["ours"][name] / value for name, value in medians["reference"].items()}
    return {"milliseconds": medians, "ratio": ratios, "all": times}


def main() -> None:
    """Prints medians and ratios; ``--out`` keeps every time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", help="the Python of an environment with torchvision")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--side-pixels", type=int, default=2000)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--long-frames", type=int, default=216_000, help="two hours")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=("ours", "reference"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        folder, repeats = arguments.folder, arguments.repeats
        is_ours = arguments.side == "ours"
        print(json.dumps(ours(folder, repeats) if is_ours else reference(folder, repeats, arguments.seconds)))
        return
    with tempfile.TemporaryDirectory() as name:
        result = compare(arguments, Path(name))
    for work, median in result["milliseconds"]["ours"].items():
        other = result["milliseconds"]["reference"].get(work)
        beside = f"  reference {other:9.2f}  ratio {median / other:.2f}" if other else ""
        print(f"{work:24} {median:9.2f} ms{beside}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
