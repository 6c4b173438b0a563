"""``/v1/responses``: OpenAI's Responses API on top of chats, whose answers may be stored."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from triptych.api import forwarded_chat
from triptych.api.answers import ChatAnswerer
from triptych.api.context import ApiContext
from triptych.api.conversation import plan_conversation
from triptych.api.errors import body_of
from triptych.api.fields import StrictModel
from triptych.api.generation import RequestContext, given
from triptych.api.response_history import resolve, store
from triptych.api.response_items import Event, OutputItems
from triptych.api.response_tools import described
from triptych.api.responses_schemas import ReasoningSettings, ResponsesRequest
from triptych.api.sse import named_event
from triptych.errors import RequestError, TriptychError


@dataclass
class PreparedResponse:
    """A request whose prompt is planned, and its answer as far as it has arrived."""

    request: ResponsesRequest
    resolved: ResponsesRequest
    """The request with the items that it refers to."""
    chat: ChatAnswerer
    output: OutputItems
    own: list[Any]
    """The items that the request itself brought."""
    finish_reason: str | None = None
    _sequence: int = 0

    async def full_response(self) -> dict[str, Any]:
        """Return the answer as one object (``objects.ResponseObject``). Raises as its deltas do."""
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        return await self._stored() | self.chat.generation.timeline

    async def stream_response(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events (``objects.ResponseEvent``)."""
        started = False
        async with aclosing(self._changes()) as changes:
            async for change in changes:
                if not started:
                    started = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, {"response": self._object("in_progress")})
                yield self._event(*change)
        last = {"response": await self._stored() | self.chat.generation.timeline}
        yield self._event(f"response.{self._status}", last)

    def on_error(self, error: TriptychError) -> bytes:
        """Return the events that end a stream with an error."""
        details = body_of(error)["error"]
        summary = {"code": details["code"], "message": details["message"]}
        failed = {"response": self._object("failed") | {"error": summary}}
        return self._event("error", summary | {"param": details["param"]}) + self._event("response.failed", failed)

    async def _stored(self) -> dict[str, Any]:
        """Store the answer if the service does, and return it."""
        generation = self.chat.generation
        whole = self._object(self._status)
        is_stored = await store(generation.api, self.own, self.request, whole, generation.context)
        return whole | {"store": is_stored}

    async def _changes(self) -> AsyncGenerator[Event, None]:
        with _renaming(self.resolved):
            async with aclosing(self.chat.deltas()) as deltas:
                async for delta in deltas:
                    self.finish_reason = delta.finish_reason
                    for change in self.output.add(delta):
                        yield change
        for change in self.output.finish(self._status):
            yield change

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        self._sequence += 1
        return named_event(kind, {"type": kind, "sequence_number": self._sequence - 1} | members)

    def _object(self, status: str) -> dict[str, Any]:
        request, generation = self.request, self.chat.generation
        defaults = generation.api.generation_defaults
        ended = status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        settings = request.text.model_dump(exclude_none=True, by_alias=True) if request.text else {}
        choice, reasoning = request.tool_choice, request.reasoning or ReasoningSettings()
        return {
            "id": generation.id.replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": generation.model,
            "output": list(self.output.items) if ended else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": generation.api.responses is not None and request.store is not False,
            "temperature": given(request.temperature, defaults.temperature),
            "text": {"format": {"type": "text"}} | settings,
            "tool_choice": choice if isinstance(choice, str) else _described_choice(choice),
            "tools": [described(tool) for tool in request.tools or ()],
            "top_p": given(request.top_p, defaults.top_p),
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        } | ({} if request.user is None else {"user": request.user})

    def _usage(self) -> dict[str, Any]:
        usage = self.chat.generation.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.chat.generation.num_reasoning},
            "total_tokens": usage["total_tokens"],
        }


def _described_choice(choice: StrictModel | None) -> Any:
    return choice.model_dump(exclude_unset=True) if choice else "auto"


async def prepare(api: ApiContext, request: ResponsesRequest, context: RequestContext) -> PreparedResponse:
    """Plan the request's prompt. Raises as ``forwarded_chat.prepare`` does."""
    resolved, own = await resolve(api, request, context)
    with _renaming(resolved):
        prepared = await forwarded_chat.prepare(api, resolved.to_chat(), context)
    return PreparedResponse(request, resolved, prepared, OutputItems(request.targets), own)


async def count(api: ApiContext, request: ResponsesRequest, context: RequestContext) -> dict[str, Any]:
    """Return ``objects.InputTokens``. Raises as ``prepare`` does."""
    context = context.with_timeout(request.timeout)
    resolved, _ = await resolve(api, request, context)
    with _renaming(resolved), api.lifecycle.holding_slot(context.record):
        prompt, _ = await plan_conversation(api, resolved.to_chat(), context)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@contextmanager
def _renaming(request: ResponsesRequest) -> Iterator[None]:
    """Replace chat fields in errors by this API's fields."""
    try:
        yield
    except RequestError as error:
        request.rename(error)
        raise
