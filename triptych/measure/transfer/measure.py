"""Cost of transfers over each fabric, between two processes, compared with one memcpy of the same bytes.

Every figure is a median. It alternates with what it is compared with (A B A B), so that changes in the machine's speed
affect both. Except for ``first``, warm-up transfers precede every measurement.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from triptych.errors import StartError
from triptych.measure.machine import machine
from triptych.measure.transfer.bare import BarePair, has_bare_loop
from triptych.measure.transfer.ends import ConsumeMode, Pair, Payload, PoolSpec, TransferTiming
from triptych.observe.machine import available_bytes
from triptych.transfer.sender import POLL_INTERVAL

FABRICS = ("shm", "nixl", "mooncake")
WIDTHS = (4096, 4 * 4096)
"""Row widths in elements: of plain embeddings, and of embeddings with the features of three deepstack layers."""
BLOCK_ROWS = 64
STEP_ROWS = 512
"""Tokens in a prefill step by default."""
WARM_UP = 3
COPIES = 3
"""Copies of a payload that the two processes hold: source, region and the memcpy's target."""
BARE_COPIES = 2
POLL_PAUSES = {"without pause": 0.0, "every 0.1 ms": POLL_INTERVAL}
"""Pauses between polls of the bare loops, in seconds. The faster way counts."""
MEMORY_HEADROOM = 1.25
"""Memory that must be available per byte that a measurement needs."""

ShowLine = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True)
class BenchPlan:
    """What is measured, and how often."""

    tokens: Sequence[int]
    """Sizes of transfers."""
    widths: Sequence[int]
    resumed: Sequence[int]
    """Sizes of transfers through a pool of ``pool_tokens``."""
    pool_tokens: int
    scattered: Sequence[int]
    """Sizes of transfers into scattered blocks."""
    small: int
    """Repetitions of the smallest transfers."""
    repeats: tuple[int, int]
    """Minimum and maximum repetitions of a transfer."""
    rounds: int
    """Rounds of alternating measurements."""
    seconds: float
    """Time limit of the measured transfers of one size together."""


FULL = BenchPlan(
    tokens=(1024, 4096, 8192, 16384, 32768),
    widths=WIDTHS,
    resumed=(10240, 20480, 32768),
    pool_tokens=8192,
    scattered=(1024, 8192),
    small=500,
    repeats=(7, 40),
    rounds=5,
    seconds=3.0,
)
QUICK = BenchPlan(
    tokens=(1024, 4096),
    widths=WIDTHS[:1],
    resumed=(2560,),
    pool_tokens=2048,
    scattered=(1024,),
    small=50,
    repeats=(3, 5),
    rounds=1,
    seconds=0.5,
)


def measure(fabrics: Sequence[str], plan: BenchPlan, show: ShowLine) -> dict[str, Any]:
    """Measure everything over the named fabrics, or over all installed ones if none is named. Raises StartError when a
    named fabric can't start."""
    results = {}
    for fabric in fabrics or FABRICS:
        try:
            with Pair(fabric) as pair:
                show(f"{fabric}: measuring")
                results[fabric] = {
                    "sizes": list(_sizes(fabric, pair, plan, show)),
                    "small": _small(pair, plan),
                    "resumes": list(_resumes(pair, plan, show)),
                    "scattered": list(_scattered(pair, plan, show)),
                }
        except StartError as error:
            if fabrics:
                raise
            show(f"{fabric}: skipped: {error}")
    return {"machine": machine(), "fabrics": results}


def _fits(payload: Payload, copies: int, show: ShowLine) -> bool:
    needed, available = int(payload.num_bytes * copies * MEMORY_HEADROOM), available_bytes()
    if needed > available:
        show(
            f"skipped {payload.rows} tokens of width {payload.width}: they need {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are available"
        )
    return needed <= available


def _sizes(fabric: str, pair: Pair, plan: BenchPlan, show: ShowLine) -> Iterator[dict[str, Any]]:
    for width in plan.widths:
        for tokens in plan.tokens:
            payload = Payload(tokens, width)
            if _fits(payload, COPIES + BARE_COPIES * has_bare_loop(fabric), show):
                yield _size(fabric, pair, plan, payload)


def _size(fabric: str, pair: Pair, plan: BenchPlan, payload: Payload) -> dict[str, Any]:
    pair.configure(payload, _whole(payload))
    first = pair.transfer(checked=False)
    with ExitStack() as stack:
        bare = stack.enter_context(BarePair(fabric, payload.num_bytes)) if has_bare_loop(fabric) else None
        for _ in range(WARM_UP):
            pair.memcpy()
            pair.transfer(checked=False)
            warm = pair.transfer(checked=True)
            if bare is not None:
                for pause in POLL_PAUSES.values():
                    bare.write(pause)
        transfers, checked, memcpys = [], [], []
        bares: dict[str, list[float]] = {way: [] for way in POLL_PAUSES} if bare is not None else {}
        for _ in range(_repeats(plan, warm.consumed)):
            memcpys.append(pair.memcpy())
            transfers.append(pair.transfer(checked=False))
            if bare is not None:
                for way, seconds in bares.items():
                    seconds.append(bare.write(POLL_PAUSES[way]))
            checked.append(pair.transfer(checked=True).landed)
    landed = [timed.landed for timed in transfers]
    took = statistics.median(landed)
    return {
        "tokens": payload.rows,
        "width": payload.width,
        "bytes": payload.num_bytes,
        "landed_ms": _ms(landed),
        "checked_ms": _ms(checked),
        "memcpy_ms": _ms(memcpys),
        "first_ms": round(first.landed * 1e3, 3),
        "gb_per_s": round(payload.num_bytes / took / 1e9, 3),
        "of_memcpy": round(statistics.median(memcpys) / took, 3),
        "checked_of_memcpy": round(statistics.median(memcpys) / statistics.median(checked), 3),
        **(_beside_bare(bares, took, statistics.median(checked)) if bares else {}),
        "messages": max(timed.messages for timed in transfers),
        "raw_ms": {
            "landed": _raw(landed),
            "checked": _raw(checked),
            "memcpy": _raw(memcpys),
            **{f"bare, {way}": _raw(seconds) for way, seconds in bares.items()},
        },
    }


def _beside_bare(bares: dict[str, list[float]], took: float, checked: float) -> dict[str, Any]:
    way, bare = min(((way, statistics.median(seconds)) for way, seconds in bares.items()), key=lambda found: found[1])
    return {
        "bare_ms": _ms([bare]),
        "bare_asks": way,
        "of_bare": round(bare / took, 3),
        "checked_of_bare": round(bare / checked, 3),
    }


def _small(pair: Pair, plan: BenchPlan) -> list[dict[str, Any]]:
    """Measure the fixed cost of a transfer."""
    found = []
    for rows in (1, BLOCK_ROWS):
        payload = Payload(rows, WIDTHS[0])
        pair.configure(payload, PoolSpec(1, BLOCK_ROWS))
        for _ in range(WARM_UP):
            pair.transfer()
        transfers, pings = [], []
        for _ in range(plan.small):
            pings.append(pair.ping())
            transfers.append(pair.transfer())
        ordered = sorted(timed.landed for timed in transfers)
        found.append(
            {
                "rows": rows,
                "bytes": payload.num_bytes,
                "landed_us": round(statistics.median(ordered) * 1e6, 1),
                "p10_us": round(ordered[len(ordered) // 10] * 1e6, 1),
                "p99_us": round(ordered[int(len(ordered) * 0.99)] * 1e6, 1),
                "memcpy_us": round(statistics.median(pair.memcpy() for _ in range(plan.small // 10)) * 1e6, 1),
                "message_us": round(statistics.median(pings) * 1e6, 1),
                "messages": max(timed.messages for timed in transfers),
            }
        )
    return found


def _resumes(pair: Pair, plan: BenchPlan, show: ShowLine) -> Iterator[dict[str, Any]]:
    """Compare a pool that holds only some of the rows with one that holds all."""
    pools = {"limited": PoolSpec(plan.pool_tokens // BLOCK_ROWS, BLOCK_ROWS)}
    for tokens in plan.resumed:
        payload = Payload(tokens, WIDTHS[0])
        if not _fits(payload, COPIES, show):
            continue
        pools["unlimited"] = _whole(payload)
        for how, consuming in {"freed": ConsumeMode(), "copied": ConsumeMode(STEP_ROWS)}.items():
            measured = _in_turns(pair, plan, {name: (payload, pool, consuming) for name, pool in pools.items()})
            took = {name: [timed.consumed for timed in found] for name, found in measured.items()}
            yield {
                "tokens": tokens,
                "pool_tokens": plan.pool_tokens,
                "rows_are": how,
                "resumes": statistics.median(timed.resumes for timed in measured["limited"]),
                "messages": statistics.median(timed.messages for timed in measured["limited"]),
                "limited_ms": _ms(took["limited"]),
                "unlimited_ms": _ms(took["unlimited"]),
                "ratio": round(statistics.median(took["limited"]) / statistics.median(took["unlimited"]), 3),
                "raw_ms": {name: _raw(seconds) for name, seconds in took.items()},
            }


def _scattered(pair: Pair, plan: BenchPlan, show: ShowLine) -> Iterator[dict[str, Any]]:
    """Compare scattered blocks with one run of blocks."""
    for tokens in plan.scattered:
        payload = Payload(tokens, WIDTHS[0])
        if not _fits(payload, COPIES + 1, show):
            continue
        whole = _whole(payload)
        apart = PoolSpec(whole.num_blocks, whole.block_rows, scattered=True)
        measured = _in_turns(
            pair,
            plan,
            {name: (payload, pool, ConsumeMode()) for name, pool in {"run": whole, "apart": apart}.items()},
        )
        took = {name: [timed.landed for timed in found] for name, found in measured.items()}
        yield {
            "tokens": tokens,
            "extents": whole.num_blocks,
            "extent_bytes": BLOCK_ROWS * payload.row_bytes,
            "one_run_ms": _ms(took["run"]),
            "scattered_ms": _ms(took["apart"]),
            "ratio": round(statistics.median(took["apart"]) / statistics.median(took["run"]), 3),
            "raw_ms": {name: _raw(seconds) for name, seconds in took.items()},
        }


def _in_turns(
    pair: Pair, plan: BenchPlan, setups: dict[str, tuple[Payload, PoolSpec, ConsumeMode]]
) -> dict[str, list[TransferTiming]]:
    """Measure some transfers of each setup, in alternating rounds."""
    found: dict[str, list[TransferTiming]] = {name: [] for name in setups}
    for _ in range(plan.rounds):
        for name, (payload, pool, consuming) in setups.items():
            pair.configure(payload, pool)
            for _ in range(WARM_UP):
                warm = pair.transfer(consuming)
            repeats = max(plan.repeats[0], _repeats(plan, warm.consumed) // plan.rounds)
            found[name] += [pair.transfer(consuming) for _ in range(repeats)]
    return found


def _repeats(plan: BenchPlan, seconds: float) -> int:
    least, most = plan.repeats
    return max(least, min(most, int(plan.seconds / max(seconds, 1e-6))))


def _whole(payload: Payload) -> PoolSpec:
    """Return a pool that the payload exactly fits in."""
    return PoolSpec(-(-payload.rows // BLOCK_ROWS), BLOCK_ROWS)


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4)


def _raw(seconds: Sequence[float]) -> list[float]:
    return [round(value * 1e3, 4) for value in seconds]
