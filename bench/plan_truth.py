"""How far simulations of a profile are from real services, on loads that no profile was fitted to.

    triptych profile demo --out /tmp/demo.json
    python -m bench.make_checkpoint /tmp/mid --preset mid && triptych profile /tmp/mid --out /tmp/mid.json
    python -m bench.plan_truth demo=/tmp/demo.json /tmp/mid=/tmp/mid.json --out bench/results/plan-truth.json

A seed chooses the mixes, the sizes in them, and a low and a high load of each. Every topology gets the same requests at
the same times. A run is kept in ``--out`` once it is over, and isn't repeated: call again to go on after ``--minutes``,
or with ``--minutes 0`` to predict all runs again. The machine should be idle. The load generator runs on the same
cores: simulations take as much of them as it used for each request before the runs, in a closed loop.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from triptych.cluster.service import Service, unless_lost
from triptych.config import ServeConfig
from triptych.costs import profile as profiles
from triptych.costs.profile import Profile
from triptych.demo import MODEL_DIR
from triptych.measure.load.client import ask, closed_loop, open_loop, percentile
from triptych.measure.load.pictures import picture
from triptych.measure.load.processes import cpu_seconds, named_children
from triptych.measure.load.questions import chat_body, content, words
from triptych.measure.machine import machine
from triptych.measure.split.loads import answered
from triptych.measure.split.plan import threads_of
from triptych.observe import logs
from triptych.planning.candidates import Candidate
from triptych.planning.search import ALIKE
from triptych.planning.trial import Slo, Trials
from triptych.topology import Topology
from triptych.workload.mix import Amount, ArrivalPattern, RequestKind, RequestMix
from triptych.workload.trace import TraceMedia, TraceRequest

SEED = 20261130
TOPOLOGIES = ("1EPD", "2EPD", "1E1PD", "1E1P1D")
SIDES = (112, 224, 336, 448, 560)
"""Of pictures, in pixels."""
LOADS = {"low": (0.5, 0.9), "high": (1.0, 1.5)}
"""Least and largest load of each kind, as shares of what the first topology does in a closed loop."""
SLO_TTFT, SLO_TPOT = 5.0, 2.5
"""The objectives, as multiples of the times of one request alone on the first topology."""
ALONE, CONCURRENCY, FEWEST, MOST = 4, 8, 12, 400
"""Requests alone, at once in a closed loop, and of a run."""
START_SECONDS = 12.0
"""What starting a service and warming it up takes about."""
CLEAR = 1.1
"""Ratio of measured goodputs from which a wrong verdict counts."""
WARM_UP = 2 * MOST
"""Number of the first request of a mix that isn't in its run."""
MODEL = "m"
BUSY = re.compile(r'^triptych:instance_busy_seconds_total\{instance_name="([^"]+)".*\} ([0-9.e+-]+)$', re.MULTILINE)
"""Lines of the page of metrics: an instance, and its seconds."""
LEAST_GOODPUT = 0.05
"""Share of what is offered to which an error of goodput is relative at least: of nothing, every error is infinite."""
BOUNDS = {"goodput": 0.15, "ttft_p50": 0.15, "ttft_p99": 0.30}


@dataclass(frozen=True)
class TruthMix:
    """A mix at a load, the same for all topologies of a model."""

    kind: str
    workload: RequestMix
    level: str
    load: float
    """Share of what the first topology does in a closed loop."""

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.level}"


@dataclass
class TruthRuns:
    """The results so far, in a file."""

    path: Path
    found: dict[str, Any]

    @classmethod
    def at(cls, path: Path) -> "TruthRuns":
        empty = {"seed": SEED, "bases": {}, "runs": {}}
        return cls(path, json.loads(path.read_text()) if path.exists() else empty)

    def save(self) -> None:
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        beside.replace(self.path)


def mixes(model: str) -> list[TruthMix]:
    """Return a model's mixes, by its name and the seed alone."""
    rng = random.Random(f"{SEED} {model}")

    def amount(least: int, most: int) -> Amount:
        low = rng.randint(least, most // 2)
        return Amount(low=low, high=rng.randint(low + 1, most))

    def kind(images: Amount | int, weight: float = 1.0) -> RequestKind:
        sides = rng.sample(SIDES, 2)
        sizes = tuple((side, side) for side in sides)
        return RequestKind(weight=weight, text=amount(32, 512), answer=amount(8, 64), images=images, sizes=sizes)

    bursts = ArrivalPattern("bursts", period=5.0, share=0.3, peak=2.0)
    kinds: dict[str, RequestMix] = {
        "text": RequestMix((kind(0),)),
        "picture": RequestMix((kind(1),)),
        "pictures": RequestMix((kind(Amount(low=2, high=4)),)),
        "mixed": RequestMix((kind(0, rng.uniform(1.0, 4.0)), kind(1))),
        "bursts": RequestMix((kind(0), kind(1)), bursts),
    }
    return [
        TruthMix(name, workload, level, rng.uniform(*loads))
        for name, workload in kinds.items()
        for level, loads in LOADS.items()
    ]


# ── real runs ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class RealService:
    """A service under one mix."""

    http: httpx.AsyncClient
    model: str
    first: int
    """Number of the first request, so that no two mixes have the same ones."""

    def body(self, request: TraceRequest, seed: int) -> tuple[bytes, list[int]]:
        """Return a request that is new to all caches, and the sizes of its files."""
        seed += self.first
        files = [picture(8 * seed + place, one.width, one.height) for place, one in enumerate(request.media)]
        body = chat_body(self.model, content(files, words(seed, request.text)), request.answer)
        return body, [len(file) for file in files]

    async def basis(self, mix: TruthMix, seconds: float) -> dict[str, float]:
        """Return the rate of a closed loop, what the client spends on a request, and objectives by the times of
        requests alone."""
        requests = mix.workload.requests(1.0, MOST, SEED)
        bodies = (self.body(request, WARM_UP + number)[0] for number, request in enumerate(requests))
        await closed_loop(self.http, list(islice(bodies, CONCURRENCY)), CONCURRENCY)
        alone = [await ask(self.http, body) for body in islice(bodies, ALONE)]
        done, took, spent = 0, 0.0, 0.0
        while took < seconds and (some := list(islice(bodies, 2 * CONCURRENCY))):
            began, before = time.monotonic(), cpu_seconds(os.getpid())
            done += len(answered(await closed_loop(self.http, some, CONCURRENCY)))
            took, spent = took + time.monotonic() - began, spent + cpu_seconds(os.getpid()) - before
        return {
            "rate": done / took,
            "client_seconds": spent / max(1, done),
            "slo_ttft": SLO_TTFT * statistics.median(one.ttft for one in alone),
            "slo_tpot": SLO_TPOT * statistics.median(one.tpot for one in alone),
        }

    async def run(self, requests: Sequence[TraceRequest]) -> dict[str, Any]:
        """Send requests at their times. Returns each one as a log would have it, with what its client saw."""
        warm = [self.body(request, WARM_UP + MOST + number)[0] for number, request in enumerate(requests[:CONCURRENCY])]
        await closed_loop(self.http, warm, CONCURRENCY)
        made = [self.body(request, number) for number, request in enumerate(requests)]
        spent, busy, began = cpu_seconds(os.getpid()), await self._busy(), time.monotonic()
        samples = await open_loop(self.http, [body for body, _ in made], [request.at for request in requests])
        seconds, after = time.monotonic() - began, await self._busy()
        return {
            "client_share": (cpu_seconds(os.getpid()) - spent) / seconds,
            "busy": {name: round((after[name] - before) / seconds, 4) for name, before in busy.items()},
            "load_average": os.getloadavg()[0],
            "requests": [
                {
                    "at": request.at,
                    "prompt": sample.prompt_tokens,
                    "answer": sample.tokens,
                    "media": [[one.width, one.height, size] for one, size in zip(request.media, sizes, strict=True)],
                    "ttft": sample.token_times[0] if sample.token_times else 0.0,
                    "tpot": sample.tpot if sample.token_times else 0.0,
                    "error": sample.error,
                }
                for request, sample, (_, sizes) in zip(requests, samples, made, strict=True)
            ],
        }

    async def _busy(self) -> dict[str, float]:
        """Return how long each instance has computed, by its last heartbeat, and the frontend worked."""
        metrics = (await self.http.get("/metrics")).text
        found = {name: float(value) for name, value in BUSY.findall(metrics)}
        return found | {"frontend": cpu_seconds(named_children(os.getpid())["frontend"])}


@dataclass(frozen=True)
class TruthBench:
    """Measures one model while there is time."""

    config: ServeConfig
    name: str
    runs: TruthRuns
    seconds: float
    """Of each run, about."""
    ends: float
    """When to begin nothing more, on the monotonic clock."""

    def measure(self) -> None:
        for topology in TOPOLOGIES:
            todo = [
                mix
                for mix in mixes(self.name)
                if run_key(self.name, mix.name, topology) not in self.runs.found["runs"]
                or "client_seconds" not in self.runs.found["bases"][self.name][mix.kind]
            ]
            if todo and time.monotonic() + START_SECONDS < self.ends:
                asyncio.run(self._visit(topology, todo))

    async def _visit(self, topology: str, todo: Sequence[TruthMix]) -> None:
        async with Service(self.config, Topology.parse(topology), lambda _: None, restart=False) as service:
            await service.wait_until_ready()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None, limits=limits) as http:
                await unless_lost(service.lost, self._run_all(http, topology, todo))

    async def _run_all(self, http: httpx.AsyncClient, topology: str, todo: Sequence[TruthMix]) -> None:
        bases = self.runs.found["bases"].setdefault(self.name, {})
        names = [mix.name for mix in mixes(self.name)]
        for mix in todo:
            real = RealService(http, MODEL, 4 * MOST * names.index(mix.name))
            if time.monotonic() + 1.5 * self.seconds > self.ends:
                return
            if "client_seconds" not in (known := bases.get(mix.kind, {})):
                # what other runs were made by stays
                bases[mix.kind] = await real.basis(mix, self.seconds / 3) | known
            rate = mix.load * bases[mix.kind]["rate"]
            count = max(FEWEST, min(MOST, round(rate * self.seconds)))
            found = await real.run(list(mix.workload.requests(rate, count, SEED)))
            found |= {"threads": threads_of(self.config, topology)[0]}
            self.runs.found["runs"][run_key(self.name, mix.name, topology)] = found
            self.runs.save()
            print(f"{self.name}, {mix.name}, {topology}: {count} requests at {rate:.3g}/s", file=sys.stderr, flush=True)


def run_key(model: str, mix: str, topology: str) -> str:
    return f"{model} {mix} {topology}"


# ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────────


def measured(run: dict[str, Any], slo: Slo) -> dict[str, float]:
    """Return what a run came to. Times are in seconds, goodput in requests per second."""
    requests = run["requests"]
    good = [one for one in requests if not one["error"]]
    kept = sum(one["ttft"] <= slo.ttft and one["tpot"] <= slo.tpot for one in good)
    ttft = [one["ttft"] for one in good]
    return {
        "goodput": offered(requests) * kept / len(requests),
        "ttft_p50": statistics.median(ttft),
        "ttft_p99": percentile(ttft, 0.99),
    }


def offered(requests: Sequence[dict[str, Any]]) -> float:
    """Return the requests per second that came."""
    return float(len(requests) / requests[-1]["at"])


def predicted(
    run: dict[str, Any], topology: str, profile: Profile, slo: Slo, client_seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a simulation of the same requests at the same times comes to, and how busy each process is.
    ``client_seconds`` is what the client spends on a request."""
    trace = [_recorded(number, one, profile) for number, one in enumerate(run["requests"])]
    candidate = Candidate(Topology.parse(topology), run["threads"], profile.machine.cores)
    rate = offered(run["requests"])
    trials = Trials(profile, lambda _: trace, slo, SEED, taken=min(1.0, rate * client_seconds))
    trial = trials.run(candidate, rate, whole=True)
    return {"goodput": rate * trial.kept, "ttft_p50": trial.ttft[0], "ttft_p99": trial.ttft[1]}, trial.busy


def _recorded(number: int, one: dict[str, Any], profile: Profile) -> TraceRequest:
    media = tuple(
        TraceMedia(f"{number} {place}", width, height, bytes=size, format="png")
        for place, (width, height, size) in enumerate(one["media"])
    )
    rows = sum(profile.item(item.width, item.height).rows for item in media)
    return TraceRequest(one["at"], max(1, one["prompt"] - rows), max(1, one["answer"]), media)


def compared(runs: TruthRuns, model: str, profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield each run of a model with its prediction, and how far that is off, relative to what was measured."""
    for mix in mixes(model):
        for topology in TOPOLOGIES:
            run = runs.found["runs"].get(run_key(model, mix.name, topology))
            if run is None or "client_seconds" not in (basis := runs.found["bases"][model][mix.kind]):
                continue
            slo = Slo(basis["slo_ttft"], basis["slo_tpot"], 0.99)
            real = measured(run, slo)
            simulated, busy = predicted(run, topology, profile, slo, basis["client_seconds"])
            least = {"goodput": LEAST_GOODPUT * offered(run["requests"])}
            errors = {name: (simulated[name] - real[name]) / max(real[name], least.get(name, 1e-9)) for name in BOUNDS}
            yield {
                "model": model,
                "mix": mix.name,
                "topology": topology,
                "offered": offered(run["requests"]),
                "client_share": run["client_share"],
                "busy": run["busy"],
                "busy_predicted": {name: round(one, 4) for name, one in busy.items()},
                "measured": real,
                "predicted": simulated,
                "error": errors,
            }


def verdicts(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each mix with all topologies which one is best, as measured and as predicted, and whether that is
    right: a topology that comes close to the best one is as good an answer. Mixes under which no topology differs from
    another, such as those below all capacities, say nothing and are left out. Verdicts on splitting are those of
    ``triptych plan``, which splits for a gain of more than ``ALIKE``."""
    by_mix: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_mix.setdefault((row["model"], row["mix"]), []).append(row)
    for (model, mix), found in by_mix.items():
        if len(found) < len(TOPOLOGIES):
            continue
        real, simulated = (
            {row["topology"]: row[kind]["goodput"] for row in found} for kind in ("measured", "predicted")
        )
        if max(real.values()) <= (1 + ALIKE) * min(real.values()):
            continue
        chosen, best = max(simulated, key=lambda one: simulated[one]), max(real, key=lambda one: real[one])
        gains = [_gain(goodputs) for goodputs in (real, simulated)]
        yield {
            "model": model,
            "mix": mix,
            "best": best,
            "predicted": chosen,
            "right": real[chosen] * (1 + ALIKE) >= real[best],
            "split_gain": gains[0],
            "split_gain_predicted": gains[1],
            "wrong_verdict": gains[0] >= CLEAR if gains[1] <= 1 + ALIKE else gains[0] <= 1 / CLEAR,
        }


def _gain(goodputs: dict[str, float]) -> float:
    """Return the best split topology's goodput over the best unsplit one's."""
    split = max(value for name, value in goodputs.items() if len(Topology.parse(name).groups) > 1)
    unsplit = max(value for name, value in goodputs.items() if len(Topology.parse(name).groups) == 1)
    return split / max(unsplit, 1e-9)


def table(rows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines of Markdown."""
    titles = ["model", "mix", "topology", "offered (1/s)", "goodput (1/s)", "predicted"]
    titles += ["TTFT p50 (ms)", "predicted", "TTFT p99 (ms)", "predicted"]
    yield f"| {' | '.join(titles)} |"
    yield "| --- " * len(titles) + "|"
    for row in rows:
        real, simulated = row["measured"], row["predicted"]
        times = [f"{1e3 * one[name]:.0f}" for name in ("ttft_p50", "ttft_p99") for one in (real, simulated)]
        cells = [row["model"], row["mix"], row["topology"], f"{row['offered']:.2f}"]
        cells += [f"{real['goodput']:.2f}", f"{simulated['goodput']:.2f}", *times]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for name, bound in BOUNDS.items() if rows else ():
        errors = [abs(row["error"][name]) for row in rows]
        share = f"within {bound:.0%} in {sum(error <= bound for error in errors)} of {len(errors)} runs"
        yield f"{name}: median error {statistics.median(errors):.0%}, {share}"
    for is_frontend, name in ((True, "frontend"), (False, "instances")):
        pairs = [
            (busy, row["busy"][process])
            for row in rows
            for process, busy in row["busy_predicted"].items()
            if (process == "frontend") == is_frontend and process in row["busy"]
        ]
        if pairs:
            off = statistics.median(busy - real for busy, real in pairs)
            share = statistics.median(real for _, real in pairs)
            yield f"busy share of {name}: median {share:.2f}, predictions are off by {off:+.2f}"
    for one in found:
        marks = ["" if one["right"] else "another is best", "wrong on splitting" if one["wrong_verdict"] else ""]
        names = f"{one['model']}, {one['mix']}: best {one['best']}, predicted {one['predicted']}"
        gains = f"split ÷ unsplit {one['split_gain']:.2f}, predicted {one['split_gain_predicted']:.2f}"
        yield "; ".join(filter(None, [names, gains, *marks]))
    right, wrong = sum(one["right"] for one in found), sum(one["wrong_verdict"] for one in found)
    yield f"{len(found)} mixes under which topologies differ: best one named right in {right}, wrong verdicts: {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", metavar="MODEL=PROFILE", nargs="+", help="demo or a checkpoint folder, and its profile"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes after which no run begins")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each run, about")
    parser.add_argument("--out", type=Path, required=True, help="file of the results, to which new ones are added")
    options = parser.parse_args()
    pairs = [pair.rpartition("=")[::2] for pair in options.models]
    runs, ends = TruthRuns.at(options.out), time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    known = {model: profiles.read(Path(path)) for model, path in pairs}
    for number, model in enumerate(known):
        config = ServeConfig(model=MODEL_DIR if model == "demo" else Path(model).resolve())
        config = config.having({"port": 0, "control_port": 0, "served_model_name": MODEL})
        # each model has its share of the time that is left
        share = time.monotonic() + (ends - time.monotonic()) / (len(known) - number)
        with logs.quiet(logging.ERROR, unless=False):
            TruthBench(config, Path(model).name, runs, options.seconds, share).measure()
    for model, profile in known.items():
        rows += compared(runs, Path(model).name, profile)
    found = list(verdicts(rows))
    runs.found |= {"machine": machine(), "compared": rows, "verdicts": found}
    runs.save()
    print("\n".join(table(rows, found)))


if __name__ == "__main__":
    main()
