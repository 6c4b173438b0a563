"""Holds the view of a router that looks only at what has changed against one that looks at everything."""

from typing import Any

import msgspec

from triptych.observe.pipeline import Pipeline
from triptych.router.pipeline_view import PipelineView
from triptych.router.router import Router


class FollowedView:
    """A view that follows a router, whatever happens to it."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.view = PipelineView(router, "model")
        self.latest = self.view.snapshot()

    def look(self) -> Pipeline:
        """Take the next snapshot. It must be what a new view shows, and as the last one if the view says so."""
        before, was_current = self.latest, self.view.is_current
        self.latest = self.view.snapshot()
        assert not was_current or msgspec.structs.replace(before, time=self.latest.time) == self.latest
        assert _relative(self.latest) == _relative(PipelineView(self.router, "model").snapshot())
        return self.latest


def tokens_of(pipeline: Pipeline) -> list[int]:
    """The tokens of each request, in their order."""
    return [pipeline.tokens.get(mark.key, 0) for mark in pipeline.requests]


def _relative(pipeline: Pipeline) -> dict[str, Any]:
    """What two views of one router must agree on. Each has its own idea of the time of day, since these clocks are made
    up, and of when it counts tokens."""
    found = msgspec.to_builtins(pipeline)
    now = found.pop("time")
    del found["service"]["began"], found["tokens"]
    for mark in found["requests"]:
        mark["entered"] = round(now - mark["entered"], 2)
    return found
