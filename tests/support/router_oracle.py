"""What may go on in a router, by rules of its own: simple ones, that look at all requests and all instances."""

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from triptych.fair_queue import Ticket
from triptych.router.admission import RECOVERED_PRIORITY
from triptych.router.caches import PartName
from triptych.router.encode_dispatcher import (
    CACHED_CREDITS,
    LONG_ITEMS_PER_CLIENT,
    EncodeDispatcherState,
)
from triptych.router.encode_tasks import EncodeTask, ItemKind
from triptych.router.instance import Instance, WorkKind
from triptych.router.quarantine import MAX_LOSSES
from triptych.router.request_state import RequestState
from triptych.router.router import Router


def waits_in_vain(router: Router) -> Iterator[str]:
    """Yield what waits although an instance has room for it and may have it."""
    members, lifecycle, encode = router.membership, router.lifecycle, router.debug_state().encode
    for state in _heads(lifecycle.admission.queued()):
        fitting = [one for one in members.serving_instances() if _has_room(state, one) and _may_be(router, state, one)]
        yield from (f"request {state.id} for {one.name}" for one in fitting)
    prefills = members.prefill_instances(begun=True)
    for state in lifecycle.requests:
        if state.prefill_needed is not None and state.prefill is None:
            fitting = [one for one in prefills if _may_be(router, state, one)]
            fitting = fitting if prefills else members.serving_instances()
            yield from (f"prompt of {state.id} for {one.name}" for one in fitting)
    encoders = [_Encoder(encode, one) for one in members.encode_instances(begun=True)]
    for ticket in _foremost(encode.queued, encoders):
        task, of = ticket.work, lifecycle.requests.get(ticket.work.request)
        assert of is not None, "items are released when their request ends"
        if any(one.takes(ticket.kind) for one in encoders):
            allowed = [one for one in encoders if _may_be(router, of, one.instance)]
            soonest = min([one.cost_until_done(task) for one in allowed if one.encodes_part(task)], default=math.inf)
            for one in allowed:  # it may wait for what is being encoded, unless it would be done sooner
                if one.has_capacity(task) and (one.encodes_part(task) or one.cost_until_done(task) < soonest):
                    yield f"item {task.transfer} for {one.instance.name}"


def false_accounts(router: Router) -> Iterator[str]:
    """Yield the accounts of instances that are not those of the requests and items in flight."""
    books = router.debug_state()
    for instance in router.membership:
        requests = [one for one in books.requests.values() if one.decode and one.decode.instance is instance]
        prompts = [one.prefill for one in books.requests.values() if one.prefill and one.prefill.instance is instance]
        items = [one for one in books.encode.unfinished if one.instance is instance]
        cost = sum(one.token_cost for one in requests) + sum(one.cost for one in [*prompts, *items])
        nums = {
            WorkKind.READY: sum(not one.may_stall for one in requests),
            WorkKind.MAY_STALL: sum(one.may_stall for one in requests),
            WorkKind.PROMPT: len(prompts),
            WorkKind.ITEM: sum(not one.long for one in items),
            WorkKind.LONG_ITEM: sum(one.long for one in items),
        }
        account = instance.account
        true = cost, sum(one.patches for one in items), nums
        found = account.outstanding, account.patches, {kind: account.num(kind) for kind in WorkKind}
        if found != true:
            yield f"{instance.name} has {found}, not {true}"


def _heads(queued: list[RequestState]) -> Iterator[RequestState]:
    """Yield the first request of each client, priority and kind: the others come after it."""

    def queue(state: RequestState) -> tuple[str, int, bool]:
        priority = min(state.priority, RECOVERED_PRIORITY) if state.num_dispatches else state.priority
        return state.client, priority, state.may_stall

    for _, states in groupby(sorted(queued, key=queue), key=queue):
        yield next(states)


def _foremost(queued: Sequence[Ticket[EncodeTask]], encoders: Sequence["_Encoder"]) -> Iterator[Ticket[EncodeTask]]:
    """Yield the items that no other one of their client, priority and kind holds up. Those of which an instance encodes
    a part hold up none."""

    def queue(ticket: Ticket[EncodeTask]) -> tuple[str, int, str]:
        return ticket.client, ticket.priority, repr(ticket.kind)

    for _, tickets in groupby(sorted(queued, key=lambda one: (queue(one), one.number)), key=queue):
        for ticket in tickets:
            yield ticket
            if not any(one.encodes_part(ticket.work) for one in encoders):
                break


def _has_room(state: RequestState, instance: Instance) -> bool:
    kinds = (WorkKind.READY, WorkKind.MAY_STALL) if state.may_stall else (WorkKind.READY,)
    return all(instance.account.num(kind) < instance.credit.requests for kind in kinds)


def _may_be(router: Router, state: RequestState, instance: Instance) -> bool:
    """Return whether a request that may end its instances would be alone with that at an instance."""
    if state.losses < MAX_LOSSES - 1:
        return True
    encodes = router.debug_state().encode.unfinished
    encoded = {one.task.request for one in encodes if one.instance is instance}
    others = [one for one in router.lifecycle.requests if one is not state and _is_on_trial(one)]
    if state.works_on(instance):
        return not any(one.id in encoded for one in others)
    return not any(one.id in encoded or one.works_on(instance) for one in others)


def _is_on_trial(state: RequestState) -> bool:
    return state.losses == MAX_LOSSES - 1 and state.decode is not None and not state.has_answered


class _Encoder:
    """An encode instance, and what it has not finished."""

    def __init__(self, encode: EncodeDispatcherState, instance: Instance) -> None:
        self.instance = instance
        self.credit = instance.credit
        items = [one for one in encode.unfinished if one.instance is instance]
        self.patches = sum(one.patches for one in items)
        self.clients = [one.task.client for one in items if one.long]
        self.encodes = {name for one in items for name in one.encodes}
        self.costs = [(one.cost, one.long) for one in items]

    def takes(self, kind: Hashable) -> bool:
        """Return whether it has capacity for some items that were queued as such a kind."""
        match kind:
            case ItemKind.SHORT:
                return self.patches < self.credit.patches
            case ItemKind.LONG:
                return len(self.clients) < self.credit.long_items
            case ItemKind.CACHED:
                return self.patches < CACHED_CREDITS * self.credit.patches
        return True

    def has_part(self, name: PartName) -> bool:
        return name in self.instance.encoded or name in self.encodes

    def encodes_part(self, task: EncodeTask) -> bool:
        return not self.encodes.isdisjoint(task.part_names)

    def cost_until_done(self, task: EncodeTask) -> float:
        """Return the cost of what it does until it has an item's rows."""
        before = sum(min(cost, task.cost) if long else cost for cost, long in self.costs)
        numbers = [number for number, name in zip(task.parts, task.part_names, strict=True) if not self.has_part(name)]
        return before + sum(task.item.plan.parts[number].cost for number in numbers)

    def has_capacity(self, task: EncodeTask) -> bool:
        """Return whether it has capacity for an item."""
        if all(map(self.has_part, task.part_names)):
            return self.patches < CACHED_CREDITS * self.credit.patches
        if not task.item.plan.is_time_sliced(self.instance.capacity.encode_batch_patches):
            return self.patches < self.credit.patches
        own = self.clients.count(task.client)
        return len(self.clients) < self.credit.long_items and own < LONG_ITEMS_PER_CLIENT
