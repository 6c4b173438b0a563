"""Carries out rollouts: takes the steps that the policy decides, and reports them to the operator."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.cluster.child import ChildSpec
from triptych.cluster.local import LocalCluster
from triptych.cluster.rollout import Finish, GiveUp, Replaceable, Retire, Rollout, Start, Wait
from triptych.errors import ConfigError, TriptychError
from triptych.messages.codec import Send
from triptych.messages.work import RolloutEnded, RolloutProgress, RolloutRefused, StartRollout

log = logging.getLogger(__name__)

LOOK_INTERVAL = 0.05
"""Most seconds between two looks at the processes."""
PROGRESS_INTERVAL = 1.0
"""Most seconds between two messages to the operator, who takes a longer silence for the end of the service."""


@dataclass(frozen=True)
class Plan:
    """What a rollout replaces processes by."""

    specs: Sequence[ChildSpec]
    """The new processes, in the order in which they replace those of their names."""
    surge: bool
    """Whether a new instance runs beside the old one."""
    step_timeout: float
    """Seconds that each step of a replacement may take."""
    drain_timeout: float
    """Seconds after which an old process is killed."""
    done: Callable[[], object]
    """Called once all processes were replaced."""

    @property
    def policy(self) -> Rollout:
        # the frontends share one socket for HTTP and one control address, which instances know
        processes = {one.name: Replaceable(one.groups, self.surge and one.role is not None) for one in self.specs}
        return Rollout(processes, self.step_timeout)


class Rollouts:
    """The rollouts of a service, one at a time. Used by one event loop."""

    def __init__(self, cluster: LocalCluster, plan: Callable[[StartRollout], Plan], send: Send) -> None:
        """``plan`` raises TriptychError for a rollout that isn't possible. ``send`` reaches operators."""
        self.text = ""
        """What the rollout in progress does; empty without one."""
        self._cluster = cluster
        self._plan = plan
        self._send = send
        self._task: asyncio.Task[None] | None = None

    def start(self, message: StartRollout) -> None:
        """Begin a rollout, or answer the operator why not."""
        try:
            if self._task is not None:
                raise ConfigError(f"a rollout is in progress: {self.text}")
            plan = self._plan(message)
        except TriptychError as error:
            log.warning("refused a rollout: %s", error)
            self._answer(message, RolloutRefused(str(error)))
            return
        log.info("rolling out: replacing %s", ", ".join(one.name for one in plan.specs))
        self._task = asyncio.create_task(self._run(message, plan))

    async def close(self) -> None:
        """End the rollout in progress, if there is one. Its processes stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, message: StartRollout, plan: Plan) -> None:
        policy, reason = plan.policy, "the service is ending"
        try:
            reason = await self._take_steps(message, plan, policy)
            if not reason:
                plan.done()
        except Exception:  # the operator must hear of it
            log.exception("a rollout failed")
            reason = "an internal error, which is in the log"
        finally:
            self._task, self.text = None, ""
            self._cluster.end_rollout()
            log.info("the rollout has ended: %d of %d replaced%s", len(policy.replaced), policy.total,
                     f"; {reason}" if reason else "")  # fmt: skip
            self._answer(message, RolloutEnded(len(policy.replaced), policy.total, reason))

    async def _take_steps(self, message: StartRollout, plan: Plan, policy: Rollout) -> str:
        """Return why the rollout ends early; empty if it doesn't."""
        specs, told = {spec.name: spec for spec in plan.specs}, 0.0
        while True:
            now = time.monotonic()
            step = policy.next({name: self._cluster.replacing(name) for name in specs}, now)
            before = self.text
            match step:
                case Start(name):
                    self._cluster.start_new(specs[name])
                    self.text = f"starting the new {name}"
                case Retire(name):
                    self._cluster.retire(specs[name], plan.drain_timeout)
                    self.text = f"draining the old {name}"
                case Wait(why):
                    self.text = why
                case GiveUp(name, why):
                    how = await self._cluster.keep_old(name)
                    return f"{name} stays as it was: {why}{': ' + how if how else ''}"
                case Finish():
                    return ""
            if self.text != before or now - told >= PROGRESS_INTERVAL:
                told = now
                self._answer(message, RolloutProgress(self.text, len(policy.replaced), policy.total))
            await asyncio.sleep(LOOK_INTERVAL)

    def _answer(self, message: StartRollout, answer: RolloutRefused | RolloutProgress | RolloutEnded) -> None:
        try:
            self._send(message.reply_to, answer)
        except TriptychError as error:
            log.debug("couldn't answer an operator: %s", error)
