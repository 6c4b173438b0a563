"""Walks: serves a model, lets happen what a plan says while clients ask, and judges what they got and what is left."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
    wait_until_whole,
)
from triptych.measure.chaos.load import Client, End, Outcome, asking, send
from triptych.measure.chaos.media_server import HOST, media_server
from triptych.measure.chaos.questions import Kind, Question
from triptych.measure.chaos.target import Mark, Target
from triptych.measure.chaos.walk import Ground, TimedAct
from triptych.topology import Role

SHARE = 4
"""A walk has a client for this many of a bench's requests at once."""
NUM_QUESTIONS = 64
KINDS = {
    Kind.PICTURE: 22,
    Kind.TEXT: 14,
    Kind.VIDEO: 5,
    Kind.TOOLS: 2,
    Kind.JSON: 4,
    Kind.LINK: 4,
    Kind.BROKEN_LINK: 6,
    Kind.HOSTILE: 16,
}
"""How many questions of each kind there are, of ``NUM_QUESTIONS`` or some more."""
LENGTHS = (8, 24, 60)
"""Tokens of an answer."""
LEAVING, LEAVES_WITHIN = 0.15, 1.5
"""Share of the clients that disconnect, and the seconds within which they do."""
FRESH = 0.6
"""Share of the requests for which nothing that others left in a cache is used."""
REQUEST_TIMEOUT = 120.0
"""Seconds until a request's deadline."""
LATE_SECONDS = 30.0
"""Seconds beyond its deadline after which a request counts as stuck."""
ACT_SECONDS = 300.0
"""Seconds in which everything that a plan does must be over, after its last step."""
RESTORE_SECONDS = 240.0
"""Seconds in which roles, numbers of instances and the model must be what they were."""
PAUSE_SECONDS = 0.2
"""Seconds that a client waits after an error, and an operator before another attempt."""
SERVER_FAULTS = 500
"""Status from which an error isn't the request's fault."""


@dataclass(frozen=True)
class Answer:
    """What must come back for a question."""

    end: End
    error: str
    text: str

    @classmethod
    def of(cls, outcome: Outcome) -> "Answer":
        return cls(outcome.end, outcome.error, outcome.text)


@dataclass
class Served:
    """Which checkpoints may have answered at which time."""

    spans: list[tuple[float, frozenset[Path]]]
    """From that moment on one of these; in the order of time."""

    def may(self, begun: float, ended: float) -> frozenset[Path]:
        """Return those that may have answered a request."""
        until = [at for at, _ in self.spans[1:]] + [float("inf")]
        pairs = zip(self.spans, until, strict=True)
        return frozenset().union(*(ones for (at, ones), end in pairs if at <= ended and end >= begun))

    @property
    def now(self) -> frozenset[Path]:
        return self.spans[-1][1]


@dataclass
class WalkResult:
    """What a walk showed."""

    outcomes: list[Outcome] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    """Steps that couldn't be done, and why."""
    failures: list[str] = field(default_factory=list)
    """What doesn't hold; empty if all does."""


Say = Callable[[str], object]


async def run_walk(
    bench: Bench, steps: Sequence[TimedAct], ground: Ground, seconds: float | None, say: Say
) -> WalkResult:
    """Do a walk's steps while clients ask, for so long, or until the steps are over if it is None. ``say`` is given
    lines about its progress. Raises StartError when the service doesn't start, or doesn't answer before the first
    step."""
    async with contextlib.AsyncExitStack() as stack:
        media = await stack.enter_async_context(media_server())
        service = await stack.enter_async_context(service_of(bench, str(ground.topology), _settings(media)))
        walk = Walk(bench, ground, service, questions(media), say)
        await walk.learn(any(step.act.models for step in steps))
        await walk.go(steps, seconds)
        return walk.result


def _settings(media: str) -> dict[str, object]:
    return {
        "allowed_media_domains": (media.removeprefix("http://"),),
        "allowed_media_networks": (f"{HOST}/32",),
        "request_timeout": REQUEST_TIMEOUT,
        "drain_timeout": REQUEST_TIMEOUT,  # a shorter one ends requests that wait for an instance to start
        "inject_faults": "device=0",  # it breaks by a signal alone
    }


def questions(media: str) -> list[Question]:
    """Return the questions that a walk's clients choose from. ``media`` is the URL of the server of pictures."""
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    return [
        Question(number, kind, tokens=LENGTHS[number % len(LENGTHS)], media=media) for number, kind in enumerate(kinds)
    ]


class Walk:
    """One walk on a service."""

    def __init__(self, bench: Bench, ground: Ground, service: Service, asked: Sequence[Question], say: Say) -> None:
        self.result = WalkResult()
        self._bench = bench
        self._ground = ground
        self._service = service
        self._questions = asked
        self._say = say
        self._target = Target(os.getpid(), service.control, bench.config.cluster)
        self._client = Client(
            service.url,
            bench.model,
            max(1, bench.num_requests // SHARE),
            retries=True,
            hung_seconds=REQUEST_TIMEOUT + LATE_SECONDS,
        )
        self._right: dict[Path, dict[int, Answer]] = {}
        self._served = Served([(0.0, frozenset({ground.model}))])

    # ── before ───────────────────────────────────────────────────────────────────────────────────────────────

    async def learn(self, with_other: bool) -> None:
        """Learn the right answers of the model, and of the other one. Raises StartError where there are none, and
        TriptychError when the other model can't be rolled out."""
        model, other = self._ground.model, self._ground.other
        self._right[model] = await self._calm(model)
        if with_other:
            await self._target.roll_out(str(other))
            self._right[other] = await self._calm(other)
            await self._target.roll_out(str(model))
        if await self._calm(model) != self._right[model]:
            raise StartError("the same questions have other answers the second time, without any fault")
        told = sum(self._right[model][number] != right for number, right in self._right.get(other, {}).items())
        self._say(f"{len(self._questions)} questions have answers; {told} have others by the other model")

    async def _calm(self, model: Path) -> dict[int, Answer]:
        outcomes = await send(self._client, self._questions, fresh_salt())
        for one in outcomes:
            if one.end not in (End.WHOLE, End.ERROR) or one.status >= SERVER_FAULTS:
                raise StartError(f"no answer without any fault of {model}: {described(one)}")
        return {one.question.number: Answer.of(one) for one in outcomes}

    # ── the walk ─────────────────────────────────────────────────────────────────────────────────────────────

    async def go(self, steps: Sequence[TimedAct], seconds: float | None) -> None:
        """Do the steps while clients ask, as in ``run_walk``, restore what they changed, and judge."""
        before = await settled(self._service)
        self._target.begin()
        began, ending = time.monotonic(), asyncio.Event()
        async with asking(self._client, began) as ask:
            clients = [
                asyncio.create_task(self._ask(ask, random.Random(number), ending))
                for number in range(self._client.concurrency)
            ]
            acting = [asyncio.create_task(self._do(step, began)) for step in steps]
            over: list[asyncio.Future[Any]] = [self._service.lost]
            if seconds is None:
                over.append(asyncio.gather(*acting))
            await asyncio.wait(over, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            ending.set()
            await self._join(acting, ACT_SECONDS, "a step isn't over")
            await self._join(clients, REQUEST_TIMEOUT + 2 * LATE_SECONDS, "a client isn't done")
        result = self.result
        result.marks = self._target.marks
        result.failures += judge(result.outcomes, self._right, self._served, self._kills)
        if self._service.lost.done():
            result.failures.append(f"the service ended: {self._service.lost.result()}")
            return
        await self._restore()
        if missing := await wait_until_whole(self._service, self._target):
            result.failures.append(f"not ready after {WHOLE_TIMEOUT:g} s: {', '.join(missing)}")
            return
        after = await send(self._client, self._questions, fresh_salt())
        right = self._right[self._ground.model]
        bad = [one for one in after if Answer.of(one) != right[one.question.number]]
        result.failures += [f"after the walk, lost or wrong: {described(one)}" for one in bad]
        result.failures += await still_held(self._service, before)

    @property
    def _kills(self) -> list[float]:
        """When frontends were killed, whose connections ended."""
        return [mark.at for mark in self._target.marks if mark.what.startswith("SIGKILL frontend")]

    async def _join(self, tasks: Sequence[asyncio.Task[None]], seconds: float, late: str) -> None:
        """Wait for tasks, and end those that are late, which is a failure each."""
        _, pending = await asyncio.wait(tasks, timeout=seconds) if tasks else ((), ())
        for task in pending:
            task.cancel()
            self.result.failures.append(f"stuck: {late} after {seconds:g} s: {task.get_name()}")
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()):
                raise error

    async def _ask(
        self, ask: Callable[[Question, bytes], Awaitable[Outcome]], rng: random.Random, ending: asyncio.Event
    ) -> None:
        while not ending.is_set():
            one = rng.choice(self._questions)
            if rng.random() < LEAVING:
                one = replace(one, leaves_after=rng.uniform(0.001, LEAVES_WITHIN))
            salt = fresh_salt() if rng.random() < FRESH else ""
            outcome = await ask(one, one.body(self._bench.model, salt))
            self.result.outcomes.append(outcome)
            if outcome.end is not End.WHOLE:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _do(self, step: TimedAct, began: float) -> None:
        """Do a step at its time. What can't be done is no failure: a change is refused while another is under way."""
        await asyncio.sleep(began + step.at - time.monotonic())
        self._say(str(step))
        earlier = self._served.now
        if step.act.models:
            self._may_serve(earlier.union(step.act.models), began)
        try:
            await step.act.do(self._target)
        except TriptychError as error:
            self.result.undone.append(f"{step.act.what}: {error}")
            self._say(f"          not done: {step.act.what}: {error}")
        else:
            if step.act.models:
                self._may_serve(frozenset(step.act.models[-1:]), began)

    def _may_serve(self, models: frozenset[Path], began: float) -> None:
        self._served.spans.append((time.monotonic() - began, models))

    # ── after ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _restore(self) -> None:
        """Bring back roles, numbers of instances and the model, once changes that are under way have ended."""
        deadline = time.monotonic() + RESTORE_SECONDS
        for what, attempt in (
            ("roles", self._restore_roles),
            ("numbers of instances", self._restore_counts),
            ("the model", self._restore_model),
        ):
            while True:
                try:
                    await attempt()
                    break
                except TriptychError as error:
                    if time.monotonic() > deadline:
                        self.result.failures.append(f"stuck: {what} can't be restored: {error}")
                        break
                await asyncio.sleep(PAUSE_SECONDS)

    async def _restore_roles(self) -> None:
        def restore() -> None:
            with self._target.operating() as client:
                for one in client.status().instances:
                    role = Role(one.name.rstrip("0123456789").upper())
                    if one.role is not role:
                        client.set_role(one.name, role, REQUEST_TIMEOUT, force=True)

        await asyncio.to_thread(restore)

    async def _restore_counts(self) -> None:
        def restore() -> None:
            with self._target.operating() as client:
                for _ in client.scale(dict(self._ground.topology.groups)):
                    pass

        await asyncio.to_thread(restore)

    async def _restore_model(self) -> None:
        if self._served.now != {self._ground.model}:
            await self._target.roll_out(str(self._ground.model))


def judge(
    outcomes: Iterable[Outcome],
    right: Mapping[Path, Mapping[int, Answer]],
    served: Served,
    kills: Sequence[float],
) -> list[str]:
    """Return what is lost, wrong or stuck. ``kills`` are the moments at which a frontend was killed, and the only ones
    at which connections may break."""
    failures = []
    for one in outcomes:
        answers = [right[model][one.question.number] for model in served.may(one.sent, one.ended)]
        if verdict := _verdict(one, answers, any(one.sent <= at <= one.ended for at in kills)):
            failures.append(f"{verdict}: {described(one)}")
    return failures


def _verdict(one: Outcome, answers: Sequence[Answer], killed: bool) -> str:
    if one.end is End.HUNG:
        return "stuck"
    if one.broken and not killed:
        return "the connection broke, and no frontend was killed"
    if one.end is End.LEFT:
        return "" if any(answer.text.startswith(one.text) for answer in answers) else "wrong"
    if Answer.of(one) in answers:
        return ""
    return "wrong" if one.end is End.WHOLE else "lost"


def described(one: Outcome) -> str:
    """Return a line about what a client got."""
    text = f" {one.text!r}" if one.text else ""
    error = f" {one.status} {one.error}" if one.error else ""
    return (
        f"{one.question.kind} {one.question.number}, {one.sent:.1f} to {one.ended:.1f} s, "
        f"{one.broken} connections broke: {one.end}{error}{text}"
    )


def walk_lines(result: WalkResult) -> list[str]:
    """Return what a walk showed, for a terminal."""
    ends = [one.end for one in result.outcomes]
    counted = ", ".join(f"{ends.count(end)} {end}" for end in End if end in ends)
    slowest = max((one.seconds for one in result.outcomes), default=0.0)
    retried = sum(one.broken > 0 for one in result.outcomes)
    said = f"{len(ends)} requests: {counted}; {retried} asked again; slowest {slowest:.1f} s"
    return [said, *result.failures, "fails" if result.failures else "holds"]
