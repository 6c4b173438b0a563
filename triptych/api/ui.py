"""The endpoints of ``/ui``: the page, its files, and what they show of the service.

The page and its files are for all. The data is for holders of an API key or, where none is configured, for this
machine (``ui_access.py``). None of it has content of requests."""

import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec import structs
from starlette.exceptions import HTTPException

from triptych.api.context import ApiContext
from triptych.api.json_response import JsonResponse
from triptych.api.sse import BodyStream
from triptych.api.ui_access import refusal
from triptych.api.ui_files import PAGE, takes_gzip, ui_files
from triptych.api.viewers import MAX_RATE
from triptych.config.observe import TRACE_ID
from triptych.errors import InvalidRequest
from triptych.observe.figures import RANGES
from triptych.observe.perfetto import trace_events
from triptych.observe.pipeline import RequestView
from triptych.observe.request_history import MAX_ENDED, matches
from triptych.observe.timeline import Interval

Handler = Callable[[Request], Awaitable[Response]]

DAY_MS = 86_400_000.0
"""An objective that every answer meets, in milliseconds."""


def add_endpoints(app: FastAPI, api: ApiContext) -> None:
    """Add the page and its endpoints."""
    endpoints = UiEndpoints(api)
    for path, handler in endpoints.data.items():
        _add(app, f"{PAGE}/{path}", _guarded(handler), "GET")
    if api.frontend.http.ui_kills:
        _add(app, f"{PAGE}/instances/{{name}}/kill", _guarded(endpoints.kill), "POST")
    _add(app, PAGE, _file, "GET", "HEAD")
    _add(app, f"{PAGE}/{{name:path}}", _file, "GET", "HEAD")


def _add(app: FastAPI, path: str, handler: Handler, *methods: str) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(request)

    app.add_api_route(path, endpoint, methods=list(methods), include_in_schema=False)


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        return refusal(request) or await handler(request)

    return guarded


async def _file(request: Request) -> Response:
    path = request.scope["path"]
    if path == f"{PAGE}/":
        return Response(status_code=308, headers={"Location": f"..{PAGE}"})
    if (file := ui_files().get(path)) is None:
        raise HTTPException(404)
    return file.response(request)


class UiEndpoints:
    """Handlers of the data."""

    def __init__(self, api: ApiContext) -> None:
        self._api = api
        self.data: dict[str, Handler] = {
            "events": self._events,
            "requests": self._requests,
            "requests/{id:path}/perfetto": self._perfetto,
            "requests/{id:path}": self._request,
            "figures": self._figures,
        }
        """By path below the page's."""

    async def _events(self, request: Request) -> Response:
        """Snapshots (``Pipeline``) as server-sent events, ``rate`` a second; compressed for those who take that."""
        viewers, record, packed = self._api.viewers, request.state.record, takes_gzip(request)
        viewers.enter(record, _number(request, "rate", MAX_RATE))
        stream, patience = viewers.snapshots(record, packed), self._api.frontend.http.client_timeout
        return BodyStream(stream, patience, viewers.ended, encoding="gzip" if packed else "")

    async def _requests(self, request: Request) -> Response:
        """The requests in flight and the last that ended (``RequestView``), the latest first."""
        query = request.query_params
        limit = int(_number(request, "limit", MAX_ENDED))
        found = (
            structs.replace(view, timeline=[])
            for view in self._api.history
            if ("client" not in query or view.client == query["client"])
            and ("stage" not in query or view.slowest == query["stage"])
            and ("status" not in query or matches(view, query["status"]))
        )
        return _json(list(islice(found, limit)))

    async def _request(self, request: Request) -> Response:
        """One request with its timeline (``RequestView``), also in flight: it ends with what is done now, whose end is
        0."""
        view = self._find(request)
        now = [structs.replace(part, end=0.0) for part in self._current(view)]
        return _json(structs.replace(view, timeline=[*view.timeline, *now], trace_url=self._trace_url(view.trace_id)))

    async def _perfetto(self, request: Request) -> Response:
        """One request's timeline as a file for ui.perfetto.dev."""
        view = self._find(request)
        return _json(trace_events([(view.id, [*view.timeline, *self._current(view)])]))

    async def _figures(self, request: Request) -> Response:
        """The last ``seconds`` (``Figures``), against the objective of ``ttft_ms`` and ``tpt_ms``."""
        to_first, to_next = (_number(request, name, DAY_MS) / 1000 for name in ("ttft_ms", "tpt_ms"))
        back = _number(request, "seconds", 3600)
        if back not in RANGES:
            raise InvalidRequest(f"seconds must be one of {', '.join(map(str, RANGES))}", "seconds")
        return _json(self._api.history.figures.figures(time.time(), to_first, to_next, int(back)))

    async def kill(self, request: Request) -> Response:
        """Kill an instance of this machine, as a crash would end it."""
        name = request.path_params["name"]
        found = next((one for one in self._api.router.membership if one.name == name), None)
        if found is None:
            raise HTTPException(404, "no such instance")
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(found.pid, signal.SIGKILL)
        return Response(status_code=204)

    def _find(self, request: Request) -> RequestView:
        if (view := self._api.history.find(request.path_params["id"])) is None:
            raise HTTPException(404, "no such request: it ended too long ago, or at another frontend")
        return view

    def _trace_url(self, trace_id: str) -> str:
        return self._api.ui_trace_url.replace(TRACE_ID, trace_id) if trace_id else ""

    def _current(self, view: RequestView) -> list[Interval]:
        """Return what is done for a request now, until now."""
        return [] if view.ended else self._api.pipeline.current(view.id)


def _json(data: Any) -> JsonResponse:
    return JsonResponse(data, headers={"Cache-Control": "no-store"})


def _number(request: Request, name: str, default: float) -> float:
    """Return a finite, positive number of the query. Raises InvalidRequest for anything else."""
    given = request.query_params.get(name)
    try:
        number = default if given is None else float(given)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise InvalidRequest(f"{name} must be a positive number", name)
    return number
