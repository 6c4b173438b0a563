"""From a request's messages to a planned prompt: media fetched, tools and settings given to the chat template."""

import asyncio
import time
from typing import Any

from triptych.api.forms import callable_tools
from triptych.api.generation import Caller, check_model
from triptych.api.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ConversationFields,
    ImagePart,
    MediaOptions,
    template_arguments,
)
from triptych.api.service import Service
from triptych.errors import DeadlineExceeded, InvalidRequest, RequestError, UnknownMedia
from triptych.observe.timeline import Interval
from triptych.prompt.media import fetch
from triptych.prompt.prompt import PlannedPrompt, image_param
from triptych.types import MODEL_BOUNDS, PixelBounds

LOW_DETAIL_PIXELS = 512 * 512
"""The area that ``detail: low`` bounds an image at, as in OpenAI's API."""

Place = tuple[int, int]
"""The number of a message, and of a part within."""


async def planned(
    service: Service, request: ConversationFields, caller: Caller
) -> tuple[PlannedPrompt, list[Interval]]:
    """The prompt, and where the time went. Raises RequestError; DeadlineExceeded when it isn't done in the request's
    time."""
    check_model(service, request.model)
    variables = template_variables(service, request)
    images = _images(request.messages)
    if len(images) > service.front_door.max_images:
        raise InvalidRequest(f"{len(images)} images, at most {service.front_door.max_images} are allowed", "messages")
    began = time.time()
    try:
        async with asyncio.timeout(caller.remaining):
            data = await _fetched(service, images, caller.scope)
            fetched = time.time()
            bounds = _bounds(request.mm_processor_kwargs)
            messages = [_message(m, message, data, bounds) for m, message in enumerate(request.messages)]
            # off the loop: a long text takes a while to tokenize, and other requests' tokens shouldn't wait for it
            prompt = await asyncio.to_thread(
                service.prompt_builder.build,
                messages,
                service.context_length,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **variables,
            )
    except TimeoutError:
        raise DeadlineExceeded("the request's time ran out while its prompt was made") from None
    return prompt, [Interval("fetch", began, fetched), Interval("plan", fetched, time.time())]


def has_images(messages: list[ChatMessage]) -> bool:
    return bool(_images(messages))


def template_variables(service: Service, request: ConversationFields) -> dict[str, Any]:
    """What the chat template is given beside the messages. Raises InvalidRequest for what it doesn't know: that would
    be dropped silently."""
    template = service.prompt_builder.template
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    for name in variables:
        if name not in template.variables:
            known = ", ".join(sorted(template.variables)) or "nothing"
            raise InvalidRequest(
                f"the model's chat template doesn't read {name!r}; requests can set: {known}", "chat_template_kwargs"
            )
    tools = request.tools or []
    if isinstance(request, ChatCompletionRequest):
        tools = callable_tools(request)
        if (effort := request.reasoning_effort) is not None:
            variables = _effort(service, effort) | variables
    if tools:
        if not template.takes_tools:
            raise InvalidRequest("the model's chat template doesn't take tools", "tools")
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    return variables


def _effort(service: Service, effort: str) -> dict[str, Any]:
    """How much a model thinks is said by its template's variable of that name, or only whether it does."""
    template = service.prompt_builder.template
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template.variables:
        return {"enable_thinking": effort != "none"}
    if effort == "none" and not template.thinks:
        return {}
    raise InvalidRequest("how much this model thinks can't be changed", "reasoning_effort")


def _images(messages: list[ChatMessage]) -> dict[Place, ImagePart]:
    return {
        (m, p): part
        for m, message in enumerate(messages)
        if isinstance(message.content, list)
        for p, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    }


async def _fetched(service: Service, images: dict[Place, ImagePart], scope: str) -> dict[Place, bytes]:
    data = await asyncio.gather(*(_fetch(service, place, part, scope) for place, part in images.items()))
    return dict(zip(images, data, strict=True))


async def _fetch(service: Service, place: Place, part: ImagePart, scope: str) -> bytes:
    try:
        if part.image_url is not None:
            data = await fetch(part.image_url.url, service.front_door.allowed_media_domains, service.media)
            if part.uuid is not None:
                service.named_media.put(scope, part.uuid, data)
            return data
    except RequestError as error:
        error.param = image_param(*place)
        raise
    data_or_none = service.named_media.get(scope, part.uuid or "")
    if data_or_none is None:
        message, number = place
        param = f"messages[{message}].content[{number}].uuid"
        raise UnknownMedia(f"no image is remembered as {part.uuid!r}: send it again", param)
    return data_or_none


def _bounds(options: MediaOptions | None) -> PixelBounds:
    if options is None:
        return MODEL_BOUNDS
    if options.size is None:
        return PixelBounds(options.min_pixels or 0, options.max_pixels or 0)
    if options.min_pixels is not None or options.max_pixels is not None:
        raise InvalidRequest("size and min_pixels, max_pixels say the same twice", "mm_processor_kwargs.size")
    return PixelBounds(options.size.shortest_edge, options.size.longest_edge)


def _low_detail(bounds: PixelBounds) -> PixelBounds:
    """A request's own bounds go before what ``detail`` says."""
    return bounds if bounds.max_pixels else PixelBounds(bounds.min_pixels, LOW_DETAIL_PIXELS)


def _message(m: int, message: ChatMessage, images: dict[Place, bytes], bounds: PixelBounds) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if (thought := message.reasoning_content or message.reasoning) is not None:
        made |= {"reasoning_content": thought, "reasoning": thought}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": template_arguments(call)},
            }
            for call in message.tool_calls
        ]
    if not isinstance(message.content, list):
        return made | {"content": message.content or ""}
    parts: list[dict[str, Any]] = []
    for p, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            is_low = part.image_url is not None and part.image_url.detail == "low"
            parts.append({"type": "image", "data": images[m, p], "bounds": _low_detail(bounds) if is_low else bounds})
        else:
            parts.append({"type": "text", "text": part.text})
    return made | {"content": parts}
