"""Changes the processes of a service while it serves: takes the steps that a policy decides, and reports them to the
operator."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.cluster.answers import Answers
from triptych.cluster.child import ChildSpec
from triptych.cluster.rollout import Finish, GiveUp, Remove, Replacing, Retire, Start, Step, Switch, Wait
from triptych.cluster.supervisor import Supervisor
from triptych.errors import TriptychError
from triptych.messages.operations import (
    ChangeEnded,
    ChangeProgress,
    ChangeRefused,
    StartChange,
)

log = logging.getLogger(__name__)

LOOK_INTERVAL = 0.05
"""Most seconds between two looks at the processes."""
PROGRESS_INTERVAL = 1.0
"""Most seconds between two messages to the operator, who takes a longer silence for the end of the service."""


class Policy(Protocol):
    """Decides the steps of one change."""

    done: list[str]
    """Names of the processes whose part of the change is complete."""
    total: int
    """Processes that change."""

    def next(self, seen: Mapping[str, Replacing], now: float) -> Step:
        """Return what to do now. ``seen`` has every process; a step that is returned must be taken."""


@dataclass(frozen=True)
class Plan:
    """How the processes change."""

    specs: Sequence[ChildSpec]
    """The new processes."""
    names: Sequence[str]
    """All processes that the policy has to see."""
    policy: Policy
    drain_timeout: float
    """Seconds after which an old process is killed."""
    summary: str
    """What is done, for the log."""
    warning: str = ""
    """What the operator should know, even if the change is complete."""
    finishing: Mapping[str, ChildSpec] = field(default_factory=dict)
    """How old processes are started again for the requests that an old frontend has to finish."""
    take_over: Callable[[str], object] = lambda _: None
    """Called with the name of a process when the new one takes over, before the old one ends."""
    end: Callable[[bool], object] = lambda _: None
    """Called at the end, with whether the change is complete."""


class Changes:
    """The changes of a service's processes, one at a time. Used by one event loop."""

    def __init__(
        self,
        supervisor: Supervisor,
        plan: Callable[[StartChange], Awaitable[Plan]],
        answer: Answers,
    ) -> None:
        """``plan`` raises TriptychError for a change that isn't possible."""
        self._kind = self._text = ""
        """The change in progress, and what it does; empty without one."""
        self._supervisor = supervisor
        self._plan = plan
        self._answer = answer
        self._task: asyncio.Task[None] | None = None

    @property
    def text(self) -> str:
        """What is in progress, and what it does; empty if nothing is."""
        return f"{self._kind} in progress: {self._text}" if self._kind else ""

    def start(self, message: StartChange) -> None:
        """Begin a change, or answer the operator why not."""
        if self._task is not None:
            self._refuse(message, f"a {self._kind} is in progress: {self._text}")
        else:
            self._kind, self._text = message.kind, "checking what it would change"
            self._task = asyncio.create_task(self._run(message))

    def _refuse(self, message: StartChange, reason: str) -> None:
        log.warning("refused a %s: %s", message.kind, reason)
        self._answer(message.reply_to, ChangeRefused(reason))

    async def close(self) -> None:
        """End the change in progress, if there is one. Its processes stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, message: StartChange) -> None:
        try:
            planning = asyncio.ensure_future(self._plan(message))
            while not (await asyncio.wait([planning], timeout=PROGRESS_INTERVAL))[0]:
                self._answer(message.reply_to, ChangeProgress(self._text, 0, 0))  # large files take long to identify
            plan = planning.result()
        except TriptychError as error:
            self._refuse(message, str(error))
        except Exception:  # the operator must hear of it
            log.exception("couldn't plan a %s", self._kind)
            self._refuse(message, "an internal error, which is in the supervisor's log")
        else:
            await self._carry_out(message, plan)
        finally:
            self._task, self._kind, self._text = None, "", ""

    async def _carry_out(self, message: StartChange, plan: Plan) -> None:
        policy, reason = plan.policy, "the service is ending"
        log.info("%s", plan.summary)
        try:
            reason = await self._take_steps(message, plan)
        except Exception:  # the operator must hear of it
            log.exception("a %s failed", self._kind)
            reason = "an internal error, which is in the supervisor's log"
        finally:
            self._supervisor.end_change()
            plan.end(not reason)
            outcome = f"{len(policy.done)} of {policy.total} {message.outcome}{'; ' * bool(reason)}{reason}"
            log.info("the %s has ended: %s", self._kind, outcome)
            self._answer(message.reply_to, ChangeEnded(len(policy.done), policy.total, reason))

    async def _take_steps(self, message: StartChange, plan: Plan) -> str:
        """Return why the change ends early; empty if it doesn't."""
        specs, policy, told = {spec.name: spec for spec in plan.specs}, plan.policy, 0.0
        if plan.warning:
            log.warning("%s", plan.warning)
            self._answer(message.reply_to, ChangeProgress(f"warning: {plan.warning}", 0, policy.total))
        while True:
            now = self._supervisor.clock.now()
            step = policy.next({name: self._supervisor.replacing(name) for name in plan.names}, now)
            before = self._text
            match step:
                case Start(name):
                    self._text = f"starting {'the new ' * self._supervisor.has(name)}{name}"
                    self._supervisor.start_new(specs[name])
                case Retire(name):
                    plan.take_over(name)
                    self._supervisor.retire(specs[name], plan.drain_timeout)
                    self._text = f"draining the old {name}"
                case Remove(name):
                    self._supervisor.remove(name, plan.drain_timeout)
                    self._text = f"draining {name}"
                case Switch(frontend, instances):
                    for spec in plan.specs:
                        self._supervisor.promote(spec, plan.finishing.get(spec.name))
                    plan.take_over(frontend)
                    self._supervisor.retire(specs[frontend], plan.drain_timeout)
                    self._text = f"{frontend} takes over, with {', '.join(instances)}"
                case Wait(name, why):
                    pending = self._supervisor.pending(name)
                    self._text = f"{why}{': ' * bool(pending)}{pending}"
                case GiveUp(name, why, undo):
                    how = self._supervisor.why_ended(name) or self._supervisor.pending(name)
                    await asyncio.gather(*map(self._supervisor.keep_old, undo))
                    return f"{name}: {why}{': ' + how if how else ''}{self._kept(undo)}"
                case Finish():
                    return ""
            if self._text != before or now - told >= PROGRESS_INTERVAL:
                told = now
                self._answer(message.reply_to, ChangeProgress(self._text, len(policy.done), policy.total))
            await asyncio.sleep(LOOK_INTERVAL)

    def _kept(self, names: Sequence[str]) -> str:
        """Return which of these processes still exist, for the end of a message."""
        kept = [name for name in names if self._supervisor.has(name)]
        return f"; {', '.join(kept)} {'stays as it was' if len(kept) == 1 else 'stay as they were'}" if kept else ""
