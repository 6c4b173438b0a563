"""Runs faults against services on this machine, and compares with the same questions without a fault."""

import asyncio
import contextlib
import itertools
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from triptych.chaos.faults import NUM_REQUESTS, Fault
from triptych.chaos.load import Client, End, Kind, Outcome, Question, send
from triptych.chaos.target import Held, Mark, Target, held
from triptych.cluster.child import Print
from triptych.cluster.service import LocalService
from triptych.config import ServeConfig
from triptych.errors import StartError, TriptychError
from triptych.load_test.client import percentile
from triptych.topology import Topology

WHOLE_TIMEOUT = 120.0
"""Seconds in which all processes must be ready again."""
RETURN_TIMEOUT = 15.0
"""Seconds after the last answer in which what was held must be released."""
POLL_SECONDS = 0.1
CALM_CONCURRENCY = 16
"""Requests at once where no latency is compared."""


@dataclass
class FaultResult:
    """What a fault did."""

    fault: Fault
    calm: list[Outcome]
    """The run before it, of the same questions."""
    outcomes: list[Outcome]
    marks: list[Mark]
    lost: list[Outcome]
    """Requests that should have been answered and weren't."""
    wrong: list[Outcome]
    """Answers that differ from those of the run before."""
    failures: list[str] = field(default_factory=list)
    """What doesn't hold; empty if all does."""

    def added_p99(self, kind: Kind) -> float:
        """Return the seconds that the fault added to the 99th percentile of a kind of question; nan without any."""
        with_it, without = (_seconds(run, kind) for run in (self.outcomes, self.calm))
        return percentile(with_it, 0.99) - percentile(without, 0.99) if with_it and without else math.nan

    @property
    def num_allowed(self) -> int:
        """Requests that ended without an answer, as the fault allows."""
        return sum(one.end not in (End.WHOLE, End.LEFT) for one in self.outcomes) - len(self.lost)


def compare(fault: Fault, calm: list[Outcome], outcomes: list[Outcome], marks: list[Mark]) -> FaultResult:
    """Return what a fault did to the answers and to their times."""
    right = {one.question.number: one.text for one in calm if one.end is End.WHOLE}
    waited = [one for one in outcomes if one.question.leaves_after is None]
    lost = [one for one in waited if one.end is not End.WHOLE and not fault.may_fail(one)]
    whole = [one for one in waited if one.end is End.WHOLE]
    wrong = [one for one in whole if one.text != right.get(one.question.number)]
    result = FaultResult(fault, calm, outcomes, marks, lost, wrong)
    if lost:
        result.failures.append(f"{len(lost)} lost: {_summary(one.error or one.end for one in lost)}")
    if wrong:
        result.failures.append(f"{len(wrong)} wrong")
    for kind, limit in fault.limits.items():
        if (added := result.added_p99(kind)) > limit:
            result.failures.append(f"p99 of {kind}s + {added:.1f} s exceeds {limit:g} s")
    return result


def _seconds(run: Iterable[Outcome], kind: Kind) -> list[float]:
    return [one.seconds for one in run if one.question.kind is kind and one.end is End.WHOLE]


def _summary(reasons: Iterable[str]) -> str:
    counted = list(reasons)
    return ", ".join(f"{counted.count(reason)} × {reason}" for reason in dict.fromkeys(counted))


@dataclass(frozen=True)
class Bench:
    """How faults are run."""

    config: ServeConfig
    model: str
    """The model's name in requests."""
    num_requests: int = NUM_REQUESTS
    """Requests at once where a fault's load has ``NUM_REQUESTS``; all its numbers are in proportion."""
    show: Print = print
    """Called with each line that the service's processes write."""


async def run_faults(bench: Bench, faults: Sequence[Fault], done: Callable[[FaultResult], None]) -> list[FaultResult]:
    """Run the faults, one service for those in sequence that need the same one. ``done`` is called after each. Raises
    StartError when a service can't be started."""
    results = []
    for (topology, settings), group in itertools.groupby(faults, lambda fault: (fault.topology, fault.settings)):
        async with _service(bench, topology, settings) as service:
            await _warm_up(bench, service)
            for fault in group:
                result = await _run_one(bench, service, fault)
                if service.lost.done():
                    result.failures.append(f"the service ended: {service.lost.result()}")
                results.append(result)
                done(result)
                if service.lost.done():
                    break
    return results


@contextlib.asynccontextmanager
async def _service(bench: Bench, topology: str, settings: Mapping[str, Any]) -> AsyncIterator[LocalService]:
    config = bench.config.having({"served_model_name": bench.model, **settings})
    async with LocalService(config, Topology.parse(topology), bench.show) as service:
        await service.wait_until_ready()
        yield service


async def _run_one(bench: Bench, service: LocalService, fault: Fault) -> FaultResult:
    """Run a fault between two runs without it: one to compare with, and one after which nothing more may be held."""
    load = fault.load.scaled(bench.num_requests / NUM_REQUESTS)
    target = Target(os.getpid(), service.control, bench.config.cluster)
    client = Client(service.url, bench.model, load.concurrency)
    waiting = replace(load, leaving=0).questions(0.0)
    calm = await send(client, waiting, _salt())
    before = await _settled(service)
    duration = max(one.ended for one in calm)
    target.begin()
    acting = asyncio.ensure_future(_act(fault, target, fault.at * duration))
    outcomes = await _send_during(acting, replace(client, retries=fault.retries), load.questions(duration), fault.lasts)
    failed = await acting
    result = compare(fault, calm, outcomes, target.marks)
    result.failures += failed
    if lost := [one for one in calm if one.end is not End.WHOLE]:
        result.failures.append(f"{len(lost)} lost without a fault: {_summary(one.error or one.end for one in lost)}")
    if missing := await _wait_until_whole(service, target):
        result.failures.append(f"not ready after {WHOLE_TIMEOUT:g} s: {', '.join(missing)}")
    else:
        result.failures += await _aftermath(bench, service, waiting, calm, before)
    return result


async def _act(fault: Fault, target: Target, delay: float) -> list[str]:
    """Do the fault after a delay in seconds. Return why it couldn't be done."""
    await asyncio.sleep(delay)
    try:
        await fault.act(target)
    except TriptychError as error:
        return [f"the fault failed: {error}"]
    return []


async def _send_during(
    acting: asyncio.Future[Any], client: Client, questions: list[Question], lasts: bool
) -> list[Outcome]:
    """Send the questions, and those of a fault that lasts again and again until it is over."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    while not outcomes or (lasts and not acting.done()):
        outcomes += await send(client, questions, _salt(), began)
    return outcomes


async def _aftermath(
    bench: Bench, service: LocalService, questions: list[Question], calm: list[Outcome], before: Held
) -> list[str]:
    """Return what is wrong with the answers of a service that is whole again, and what it still holds."""
    after = await send(Client(service.url, bench.model, CALM_CONCURRENCY), questions, _salt())
    right = {one.question.number: one.text for one in calm}
    wrong = [one for one in after if (one.end, one.text) != (End.WHOLE, right[one.question.number])]
    failures = [f"{len(wrong)} lost or wrong after the fault"] if wrong else []
    more: list[str] = []
    for _ in range(round(RETURN_TIMEOUT / POLL_SECONDS)):
        more = (await held(os.getpid(), _urls(service))).more_than(before)
        if not more:
            return failures
        await asyncio.sleep(POLL_SECONDS)
    return [*failures, f"still held: {', '.join(more)}"]


async def _settled(service: LocalService) -> Held:
    """Return what the service holds once it is idle."""
    now = await held(os.getpid(), _urls(service))
    for _ in range(round(RETURN_TIMEOUT / POLL_SECONDS)):
        if not now.busy:
            break
        await asyncio.sleep(POLL_SECONDS)
        now = await held(os.getpid(), _urls(service))
    return now


async def _warm_up(bench: Bench, service: LocalService) -> None:
    """Let every instance connect to the others and use its memory for the first time."""
    questions = [Question(number, kind) for kind in Kind for number in range(CALM_CONCURRENCY)]
    for _ in range(2):
        answered = await send(Client(service.url, bench.model, len(questions)), questions, _salt())
        if failed := [one for one in answered if one.end is not End.WHOLE]:
            reasons = _summary(one.error or one.end for one in failed)
            raise StartError(f"the service doesn't answer without any fault: {reasons}")


async def _wait_until_whole(service: LocalService, target: Target) -> list[str]:
    """Wait until every process is ready, those that take the places of ended ones, too. Return the names of those that
    aren't in time."""
    for _ in range(round(WHOLE_TIMEOUT / POLL_SECONDS)):
        if service.lost.done():
            break
        if not target.ending and not service.missing and await _are_ready(_urls(service)):
            return []
        await asyncio.sleep(POLL_SECONDS)
    return target.ending or service.missing or ["the frontend"]


async def _are_ready(urls: Sequence[str]) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
            return all([(await http.get(f"{url}/ready")).status_code == httpx.codes.OK for url in urls])
    except httpx.TransportError:
        return False


def _urls(service: LocalService) -> list[str]:
    """Return where each frontend alone is reached."""
    return service.own_urls or [service.url]


def _salt() -> str:
    return secrets.token_hex(8)
