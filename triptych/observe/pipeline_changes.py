"""What changes from one snapshot to the next. Most of a snapshot is as it was a tenth of a second before.

A viewer gets a whole snapshot first, and whenever it has missed changes.
"""

from itertools import zip_longest

from msgspec import UNSET, Struct, UnsetType, structs

from triptych.observe.pipeline import EventView, InstanceView, Pipeline, RequestMark, ServiceView, StageView, Verdict


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
    events: list[EventView] | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET


def changes(before: Pipeline, after: Pipeline) -> PipelineChanges:
    """Return what has changed. Requests that are in both snapshots must have the same order there, and come before
    those that are new: they are in the order of their arrival."""
    known = {mark.key: mark for mark in before.requests}
    return PipelineChanges(
        time=after.time,
        service=UNSET if after.service == before.service else after.service,
        stages=UNSET if after.stages == before.stages else after.stages,
        instances=UNSET if after.instances == before.instances else _differing(before.instances, after.instances),
        # the first comparison is the quicker one, and mostly enough
        requests=[mark for mark in after.requests if (was := known.pop(mark.key, None)) is not mark and was != mark],
        gone=list(known),
        events=UNSET if after.events == before.events else after.events,
        verdict=UNSET if after.verdict == before.verdict else after.verdict,
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
        events=before.events if news.events is UNSET else news.events,
        verdict=before.verdict if news.verdict is UNSET else news.verdict,
    )


def _differing(before: list[InstanceView], after: list[InstanceView]) -> list[InstanceView | None]:
    pairs = zip_longest(after, before[: len(after)])
    return [None if one == was else one for one, was in pairs]
