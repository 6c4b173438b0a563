"""Parsing of a chat's answer into reasoning, tool calls and text: what chat completions and responses share."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from triptych.api.context import ApiContext
from triptych.api.generation import ChoiceOutput, Generation, RequestContext
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.tool_calls import ToolCalls
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta
from triptych.prompt.formats.parser import AnswerParser
from triptych.prompt.formats.reasoning import Reasoning
from triptych.prompt.tokenizer import Tokenizer


class AnswerState(Protocol):
    """What is known of an answer beside its deltas. Final once they have ended."""

    @property
    def api(self) -> ApiContext: ...
    @property
    def context(self) -> RequestContext: ...
    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def num_reasoning(self) -> int: ...
    @property
    def usage(self) -> dict[str, Any]: ...
    @property
    def timeline(self) -> dict[str, Any]: ...


class ChatAnswerer(Protocol):
    """A chat that is ready to be answered, by instances or by a language server."""

    @property
    def generation(self) -> AnswerState: ...
    def deltas(self) -> "AsyncGenerator[ChoiceDelta, None]":
        """Yield what is added to each choice."""
        ...


@dataclass
class PreparedChat:
    """A chat whose prompt is planned, with what is needed to parse its answer."""

    generation: Generation
    request: ChatCompletionRequest

    @property
    def reasoning(self) -> Reasoning:
        """How the answer may begin with reasoning."""
        return self.generation.prompts[0].reasoning if self.request.separate_reasoning else Reasoning.NONE

    def deltas(self) -> "AsyncGenerator[ChoiceDelta, None]":
        """``stream_deltas``."""
        return stream_deltas(self)

    def new_parser(self) -> AnswerParser:
        """Return a parser for one choice."""
        tools = {tool.function.name: tool.function.parameters for tool in self.request.callable_tools}
        formats = self.generation.api.prompt_builder.formats
        return formats.parser(
            self.reasoning,
            tools,
            skip_special_tokens=self.request.skip_special_tokens,
        )

    def new_calls(self) -> ToolCalls:
        """Return what builds the calls of one choice."""
        return ToolCalls(self.request.custom_names)


@dataclass(frozen=True)
class ChoiceDelta:
    """What one output of the model adds to a choice's message: reasoning, text and tool calls in order."""

    choice: int
    events: list[Event]
    logprobs: list[msgspec.Raw]
    """Entries in the format of ``choices[].logprobs.content``."""
    finish_reason: str | None
    ids: list[int] = field(default_factory=list)
    """All tokens of the output."""
    stop_reason: str | int | None = None
    """The stop string or token that ended the answer; None for others."""

    @property
    def reasoning(self) -> str:
        """The reasoning of all events, joined."""
        return "".join(one.text for one in self.events if isinstance(one, ReasoningDelta))

    @property
    def content(self) -> str:
        """The text of all events, joined."""
        return "".join(one.text for one in self.events if isinstance(one, TextDelta))


async def stream_deltas(chat: PreparedChat) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas of all choices as they arrive. Raises as ``Generation.stream`` does."""
    generation = chat.generation
    parsers = [chat.new_parser() for _ in range(generation.num_choices)]
    async with aclosing(generation.stream()) as stream:
        async for output in stream:
            delta = _delta(chat, output, parsers[output.choice])
            if delta.finish_reason and not output.finish_reason:
                generation.end(output.choice)
            yield delta


def _delta(chat: PreparedChat, output: ChoiceOutput, parser: AnswerParser) -> ChoiceDelta:
    reason = output.finish_reason
    events: list[Event] = []
    num_pushed = 0
    while parser.in_reasoning and num_pushed < len(output.tokens):
        chat.generation.num_reasoning += 1
        events += parser.push(output.pieces[num_pushed])
        num_pushed += 1
    events += parser.push("".join(output.pieces[num_pushed:]))
    if reason is not None:
        events += parser.finish()
    if parser.complete:
        if chat.request.parallel_tool_calls is False:
            events = [one for one in events if getattr(one, "index", 0) == 0]
            reason = reason or "stop"
        if reason == "stop" and chat.request.named_tool is None:
            reason = "tool_calls"  # OpenAI's API keeps "stop" for a call that the request names
    as_ids = chat.request.return_tokens_as_token_ids
    logprobs = logprob_entries(chat.generation.api.tokenizer, output, as_ids=as_ids)
    return ChoiceDelta(output.choice, events, logprobs, reason, output.ids, output.stop_reason)


def logprob_entries(tokenizer: Tokenizer, output: ChoiceOutput, *, as_ids: bool = False) -> list[msgspec.Raw]:
    """Return entries of OpenAI's ``choices[].logprobs.content``; none if no log probabilities were requested.

    Each entry is encoded as JSON: otherwise garbage collection of a long answer's objects would block the
    event loop."""

    def entry(token: int, logprob: float, first: bool) -> dict[str, Any]:
        spelled = tokenizer.bytes_of(token, first=first)
        text = f"token_id:{token}" if as_ids else spelled.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}

    entries = []
    for place, (token, one) in enumerate(zip(output.tokens, output.logprobs, strict=False)):
        first = output.begins_text and place == 0
        own, top = entry(token, one.logprob, first), [entry(*alternative, first) for alternative in one.top]
        entries.append(msgspec.Raw(msgspec.json.encode(own | {"top_logprobs": top})))
    return entries


@dataclass
class MessageBuilder:
    """A choice's complete message, assembled from its deltas."""

    calls: ToolCalls
    reasoning: str = ""
    content: str = ""
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    finish_reason: str | None = None
    ids: list[int] = field(default_factory=list)
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.logprobs += delta.logprobs
        self.ids += delta.ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason
        self.calls.add(delta.events, ended=delta.finish_reason is not None)


async def collect_messages(chat: PreparedChat) -> list[MessageBuilder]:
    """Return the complete message of each choice. Raises as ``stream_deltas`` does."""
    messages = [MessageBuilder(chat.new_calls()) for _ in range(chat.generation.num_choices)]
    async with aclosing(stream_deltas(chat)) as stream:
        async for delta in stream:
            messages[delta.choice].add(delta)
    return messages
