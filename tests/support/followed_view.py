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
        self.view = self._new()
        self.latest = self.view.snapshot()

    def look(self) -> Pipeline:
        """Take the next snapshot. It must be what a new view shows, and as the last one if the view says so."""
        before, was_current = self.latest, self.view.is_current
        self.latest = self.view.snapshot()
        assert not was_current or msgspec.structs.replace(before, time=self.latest.time) == self.latest
        assert _shared(self.latest) == _shared(self._new().snapshot())
        return self.latest

    def _new(self) -> PipelineView:
        """A view whose time of day and monotonic clock are the router's: how long a test takes changes nothing."""
        return PipelineView(self.router, "model", wall=self.router.clock, monotonic=self.router.clock)


def tokens_of(pipeline: Pipeline) -> list[int]:
    """The tokens of each request, in their order."""
    return [pipeline.tokens.get(mark.key, 0) for mark in pipeline.requests]


def _shared(pipeline: Pipeline) -> dict[str, Any]:
    """What two views of one router must agree on: not when they began, nor when they count tokens."""
    found = msgspec.to_builtins(pipeline)
    del found["service"]["began"], found["tokens"]
    return found
