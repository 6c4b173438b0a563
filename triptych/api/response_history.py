"""What requests to ``/v1/responses`` refer to: earlier responses and items, from the store."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from triptych.api.body import MAX_TEXT, extract_inline_media
from triptych.api.context import ApiContext
from triptych.api.generation import RequestContext
from triptych.api.response_input import Item, ItemReference
from triptych.api.response_store import StoredResponse
from triptych.api.responses_schemas import ResponsesRequest
from triptych.errors import InvalidRequest

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])


async def resolve(
    api: ApiContext, request: ResponsesRequest, context: RequestContext
) -> tuple[ResponsesRequest, list[Any]]:
    """Return the request with all items of its conversation, none of them a reference, and those that it brought
    itself. Raises InvalidRequest for what isn't stored, and Unavailable."""
    if not request.refers:
        return request, request.items
    earlier: list[Any] = []
    if (previous := request.previous_response_id) is not None:
        earlier = await _earlier(api, previous, context)
    own = await _own(api, request, context)
    return request.continuing(earlier, own), own


async def _own(api: ApiContext, request: ResponsesRequest, context: RequestContext) -> list[Any]:
    """Return the request's own items, each reference replaced by what it refers to. Raises as ``resolve`` does."""
    items: list[Any] = []
    for number, item in enumerate(request.items):
        if not isinstance(item, ItemReference):
            items.append(item)
            continue
        found = await api.responses.holding(context.scope, item.id) if api.responses else None
        if found is None:
            raise _not_stored(api, "item_reference", item.id, f"input[{number}]")
        raw = [one for one in stored_items([found]) if one.get("id") == item.id]
        items += await _parsed(api, raw[:1], context, f"input[{number}]")
    return items


async def _earlier(api: ApiContext, previous: str, context: RequestContext) -> list[Any]:
    where = "previous_response_id"
    limit = api.frontend.http.max_body_mb * 2**20
    chain = await api.responses.chain(context.scope, previous, limit) if api.responses else None
    if chain is None:
        raise _not_stored(api, where, previous, where)
    return await _parsed(api, stored_items(chain), context, where)


def stored_items(chain: Sequence[StoredResponse]) -> list[dict[str, Any]]:
    """Return the items of responses and of their requests, as they are stored."""
    items: list[dict[str, Any]] = []
    for stored in chain:
        items += msgspec.json.decode(stored.input)
        items += msgspec.json.decode(stored.output)["output"]
    return items


async def _parsed(api: ApiContext, raw: list[dict[str, Any]], context: RequestContext, where: str) -> list[Any]:
    """Return the items as those of a request, with placeholders for their media."""
    body = await api.executor.run(
        context.record.client, lambda: extract_inline_media(bytearray(msgspec.json.encode(raw)))
    )
    if len(body.text) > MAX_TEXT:
        raise InvalidRequest(f"{where}: the stored items exceed {MAX_TEXT} bytes besides inline media", where)
    context.media.add(body.inline)
    return _ITEMS.validate_json(body.text)


def _not_stored(api: ApiContext, kind: str, name: str, param: str) -> InvalidRequest:
    reason = "which is not stored, or no longer" if api.responses else "because this service stores no responses"
    return InvalidRequest(
        f"{param}: the {kind} {name!r} can't be resolved, {reason}; set store: false, and send the items themselves",
        param,
    )


async def store(
    api: ApiContext, own: Sequence[Any], request: ResponsesRequest, answer: dict[str, Any], context: RequestContext
) -> bool:
    """Store an answer with the items that its request brought, and return whether that worked."""
    if api.responses is None or request.store is False:
        return False

    def encode() -> tuple[StoredResponse, list[str]]:
        items = [with_id(item.model_dump(exclude_none=True, exclude={"runs_async"})) for item in own]
        text = context.media.restored(msgspec.json.encode(items))
        stored = StoredResponse(answer["id"], request.previous_response_id, text, msgspec.json.encode(answer))
        return stored, [item["id"] for item in (*items, *answer["output"])]

    stored, ids = await api.executor.run(context.record.client, encode)
    return await api.responses.put(context.scope, stored, ids)


def with_id(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with an id, which clients may leave out."""
    prefix = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
    return {"id": f"{prefix.get(item['type'], 'out')}_{secrets.token_hex(12)}"} | item
