"""Runs faults against services on this machine, and compares with the same questions without a fault."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.cluster.service import Service
from triptych.errors import StartError, TriptychError
from triptych.measure.chaos.bench import (
    WHOLE_TIMEOUT,
    Bench,
    fresh_salt,
    service_of,
    settled,
    still_held,
    summary,
    wait_until_whole,
)
from triptych.measure.chaos.faults import NUM_REQUESTS, Fault
from triptych.measure.chaos.load import Client, End, Outcome, send
from triptych.measure.chaos.questions import Kind, Question
from triptych.measure.chaos.target import Held, Mark, Target
from triptych.measure.load.client import percentile

CALM_CONCURRENCY = 16
"""Requests at once where no latency is compared."""
WARM_UP = (Kind.PICTURE, Kind.TEXT)


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
        result.failures.append(f"{len(lost)} lost: {summary(one.error or one.end for one in lost)}")
    if wrong:
        result.failures.append(f"{len(wrong)} wrong")
    for kind, limit in fault.limits.items():
        if (added := result.added_p99(kind)) > limit:
            result.failures.append(f"p99 of {kind}s + {added:.1f} s exceeds {limit:g} s")
    return result


def _seconds(run: Iterable[Outcome], kind: Kind) -> list[float]:
    return [one.seconds for one in run if one.question.kind is kind and one.end is End.WHOLE]


async def run_faults(bench: Bench, faults: Sequence[Fault], done: Callable[[FaultResult], None]) -> list[FaultResult]:
    """Run the faults, one service for those in sequence that need the same one. ``done`` is called after each. Raises
    StartError when a service can't be started."""
    results = []
    for (topology, settings), group in itertools.groupby(faults, lambda fault: (fault.topology, fault.settings)):
        async with service_of(bench, topology, settings) as service:
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


async def _run_one(bench: Bench, service: Service, fault: Fault) -> FaultResult:
    """Run a fault between two runs without it: one to compare with, and one after which nothing more may be held."""
    load = fault.load.scaled(bench.num_requests / NUM_REQUESTS)
    target = Target(os.getpid(), service.control, bench.config.cluster)
    client = Client(service.url, bench.model, load.concurrency)
    waiting = replace(load, leaving=0).questions(0.0)
    calm = await send(client, waiting, fresh_salt())
    before = await settled(service)
    duration = max(one.ended for one in calm)
    target.begin()
    acting = asyncio.ensure_future(_act(fault, target, fault.at * duration))
    outcomes = await _send_during(acting, replace(client, retries=fault.retries), load.questions(duration), fault.lasts)
    failed = await acting
    result = compare(fault, calm, outcomes, target.marks)
    result.failures += failed
    if lost := [one for one in calm if one.end is not End.WHOLE]:
        result.failures.append(f"{len(lost)} lost without a fault: {summary(one.error or one.end for one in lost)}")
    if missing := await wait_until_whole(service, target):
        result.failures.append(f"not ready after {WHOLE_TIMEOUT:g} s: {', '.join(missing)}")
    else:
        result.failures += await _aftermath(bench, service, waiting, calm, before)
    return result


async def _act(fault: Fault, target: Target, delay: float) -> list[str]:
    """Do the fault after a delay in seconds. Return why it couldn't be done."""
    await asyncio.sleep(delay)
    try:
        await fault.act.do(target)
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
        outcomes += await send(client, questions, fresh_salt(), began)
    return outcomes


async def _aftermath(
    bench: Bench, service: Service, questions: list[Question], calm: list[Outcome], before: Held
) -> list[str]:
    """Return what is wrong with the answers of a service that is whole again, and what it still holds."""
    after = await send(Client(service.url, bench.model, CALM_CONCURRENCY), questions, fresh_salt())
    right = {one.question.number: one.text for one in calm}
    wrong = [one for one in after if (one.end, one.text) != (End.WHOLE, right[one.question.number])]
    failures = [f"{len(wrong)} lost or wrong after the fault"] if wrong else []
    return failures + await still_held(service, before)


async def _warm_up(bench: Bench, service: Service) -> None:
    """Let every instance connect to the others and use its memory for the first time."""
    questions = [Question(number, kind) for kind in WARM_UP for number in range(CALM_CONCURRENCY)]
    for _ in range(2):
        answered = await send(Client(service.url, bench.model, len(questions)), questions, fresh_salt())
        if failed := [one for one in answered if one.end is not End.WHOLE]:
            reasons = summary(one.error or one.end for one in failed)
            raise StartError(f"the service doesn't answer without any fault: {reasons}")
