"""From a request's messages to a planned prompt: media fetched, tools and settings given to the chat template."""

import time
from functools import partial
from typing import Any

from triptych.api.generation import RequestContext, check_model
from triptych.api.media_parts import Place, View, check_parts, fetch_all, media_parts
from triptych.api.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ConversationFields,
    WordsPart,
    template_arguments,
)
from triptych.api.service import Service
from triptych.errors import InvalidRequest
from triptych.observe.requests import current_client, note
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt


async def planned(
    service: Service, request: ConversationFields, context: RequestContext
) -> tuple[PlannedPrompt, list[Interval]]:
    """The prompt, and where the time went. Raises RequestError; DeadlineExceeded when it isn't done in the request's
    time."""
    check_model(service, request.model)
    variables = template_variables(service, request)
    parts = media_parts(request.messages)
    view = View.of(request.mm_processor_kwargs)
    check_parts(service, parts, view)
    began = time.time()
    async with context.in_time():
        media = await fetch_all(service, parts, view, context)
        fetched = time.time()
        messages = [_message(m, message, media) for m, message in enumerate(request.messages)]
        build = partial(
            service.prompt_builder.build,
            messages,
            service.context_length,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **variables,
        )
        prompt = await service.planning.run(current_client(), build)
    intervals = [Interval("fetch", began, fetched), Interval("plan", fetched, time.time())]
    note(*intervals)
    return prompt, intervals


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
        tools = request.callable_tools
        if (effort := request.reasoning_effort) is not None:
            variables = _effort(service, effort) | variables
    if tools:
        if not template.supports_tools:
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
    if effort == "none" and not template.supports_reasoning:
        return {}
    raise InvalidRequest("how much this model thinks can't be changed", "reasoning_effort")


def _message(m: int, message: ChatMessage, media: dict[Place, dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        made |= {"reasoning_content": reasoning, "reasoning": reasoning}
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
        return made | {"content": message.content or message.refusal or ""}
    parts = [
        {"type": "text", "text": part.text} if isinstance(part, WordsPart) else media[m, p]
        for p, part in enumerate(message.content)
    ]
    return made | {"content": parts}
