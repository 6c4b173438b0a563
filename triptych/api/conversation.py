"""Planning of a conversation: media are fetched, then the chat template makes the prompt from messages and tools."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from triptych.api.context import ApiContext
from triptych.api.generation import RequestContext, check_model
from triptych.api.media_parts import MediaSettings, PartIndex, check_parts, fetch_all, media_parts
from triptych.api.schemas import (
    LEGACY_CALL_ID,
    ChatCompletionRequest,
    ChatMessage,
    ConversationFields,
    TextualPart,
)
from triptych.errors import InvalidRequest
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt


async def plan_conversation(
    api: ApiContext, request: ConversationFields, context: RequestContext
) -> tuple[PlannedPrompt, list[Interval]]:
    """Fetch the media and plan the prompt; return the prompt and the intervals spent.

    Raises RequestError, and DeadlineExceeded when the request's deadline passes."""
    check_model(api, request.model)
    variables = template_variables(api, request) | _tools(api, request)
    parts = media_parts(request.messages)
    settings = MediaSettings.from_options(api.prompt_builder.planner.options, request.mm_processor_kwargs)
    check_parts(api, parts, settings)
    started = context.record.now()
    async with context.within_deadline():
        media = await fetch_all(api, parts, settings, context)
        fetched = context.record.now()
        messages = [message_of(m, message, media) for m, message in enumerate(request.messages)]
        build = partial(
            api.prompt_builder.build,
            messages,
            api.context_length,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **variables,
        )
        prompt = await api.executor.run(context.record.client, build)
    intervals = [Interval("fetch", started, fetched), Interval("plan", fetched, context.record.now())]
    context.record.note(*intervals)
    return prompt, intervals


def template_variables(api: ApiContext, request: ConversationFields) -> dict[str, Any]:
    """Return the chat template's variables beside messages and tools. What the template doesn't read is left out."""
    template = api.prompt_builder.template
    given = request.chat_template_kwargs or {}
    variables: dict[str, Any] = {name: value for name, value in given.items() if name in template.variables}
    if isinstance(request, ChatCompletionRequest) and (effort := request.reasoning_effort) is not None:
        return _effort_variables(api, effort) | variables
    return variables


def _tools(api: ApiContext, request: ConversationFields) -> dict[str, Any]:
    """Return the variable with the tools that the model sees, if there are any."""
    tools = request.callable_tools if isinstance(request, ChatCompletionRequest) else request.functions
    if not tools:
        return {}
    if not api.prompt_builder.template.supports_tools:
        raise InvalidRequest("the model's chat template doesn't take tools", "tools")
    return {"tools": [tool.model_dump(exclude_none=True) for tool in tools]}


def _effort_variables(api: ApiContext, effort: str) -> dict[str, Any]:
    """Return the variable that sets the reasoning effort, or only turns reasoning on or off."""
    template = api.prompt_builder.template
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template.variables:
        return {"enable_thinking": effort != "none"}
    if effort == "none" and not api.prompt_builder.formats.reasons:
        return {}
    raise InvalidRequest("this model's reasoning effort can't be changed", "reasoning_effort")


def message_of(m: int, message: ChatMessage, media: Mapping[PartIndex, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message with the number ``m`` as chat templates take it, with ``media`` in place of its own."""
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        result |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls := message.calls():
        result["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}
            for call_id, function in calls
        ]
    if message.role == "function":
        result |= {"role": "tool", "tool_call_id": LEGACY_CALL_ID}
    if not isinstance(message.content, list):
        return result | {"content": message.content or message.refusal or ""}
    parts: list[Mapping[str, Any]] = [
        {"type": "text", "text": part.text} if isinstance(part, TextualPart) else media[m, p]
        for p, part in enumerate(message.content)
    ]
    return result | {"content": parts}
