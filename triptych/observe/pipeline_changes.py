"""What changes from one snapshot to the next. Most of a snapshot is as it was a tenth of a second before.

A viewer gets a whole snapshot first, and whenever it has missed changes.
"""

from itertools import zip_longest
from typing import TypeVar

from msgspec import UNSET, Struct, UnsetType, structs

from triptych.observe.pipeline import EventView, InstanceView, Pipeline, RequestMark, ServiceView, StageView, Verdict

Part = TypeVar("Part")


class PipelineChanges(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="changes"):
    """The fields of a ``Pipeline`` that aren't as in the one before."""

    time: float
    service: ServiceView | UnsetType = UNSET
    stages: list[StageView] | UnsetType = UNSET
    instances: list[InstanceView | None] | UnsetType = UNSET
    """None for one that is as that at its place was before."""
    requests: list[RequestMark] = []
    """Those that have changed, at the places that they had, and those that are new, after all others."""
    gone: list[str] = []
    """Keys of requests."""
    tokens: dict[str, int] | UnsetType = UNSET
    """Tokens by request, for all requests."""
    events: list[EventView] | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the time has changed."""
        return self == PipelineChanges(self.time)


def changes(before: Pipeline, after: Pipeline) -> PipelineChanges:
    """Return what has changed. Requests that are in both snapshots must have the same order there, and come before
    those that are new: they are in the order of their arrival."""
    requests, gone = _changed_marks(before.requests, after.requests)
    instances = _if_other(before.instances, after.instances)
    return PipelineChanges(
        time=after.time,
        service=_if_other(before.service, after.service),
        stages=_if_other(before.stages, after.stages),
        instances=UNSET if instances is UNSET else _differing(before.instances, instances),
        requests=requests,
        gone=gone,
        tokens=_if_other(before.tokens, after.tokens),
        events=_if_other(before.events, after.events),
        verdict=_if_other(before.verdict, after.verdict),
    )


def changed(before: Pipeline | None, news: Pipeline | PipelineChanges) -> Pipeline:
    """Return the snapshot after that one. Raises ValueError for changes without it."""
    if isinstance(news, Pipeline):
        return news
    if before is None:
        raise ValueError("changes came before a whole snapshot")
    marks = {mark.key: mark for mark in before.requests}
    for key in news.gone:
        marks.pop(key, None)
    marks.update((mark.key, mark) for mark in news.requests)
    instances = before.instances
    if news.instances is not UNSET:
        pairs = zip(news.instances, [*before.instances, *[None] * len(news.instances)], strict=False)
        instances = [one for new, old in pairs if (one := new or old) is not None]
    return structs.replace(
        before,
        time=news.time,
        service=before.service if news.service is UNSET else news.service,
        stages=before.stages if news.stages is UNSET else news.stages,
        instances=instances,
        requests=list(marks.values()),
        tokens=before.tokens if news.tokens is UNSET else news.tokens,
        events=before.events if news.events is UNSET else news.events,
        verdict=before.verdict if news.verdict is UNSET else news.verdict,
    )


def _if_other(before: Part, after: Part) -> Part | UnsetType:
    """Return ``after`` unless it is as before, which mostly is the same object."""
    return UNSET if after is before or after == before else after


def _changed_marks(before: list[RequestMark], after: list[RequestMark]) -> tuple[list[RequestMark], list[str]]:
    """Return the marks that have changed or are new, and the keys of those that are gone."""
    if after is before:
        return [], []
    known = {mark.key: mark for mark in before}
    changed = [mark for mark in after if (was := known.pop(mark.key, None)) is not mark and was != mark]
    return changed, list(known)


def _differing(before: list[InstanceView], after: list[InstanceView]) -> list[InstanceView | None]:
    pairs = zip_longest(after, before[: len(after)])
    return [None if one == was else one for one, was in pairs]
