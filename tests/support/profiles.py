"""A small profile with round figures."""

from triptych.costs.fitting import fitted, linear, quartiles
from triptych.costs.forms import Factor
from triptych.costs.profile import (
    AtThreads,
    Cost,
    Interference,
    Item,
    Machine,
    Model,
    Point,
    Profile,
    batch_values,
    step_values,
)
from triptych.messages.identity import ModelIdentity

STEPS = [[(64, 0)], [(512, 0)], [(256, 1024)], [(1, 63)], [(1, 1023)] * 8, [(1, 63)] * 32, [(128, 0), (1, 255)]]
STEP_TERMS = linear("tokens", "chunks", "pairs", "sequences", "context")


def point(seconds: float, **values: float) -> Point:
    return Point(dict(values), quartiles([0.95 * seconds, seconds, 1.05 * seconds]))


def step_seconds(chunks: list[tuple[int, int]]) -> float:
    """Return what a step takes in the profile with one thread."""
    values = step_values(chunks)
    of_each = {"tokens": 1e-4, "chunks": 1e-3, "pairs": 1e-8, "sequences": 5e-4, "context": 1e-7}
    return 2e-3 + sum(seconds * values[name] for name, seconds in of_each.items())


def batch_seconds(patches: list[int]) -> float:
    values = batch_values(patches)
    return 1e-3 + 5e-5 * values["patches"] + 1e-8 * values["pairs"]


def example_profile() -> Profile:
    """Return a profile whose costs follow from ``step_seconds``, ``batch_seconds`` and the figures below."""

    def steps(speed: float) -> Cost:
        return fitted([point(step_seconds(one) / speed, **step_values(one)) for one in STEPS], STEP_TERMS)

    batches = [[64], [256], [1024], [256] * 4, [64] * 8]
    encode = fitted(
        [point(batch_seconds(one), **batch_values(one)) for one in batches], linear("parts", "patches", "pairs")
    )
    overhead = fitted([point(1e-4, sequences=1, chunks=0), point(2e-4, sequences=8, chunks=1)], linear("sequences"))
    request = fitted([point(5e-4, requests=1, output_tokens=0)], [(Factor("requests"),)])
    frontend = fitted(
        [
            point(
                2e-3 + 1e-4 * tokens + 1e-9 * size,
                requests=1,
                prompt_tokens=100,
                media_bytes=size,
                output_tokens=tokens,
            )
            for tokens, size in ((1, 0), (32, 0), (1, 10**6), (32, 10**6))
        ],
        [(Factor(name),) for name in ("requests", "media_bytes", "output_tokens")],
    )
    transfer = fitted([point(1e-3 + size / 1e9, bytes=size) for size in (2**16, 2**20, 2**24)], linear("bytes"))
    pixels = fitted([point(1e-3 + 2e-8 * size, pixels=size) for size in (50_176, 200_704, 2_073_600)], linear("pixels"))
    return Profile(
        kind="triptych-profile",
        version=1,
        created="2026-01-01T00:00:00Z",
        triptych="0.1.0",
        seconds=60.0,
        machine=Machine(2, "example", 8.0, "6.1", "3.12", (0.0, 0.0, 0.0)),
        model=Model("example", ModelIdentity("aa", "bb", "cc"), True, 8, 256, 512, 4096, 1000, 4, 16, {"decoder": 1}),
        settings={"max_num_batched_tokens": 512, "encode_batch_patches": 1024},
        items=(Item(224, 224, 51, 49, 196, 1), Item(448, 448, 198, 196, 784, 1)),
        preprocess={"png": pixels},
        encode=(AtThreads(1, encode),),
        steps=(AtThreads(1, steps(1.0)), AtThreads(2, steps(1.6))),
        step_overhead=overhead,
        request_overhead={"encode": request, "decode": request},
        frontend=frontend,
        transfers={"shm": {"kv": transfer, "embeddings": transfer}},
        hop=quartiles([1e-4, 1e-4, 2e-4]),
        interference=(Interference("decode", "encode", "own", 1, quartiles([1.1, 1.2, 1.3])),),
    )
