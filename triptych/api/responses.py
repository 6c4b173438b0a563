"""``/v1/responses``: OpenAI's newer API over the same answers as chats have, without anything remembered."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from triptych.api import chat
from triptych.api.chat import Chat
from triptych.api.errors import body_of
from triptych.api.generation import RequestContext
from triptych.api.response_items import Event, OutputItems
from triptych.api.responses_schemas import ReasoningSettings, ResponsesRequest, own_param
from triptych.api.service import Service
from triptych.api.sse import named_event
from triptych.errors import RequestError, TriptychError


@dataclass
class Response:
    """A request that is being answered, and what there is of its answer."""

    request: ResponsesRequest
    chat: Chat
    output: OutputItems = field(default_factory=OutputItems)
    finish_reason: str | None = None
    _sequence: int = 0

    async def whole(self) -> dict[str, Any]:
        """The answer as one object (``objects.ResponseObject``). Raises as ``chat.deltas`` does."""
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        return self._object(self._status) | chat.timeline(self.chat.generation)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, each with its type and a number."""
        begun = False
        async with aclosing(self._changes()) as changes:
            async for change in changes:
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, {"response": self._object("in_progress")})
                yield self._event(*change)
        last = {"response": self._object(self._status) | chat.timeline(self.chat.generation)}
        yield self._event(f"response.{self._status}", last)

    def on_error(self, error: TriptychError) -> bytes:
        """What ends a stream that has begun."""
        details = body_of(error)["error"]
        told = {"code": details["code"], "message": details["message"]}
        failed = {"response": self._object("failed") | {"error": told}}
        return self._event("error", told | {"param": details["param"]}) + self._event("response.failed", failed)

    async def _changes(self) -> AsyncGenerator[Event, None]:
        with _own_names():
            async with aclosing(chat.deltas(self.chat)) as deltas:
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
        sampling = generation.samplings[0]
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
            "model": generation.service.model_name,
            "output": list(self.output.items) if ended else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | settings,
            "tool_choice": choice.model_dump() if choice and not isinstance(choice, str) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.chat.generation.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.chat.generation.num_reasoning},
            "total_tokens": usage["total_tokens"],
        }


async def prepare(service: Service, request: ResponsesRequest, context: RequestContext) -> Response:
    """Raises as ``chat.prepare`` does."""
    with _own_names():
        return Response(request, await chat.prepare(service, request.chat(), context))


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors name this API's fields, not those of the chat that a request becomes."""
    try:
        yield
    except RequestError as error:
        error.param = own_param(error.param)
        raise
