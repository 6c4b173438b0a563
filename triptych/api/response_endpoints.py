"""The endpoints of stored responses: reading, deleting, and listing what they were asked."""

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from triptych.api import objects
from triptych.api.context import ApiContext
from triptych.api.json_response import JsonResponse
from triptych.api.openapi import json_responses
from triptych.api.request_keys import scope_of
from triptych.api.response_history import stored_items
from triptych.api.response_store import ResponseStore, StoredResponse
from triptych.errors import InvalidRequest, UnknownResponse

MAX_PAGE = 100
PATH = "/v1/responses/{response_id}"


def add_endpoints(app: FastAPI, api: ApiContext) -> None:
    async def found(request: Request, name: str) -> tuple[ResponseStore, StoredResponse]:
        store = api.responses
        stored = await store.get(scope_of(request.headers), name) if store else None
        if store is None or stored is None:
            why = "it isn't stored" if store else "this service stores none"
            raise UnknownResponse(f"Response with id {name!r} not found: {why}")
        return store, stored

    @app.get(PATH, responses=json_responses(objects.ResponseObject))
    async def stored_response(request: Request, response_id: str) -> Response:
        """A stored response."""
        if request.query_params.get("stream", "false").lower() != "false":
            raise InvalidRequest("stream: a stored response is not streamed", "stream")
        _, stored = await found(request, response_id)
        return Response(stored.output, media_type="application/json")

    @app.delete(PATH, responses=json_responses(objects.DeletedResponse))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Deletes a stored response; responses that follow on it can't be continued any more."""
        store, _ = await found(request, response_id)
        await store.delete(scope_of(request.headers), response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post(f"{PATH}/cancel", include_in_schema=False)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Always an error, since no response is made in the background."""
        await found(request, response_id)
        raise InvalidRequest("Cannot cancel a synchronous response; none is made in the background")

    @app.get(f"{PATH}/input_items", responses=json_responses(objects.ResponseInputItems))
    async def input_items(request: Request, response_id: str) -> Response:
        """The items before a stored response's answer, the last one first unless `order` is `asc`."""
        store, stored = await found(request, response_id)
        items = msgspec.json.decode(stored.input)
        if stored.previous is not None:
            limit = api.frontend.http.max_body_mb * 2**20
            earlier = await store.chain(scope_of(request.headers), stored.previous, limit)
            items = stored_items(earlier or []) + items
        return JsonResponse(_page(items, request))


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:4]) <= MAX_PAGE):
        raise InvalidRequest(f"limit: Input should be a number from 1 to {MAX_PAGE}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: Input should be 'asc' or 'desc'", "order")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after: no item has the id {after!r}", "after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
