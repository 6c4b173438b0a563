"""Plan, preprocess and encode a picture of 1080p with each family, compared with transformers.

    python -m bench.families --out bench/results/families.json
    python -m bench.families smolvlm internvl
    python -m bench.families --dtype bfloat16 --processor-time

Towers have the widths of one released checkpoint (``tests/support/released.py``), random weights and, unless
``--layers`` says otherwise, two layers: a tower's layers are alike. Both sides encode in the same dtype. They run in
this process in turns, with as many threads, and each has run once before. A stage gets ``--rounds`` rounds, fewer if
they would take longer than ``--seconds``, and at least one. Preprocessing goes from a JPEG file to encoder inputs, with
transformers' Pillow processors or, where there is none, the tests' own; with one thread, as in an encode instance's
workers. ``--processor-time`` is for machines that are never quiet.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.measuring import like_an_instance, median_seconds, report
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.equal_embeddings import MAX_DIFFERENCE, check_equal
from tests.support.reference import image_features, image_processor
from tests.support.released import RELEASED
from tests.support.tiny import make_tiny, write_settings
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.registry import family_of, resolve
from triptych.prompt.probe import probe_image

MEASURED = [name for name, one in RELEASED.items() if one.is_measured]
PREPROCESS = "preprocess"
PLANS = 200
"""Plans that are timed together, since one takes microseconds."""
MAX_DIFFERENCES = {"float32": MAX_DIFFERENCE, "bfloat16": 0.1}
"""Of the two sides' embeddings, by the dtype. Both sides round in bfloat16, each in other places."""
Work = Callable[[], object]
Clock = Callable[[], float]
CLOCKS: dict[bool, Clock] = {False: time.perf_counter, True: time.process_time}
"""By whether processor time is asked for: that of all of the process's threads."""


@dataclass(frozen=True)
class Stage:
    """One stage on both sides."""

    ours: Work
    reference: Work


def picture(width: int, height: int) -> bytes:
    """A JPEG with detail at several scales."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def stages_of(folder: Path, data: bytes, dtype: str | None) -> dict[str, Stage | Work]:
    """The stages of the checkpoint in ``folder``, with encoding in ``dtype`` or without; planning has no counterpart.
    Raises ValueError if the two sides' embeddings differ by more than rounding."""
    config, settings = load_config(folder), (load_preprocessor_config(folder), load_video_config(folder))
    family = family_of(config)
    assert family.preprocessor is not None
    planner, preprocess = (resolve(name)(config, *settings) for name in (family.planner, family.preprocessor))
    header = probe_image(data)
    plan = planner.plan(header)
    processor = image_processor(folder)

    def processed() -> Any:
        return processor([[Image.open(io.BytesIO(data)).convert("RGB")]], return_tensors="pt")

    stages: dict[str, Stage | Work] = {
        "plan": lambda: [planner.plan(header) for _ in range(PLANS)],
        PREPROCESS: Stage(lambda: list(preprocess(data, plan)), processed),
    }
    if dtype is None:
        return stages
    inputs = list(preprocess(data, plan))
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), WEIGHT_FORMATS[dtype], torch.device("cpu"))
    kind: torch.dtype = getattr(torch, dtype)
    model: Any = load_reference(folder)
    for parameter in model.parameters():  # not buffers: angles need float32, and may be complex
        parameter.data = parameter.data.to(kind)
    pixels = {
        name: value.to(kind) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in processed().items()
        if name != "num_patches"
    }

    def encoded() -> Any:
        with torch.inference_mode():
            return image_features(model, pixels)

    check_equal(tower.encode(inputs), plan, encoded(), MAX_DIFFERENCES[dtype])
    return stages | {"encode": Stage(lambda: tower.encode(inputs), encoded)}


def in_turns(stage: Stage, rounds: int, seconds: float, clock: Clock) -> tuple[list[float], list[float]]:
    """The seconds of both sides in each round by the ``clock``. None but the first begins once ``seconds`` have
    passed."""
    ours, theirs, began = list[float](), list[float](), time.perf_counter()
    while not ours or (len(ours) < rounds and time.perf_counter() - began < seconds):
        for work, times in ((stage.ours, ours), (stage.reference, theirs)):
            start = clock()
            work()
            times.append(clock() - start)
    return ours, theirs


def measured(name: str, data: bytes, settings: argparse.Namespace) -> dict[str, Any]:
    """One family's figures: times in ms, medians and the spread of the ratios of each round."""
    with tempfile.TemporaryDirectory() as folder:
        tiny, dtype = RELEASED[name].tiny(name, settings.layers), None if settings.no_encode else settings.dtype
        (make_tiny if dtype else write_settings)(Path(folder), tiny)
        found, clock = stages_of(Path(folder), data, dtype), CLOCKS[settings.processor_time]
        figures: dict[str, Any] = {"checkpoint": RELEASED[name].name}
        for stage, work in found.items():
            torch.set_num_threads(1 if stage == PREPROCESS else settings.threads)
            if not isinstance(work, Stage):
                figures[stage] = {"ms": round(1000 * median_seconds(work, settings.rounds) / PLANS, 4)}
                continue
            ours, theirs = in_turns(work, settings.rounds, settings.seconds, clock)
            ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
            figures[stage] = {"ms": round(1000 * statistics.median(ours), 1)}
            figures[stage] |= {"transformers ms": round(1000 * statistics.median(theirs), 1)}
            figures[stage] |= {"ratio": round(statistics.median(ratios), 2), "rounds": len(ratios)}
            figures[stage] |= {"lowest": round(ratios[0], 2), "highest": round(ratios[-1], 2)}
        return figures


def main() -> None:
    """Prints each family's figures as they are measured, and all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(MEASURED)}; all by default")
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--layers", type=int, default=2, help="layers of each tower")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of a stage, after which no round begins")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=MAX_DIFFERENCES, default="float32", help="of both sides' encoding")
    parser.add_argument("--processor-time", action="store_true", help="measure the process's processor time")
    parser.add_argument("--no-encode", action="store_true", help="plan and preprocess alone")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - set(MEASURED):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(MEASURED)}")
    like_an_instance(arguments.threads)
    data, found = picture(arguments.width, arguments.height), dict[str, Any]()
    for name in arguments.families or MEASURED:
        try:
            found[name] = measured(name, data, arguments)
        except (ValueError, RuntimeError) as error:  # a reference may not compute in bfloat16
            found[name] = {"error": str(error)}
        print(f"{name}: {found[name]}", flush=True)
    names = ("width", "height", "layers", "rounds", "seconds", "threads", "dtype", "processor_time")
    settings = {name: getattr(arguments, name) for name in names}
    report(settings | {"families": found}, arguments.out)
    if failed := [name for name, figures in found.items() if "error" in figures]:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
