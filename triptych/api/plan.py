"""``/v1/plan``: what becomes of a chat request, from its media's headers; no instance has to be there."""

from typing import Any

from triptych.api.chat import prepare_planned
from triptych.api.context import ApiContext
from triptych.api.conversation import plan_conversation
from triptych.api.errors import body_of, headers_of
from triptych.api.generation import RequestContext, check_model
from triptych.api.schemas import ChatCompletionRequest
from triptych.errors import ServiceError, TriptychError
from triptych.prompt.prompt import PlannedItem
from triptych.types import AudioHeader, VideoHeader


async def plan(api: ApiContext, request: ChatCompletionRequest, context: RequestContext) -> dict[str, Any]:
    """Return ``objects.PromptPlan``. Raises what a chat raises that is wrong, and what any request is told while the
    service or the client is at its limit."""
    context = context.with_timeout(request.timeout)
    check_model(api, request.model)
    with api.lifecycle.holding_slot(context.record):
        prompt, intervals = await plan_conversation(api, request, context)
    chat = await prepare_planned(api, request, context, prompt, intervals)
    max_tokens = chat.generation.sampling_params[0].max_tokens
    layout = api.lifecycle.media_layout
    salt = request.cache_salt or ""
    items = sorted(prompt.items, key=lambda item: item.number)
    return {
        "object": "plan",
        "model": api.model_name,
        "prompt_tokens": len(prompt.tokens),
        "max_tokens": max_tokens,
        "data": [
            _media_plan(api, item)
            | {
                "bytes": None if layout is None else item.plan.rows * layout.row_bytes,
                "cached": api.lifecycle.encodes.has_cached(item, salt),
            }
            for item in items
        ],
        "admission": _admission(api, request, context, prompt, max_tokens),
    }


def media_item(kind: str, item: PlannedItem) -> dict[str, Any]:
    """Return what answers say of an item (``objects.MediaItem``). ``kind`` is what it is called there."""
    planned, header = item.plan, item.plan.header
    entry: dict[str, Any] = {
        "object": kind,
        "index": item.number,
        "type": planned.modality,
        "key": item.key,
        "tokens": planned.rows,
        "grid_thw": list(planned.grid),
    }
    if not isinstance(header, AudioHeader):
        entry["size"] = {"height": planned.resized_height, "width": planned.resized_width}
    if isinstance(header, AudioHeader | VideoHeader):
        entry["seconds"] = header.seconds
    return entry


def _media_plan(api: ApiContext, item: PlannedItem) -> dict[str, Any]:
    planned, header = item.plan, item.plan.header
    entry = media_item("media.plan", item) | {
        "file_bytes": len(item.data),
        "parts": planned.num_parts,
        "patches": planned.patches,
        "cost": planned.cost,
    }
    if not isinstance(header, AudioHeader):
        entry["file_size"] = {"height": header.height, "width": header.width}
    if isinstance(header, VideoHeader):
        entry["frames"] = api.prompt_builder.planner.num_frames(planned)
    return entry


def _admission(
    api: ApiContext, request: ChatCompletionRequest, context: RequestContext, prompt: Any, max_tokens: int
) -> dict[str, Any]:
    wait = answer = error = retry_after = None
    try:
        if api.servers is not None:
            api.servers.check()
        expected = api.lifecycle.expected(
            context.record,
            prompt,
            max_tokens,
            timeout=context.remaining,
            priority=request.priority or 0,
            generates=api.servers is None,
        )
        if expected.seconds:
            wait, answer = expected.wait, expected.seconds
    except ServiceError as refused:
        error, retry_after = _error(refused)
    return {
        "admitted": error is None,
        "wait_seconds": wait,
        "answer_seconds": answer,
        "error": error,
        "retry_after": retry_after,
    }


def _error(refused: TriptychError) -> tuple[dict[str, Any], int | None]:
    after = headers_of(refused).get("Retry-After")
    return body_of(refused)["error"], None if after is None else int(after)
