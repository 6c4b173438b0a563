"""Carries out rollouts: takes the steps that the policy decides, and reports them to the operator."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from triptych.cluster.child import ChildSpec
from triptych.cluster.local import LocalCluster
from triptych.cluster.revision import Revision
from triptych.cluster.rollout import Finish, GiveUp, Retire, Rollout, Start, Switch, Wait
from triptych.errors import TriptychError
from triptych.messages.codec import Send
from triptych.messages.operations import RolloutEnded, RolloutProgress, RolloutRefused, StartRollout
from triptych.types import Address

log = logging.getLogger(__name__)

LOOK_INTERVAL = 0.05
"""Most seconds between two looks at the processes."""
PROGRESS_INTERVAL = 1.0
"""Most seconds between two messages to the operator, who takes a longer silence for the end of the service."""


@dataclass(frozen=True)
class Plan:
    """What a rollout replaces processes by."""

    specs: Sequence[ChildSpec]
    """The new processes."""
    policy: Rollout | Revision
    drain_timeout: float
    """Seconds after which an old process is killed."""
    take_over: Callable[[str], object] = lambda _: None
    """Called with the name of a process when the new one takes over, before the old one ends."""
    end: Callable[[bool], object] = lambda _: None
    """Called at the end, with whether all processes were replaced."""


class Rollouts:
    """The rollouts of a service, one at a time. Used by one event loop."""

    def __init__(
        self,
        cluster: LocalCluster,
        plan: Callable[[StartRollout], Awaitable[Plan]],
        send: Send,
        disconnect: Callable[[Address], None],
    ) -> None:
        """``plan`` raises TriptychError for a rollout that isn't possible. ``send`` reaches operators, and
        ``disconnect`` closes the connection to one after the last message."""
        self.text = ""
        """What the rollout in progress does; empty without one."""
        self._cluster = cluster
        self._plan = plan
        self._send = send
        self._disconnect = disconnect
        self._task: asyncio.Task[None] | None = None

    def start(self, message: StartRollout) -> None:
        """Begin a rollout, or answer the operator why not."""
        if self._task is not None:
            self._refuse(message, f"a rollout is in progress: {self.text}")
        else:
            self.text = "checking what it would change"
            self._task = asyncio.create_task(self._run(message))

    def _refuse(self, message: StartRollout, reason: str) -> None:
        log.warning("refused a rollout: %s", reason)
        self._answer(message, RolloutRefused(reason))

    async def close(self) -> None:
        """End the rollout in progress, if there is one. Its processes stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, message: StartRollout) -> None:
        try:
            planning = asyncio.ensure_future(self._plan(message))
            while not (await asyncio.wait([planning], timeout=PROGRESS_INTERVAL))[0]:
                self._answer(message, RolloutProgress(self.text, 0, 0))  # large files take long to identify
            plan = planning.result()
        except TriptychError as error:
            self._refuse(message, str(error))
        except Exception:  # the operator must hear of it
            log.exception("couldn't plan a rollout")
            self._refuse(message, "an internal error, which is in the supervisor's log")
        else:
            await self._carry_out(message, plan)
        finally:
            self._task, self.text = None, ""

    async def _carry_out(self, message: StartRollout, plan: Plan) -> None:
        policy, reason = plan.policy, "the service is ending"
        log.info("rolling out: replacing %s", ", ".join(one.name for one in plan.specs))
        try:
            reason = await self._take_steps(message, plan)
        except Exception:  # the operator must hear of it
            log.exception("a rollout failed")
            reason = "an internal error, which is in the supervisor's log"
        finally:
            self._cluster.end_rollout()
            plan.end(not reason)
            outcome = f"{len(policy.replaced)} of {policy.total} replaced{'; ' * bool(reason)}{reason}"
            log.info("the rollout has ended: %s", outcome)
            self._answer(message, RolloutEnded(len(policy.replaced), policy.total, reason))

    async def _take_steps(self, message: StartRollout, plan: Plan) -> str:
        """Return why the rollout ends early; empty if it doesn't."""
        specs, policy, told = {spec.name: spec for spec in plan.specs}, plan.policy, 0.0
        while True:
            now = time.monotonic()
            step = policy.next({name: self._cluster.replacing(name) for name in specs}, now)
            before = self.text
            match step:
                case Start(name):
                    self._cluster.start_new(specs[name])
                    self.text = f"starting the new {name}"
                case Retire(name):
                    plan.take_over(name)
                    self._cluster.retire(specs[name], plan.drain_timeout)
                    self.text = f"draining the old {name}"
                case Switch(frontend, instances):
                    for spec in plan.specs:  # no old one is started again
                        self._cluster.promote(spec)
                    plan.take_over(frontend)
                    self._cluster.retire(specs[frontend], plan.drain_timeout)
                    self.text = f"{frontend} takes over, with {', '.join(instances)}"
                case Wait(_, why):
                    self.text = why
                case GiveUp(name, why, undo):
                    how = self._cluster.why_ended(name)
                    await asyncio.gather(*map(self._cluster.keep_old, undo))
                    kept = f"; {', '.join(undo)} {'stays as it was' if len(undo) == 1 else 'stay as they were'}"
                    return f"{name}: {why}{': ' + how if how else ''}{kept if undo else ''}"
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
        if not isinstance(answer, RolloutProgress):
            self._disconnect(message.reply_to)
