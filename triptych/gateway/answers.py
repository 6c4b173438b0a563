"""What vLLM's answers must be like. They come from outside: each is bounded, and none is passed on unread."""

import re
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, TypeVar

import httpx
import msgspec

from triptych.errors import InvalidRequest, PayloadTooLarge, RequestError, UnknownModel

MAX_EVENT_BYTES = 2**24
"""Bytes of one event of a stream. The first may have the prompt's tokens, and log probabilities are long."""
MAX_ANSWER_BYTES = 2**26
MAX_ERROR_BYTES = 2**16
DONE = b"[DONE]"
_DATA = b"data:"
_END = b"\n\n"
_ADDRESS = re.compile(b"0x[0-9A-Fa-f]{6,}")
"""An address in memory, as errors of decoders have it."""


class ServerFailed(Exception):
    """A server has failed with a request, or was lost; the message says how. Another one may answer."""


class ServerChoice(msgspec.Struct):
    """What is looked at of a choice, whole or in a chunk."""

    index: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class PromptTokens(msgspec.Struct):
    cached_tokens: int | None = None


class CompletionTokens(msgspec.Struct):
    reasoning_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: CompletionTokens | None = None


class ServerFault(msgspec.Struct):
    """Why a request has failed."""

    message: str = ""
    code: int | str | None = None
    param: str | None = None


class ServerAnswer(msgspec.Struct):
    """What is looked at of an answer, or of a chunk of one."""

    choices: Sequence[ServerChoice] = []
    usage: TokenUsage | None = None
    error: ServerFault | None = None


class CalledFunction(msgspec.Struct):
    """A function's name, which only the first piece of a call has, and the next piece of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ServerCall(msgspec.Struct):
    """A tool call, whole or a piece of it."""

    function: CalledFunction | None = None
    index: int | None = None


class ServerMessage(msgspec.Struct):
    """A chat's answer, whole or in a chunk."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What older versions call it."""
    tool_calls: list[ServerCall] | None = None


class TokenEntry(msgspec.Struct, gc=False):
    """A token's log probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None
    """None for the token's own."""


class AnswerTokenEntry(TokenEntry, gc=False):
    """The same of a token of the answer."""

    top_logprobs: list[TokenEntry] = []


class ServerLogprobs(msgspec.Struct):
    content: list[AnswerTokenEntry] | None = None


class ServerChatChoice(ServerChoice):
    """A choice of a chat that is answered in the form of another API."""

    message: ServerMessage = msgspec.field(default_factory=ServerMessage)
    delta: ServerMessage | None = None
    """In place of ``message`` in a chunk."""
    logprobs: ServerLogprobs | None = None
    stop_reason: str | int | None = None


class ChatAnswer(ServerAnswer):
    """The same of an answer, or of a chunk of one."""

    choices: Sequence[ServerChatChoice] = []


A = TypeVar("A", bound=ServerAnswer)


def read_answer(data: bytes | bytearray, form: type[A]) -> A:
    """Return what is looked at of an answer. Raises ServerFailed for one that isn't vLLM's."""
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ServerFailed("its answer isn't JSON of the known form") from None


async def read_events(response: httpx.Response, form: type[A]) -> AsyncGenerator[tuple[bytes, A | None], None]:
    """Yield each event of a stream as it came, with what it says; comments, and the last event, say nothing. Raises
    ServerFailed for what isn't a stream of events, for one that breaks off, and for an event that is too long."""
    rest = bytearray()
    async for piece in response.aiter_raw():
        searched = max(0, len(rest) - 1)
        rest += piece
        begin = 0
        while (end := rest.find(_END, max(begin, searched))) >= 0:
            event = bytes(rest[begin : end + len(_END)])
            begin = end + len(_END)
            data = event[len(_DATA) :].strip() if event.startswith(_DATA) else b""
            if not data and not event.startswith(b":"):
                raise ServerFailed("its stream isn't one of events")
            yield event, read_answer(data, form) if data and data != DONE else None
            if data == DONE:
                return
        del rest[:begin]
        if len(rest) > MAX_EVENT_BYTES:
            raise ServerFailed(f"an event has more than {MAX_EVENT_BYTES} bytes")
    raise ServerFailed("its stream broke off")


def refusal(status: int, failure: ServerFault | None) -> RequestError:
    """Return the error that stands for a refusal of vLLM's, without addresses in its memory."""
    said = failure.message if failure and failure.message else f"the language server answered {status}"
    message = without_addresses(said.encode()).decode()
    if status == httpx.codes.NOT_FOUND:
        return UnknownModel(message, "model")
    if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return PayloadTooLarge(message)
    return InvalidRequest(message, failure.param if failure else None)


def without_addresses(text: bytes) -> bytes:
    """Return a text in UTF-8 with "0x…" in place of addresses in memory."""
    return _ADDRESS.sub("0x…".encode(), text)


def is_refusal(status: int) -> bool:
    """Return whether a status is about the request itself. Others may be the server's: its key, its load, its
    faults."""
    return status in (
        httpx.codes.BAD_REQUEST,
        httpx.codes.NOT_FOUND,
        httpx.codes.REQUEST_ENTITY_TOO_LARGE,
        httpx.codes.UNPROCESSABLE_ENTITY,
    )
