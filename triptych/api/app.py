"""The HTTP endpoints: parse the request, call a handler, send its answer. ``errors.py`` maps errors to HTTP."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from triptych import __version__
from triptych.api import (
    anthropic_errors,
    anthropic_messages,
    chat,
    completions,
    encode,
    errors,
    gateway,
    media,
    objects,
    plan,
    response_endpoints,
    responses,
    tokens,
    ui,
)
from triptych.api.anthropic_schemas import CountTokensRequest, MessagesRequest
from triptych.api.body import read_body
from triptych.api.completion_schemas import CompletionRequest, DetokenizeRequest, TokenizeConversation, TokenizeText
from triptych.api.context import ApiContext
from triptych.api.errors import error_body, headers_of, status_of
from triptych.api.fields import MAX_TIMEOUT
from triptych.api.generation import NO_MODEL, RequestContext, check_model
from triptych.api.json_response import JsonResponse
from triptych.api.openapi import (
    add_openapi,
    file_responses,
    json_response,
    json_responses,
    request_body,
    stream_responses,
)
from triptych.api.readiness import Readiness
from triptych.api.request_keys import scope_of
from triptych.api.request_records import Observer, RequestRecordMiddleware
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.security import check_right
from triptych.api.sse import BodyStream, disconnected, error_event
from triptych.api.validation import parse_request
from triptych.config.security import ENCODE_RIGHT, MEDIA_RIGHT
from triptych.errors import InternalError, InvalidRequest, TriptychError
from triptych.observe.requests import RequestRecord
from triptych.observe.timeline import TIMELINE_HEADER

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])
GatewayPrepare = Callable[[ApiContext, bytes, RequestContext], Coroutine[Any, Any, gateway.Forwarded]]

TIMEOUT_HEADER = "x-request-timeout"
"""Deadline in seconds, like the field ``timeout``, for clients that can't set the field."""
CLIENT_CLOSED_REQUEST = 499


def create_app(api: ApiContext) -> FastAPI:
    app = FastAPI(title="Triptych", version=__version__)
    # the history last, since traces give a request its trace id
    observers: tuple[Observer, ...] = (api.router.metrics.answered, *api.observers, api.history)
    app.add_middleware(
        RequestRecordMiddleware,
        clock=api.router.clock,
        observers=observers,
        client_header=api.frontend.http.client_header,
    )
    if api.servers is None:
        _add_generation_endpoints(app, api)
    else:
        _add_gateway_endpoints(app, api)
    _add_response_endpoints(app, api)
    _add_anthropic_endpoints(app, api)
    _add_token_endpoints(app, api)
    _add_media_endpoints(app, api)
    _add_service_endpoints(app, api)
    if api.frontend.http.ui:
        ui.add_endpoints(app, api)
    add_openapi(app)
    app.add_exception_handler(TriptychError, _on_error)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=CLIENT_CLOSED_REQUEST))
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected_error)
    return app


def _add_generation_endpoints(app: FastAPI, api: ApiContext) -> None:
    @app.post(
        "/v1/chat/completions",
        openapi_extra=request_body(ChatCompletionRequest),
        responses=stream_responses(objects.ChatCompletion, objects.ChatChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, which may contain media. With `stream: true`, as server-sent events."""
        text, context = await _read_request(request, api)
        parsed = parse_request(ChatCompletionRequest, text)
        prepared = await _cancel_on_disconnect(request, chat.prepare(api, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _cancel_on_disconnect(request, chat.full_response(prepared)))
        return await _stream(request, api, chat.stream_response(prepared), error_event)

    @app.post(
        "/v1/completions",
        openapi_extra=request_body(CompletionRequest),
        responses=stream_responses(objects.TextCompletion, objects.TextCompletion),
    )
    async def text_completions(request: Request) -> Response:
        """Continues texts or tokens, without a chat template. With `stream: true`, as server-sent events."""
        text, context = await _read_request(request, api)
        parsed = parse_request(CompletionRequest, text)
        prepared = await _cancel_on_disconnect(request, completions.prepare(api, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _cancel_on_disconnect(request, completions.full_response(prepared)))
        return await _stream(request, api, completions.stream_response(prepared), error_event)


def _add_gateway_endpoints(app: FastAPI, api: ApiContext) -> None:
    async def answer(request: Request, prepare: GatewayPrepare) -> Response:
        text, context = await _read_request(request, api)
        prepared = await _cancel_on_disconnect(request, prepare(api, text, context))
        if not prepared.stream:
            answer = await _cancel_on_disconnect(request, gateway.full_response(prepared))
            return Response(answer, media_type="application/json")
        return await _stream(request, api, gateway.stream_response(prepared), error_event)

    @app.post(
        gateway.CHAT,
        openapi_extra=request_body(ChatCompletionRequest),
        responses=stream_responses(objects.ChatCompletion, objects.ChatChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Passes a conversation on to a language server, its media encoded. With `stream: true`, as events."""
        return await answer(request, gateway.prepare)

    @app.post(
        gateway.COMPLETIONS,
        openapi_extra=request_body(CompletionRequest),
        responses=stream_responses(objects.TextCompletion, objects.TextCompletion),
    )
    async def text_completions(request: Request) -> Response:
        """Passes texts or tokens on to a language server. With `stream: true`, as events."""
        return await answer(request, gateway.prepare_completion)


def _add_response_endpoints(app: FastAPI, api: ApiContext) -> None:
    @app.post(
        "/v1/responses",
        openapi_extra=request_body(ResponsesRequest),
        responses=stream_responses(objects.ResponseObject, objects.ResponseEvent),
    )
    async def model_responses(request: Request) -> Response:
        """Answers items as OpenAI's Responses API does. With `stream: true`, as events."""
        text, context = await _read_request(request, api)
        parsed = parse_request(ResponsesRequest, text)
        prepared = await _cancel_on_disconnect(request, responses.prepare(api, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _cancel_on_disconnect(request, prepared.full_response()))
        return await _stream(request, api, prepared.stream_response(), prepared.on_error)

    @app.post(
        "/v1/responses/input_tokens",
        openapi_extra=request_body(ResponsesRequest),
        responses=json_responses(objects.InputTokens),
    )
    async def input_tokens(request: Request) -> Response:
        """The number of tokens that a response's prompt would have."""
        text, context = await _read_request(request, api)
        parsed = parse_request(ResponsesRequest, text)
        return JsonResponse(await _cancel_on_disconnect(request, responses.count(api, parsed, context)))

    response_endpoints.add_endpoints(app, api)


def _add_anthropic_endpoints(app: FastAPI, api: ApiContext) -> None:
    @app.post(
        "/v1/messages",
        openapi_extra=request_body(MessagesRequest),
        responses=stream_responses(objects.AnthropicMessage, objects.AnthropicEvent),
    )
    async def messages(request: Request) -> Response:
        """Answers a conversation as Anthropic's Messages API does. With `stream: true`, as events."""
        text, context = await _read_request(request, api)
        parsed = parse_request(MessagesRequest, text)
        prepared = await _cancel_on_disconnect(request, anthropic_messages.prepare(api, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _cancel_on_disconnect(request, prepared.full_response()))
        return await _stream(request, api, prepared.stream_response(), anthropic_messages.on_error)

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=request_body(CountTokensRequest),
        responses=json_responses(objects.TokenCount),
    )
    async def count_tokens(request: Request) -> Response:
        """The number of tokens of the prompt that a conversation becomes."""
        text, context = await _read_request(request, api)
        parsed = parse_request(CountTokensRequest, text)
        counting = anthropic_messages.count_tokens(api, parsed, context)
        return JsonResponse(await _cancel_on_disconnect(request, counting))


def _add_token_endpoints(app: FastAPI, api: ApiContext) -> None:
    for prefix in ("", "/v1"):

        @app.post(
            f"{prefix}/tokenize",
            openapi_extra=request_body(TokenizeText, TokenizeConversation),
            responses=json_responses(objects.Tokenized),
        )
        async def tokenize(request: Request) -> Response:
            """The tokens of a text, or of the prompt that messages become."""
            text, context = await _read_request(request, api)
            parsed = tokens.parse_tokenize(text)
            return JsonResponse(await _cancel_on_disconnect(request, tokens.tokenize(api, parsed, context)))

        @app.post(
            f"{prefix}/detokenize",
            openapi_extra=request_body(DetokenizeRequest),
            responses=json_responses(objects.Detokenized),
        )
        async def detokenize(request: Request) -> Response:
            """The text of tokens."""
            text, context = await _read_request(request, api)
            parsed = parse_request(DetokenizeRequest, text)
            return JsonResponse(await _cancel_on_disconnect(request, tokens.detokenize(api, parsed, context)))


def _add_media_endpoints(app: FastAPI, api: ApiContext) -> None:
    @app.post(
        "/v1/plan",
        openapi_extra=request_body(ChatCompletionRequest),
        responses=json_responses(objects.PromptPlan),
    )
    async def chat_plan(request: Request) -> Response:
        """What becomes of a chat request, which isn't answered: its tokens, its media, and whether it is admitted."""
        text, context = await _read_request(request, api)
        parsed = parse_request(ChatCompletionRequest, text)
        return JsonResponse(await _cancel_on_disconnect(request, plan.plan(api, parsed, context)))

    @app.post(
        "/v1/media",
        openapi_extra=request_body(media.MediaRequest),
        responses=json_responses(objects.KeptMediaList),
    )
    async def keep_media(request: Request) -> Response:
        """Has a conversation's media encoded ahead of questions. Needs a key with the right `media`."""
        check_right(request.scope, MEDIA_RIGHT)
        text, context = await _read_request(request, api)
        parsed = parse_request(media.MediaRequest, text)
        return JsonResponse(await _cancel_on_disconnect(request, media.keep(api, parsed, context)))

    @app.post(
        "/v1/encode",
        openapi_extra=request_body(encode.EncodeRequest),
        responses=file_responses(objects.EmbeddingList, encode.MEDIA_TYPES["safetensors"]),
    )
    async def encode_media(request: Request) -> Response:
        """The embeddings of a conversation's media. Needs a key with the right `encode`."""
        check_right(request.scope, ENCODE_RIGHT)
        text, context = await _read_request(request, api)
        parsed = parse_request(encode.EncodeRequest, text)
        encoded = await _cancel_on_disconnect(request, encode.encode(api, parsed, context))
        media_type = encode.MEDIA_TYPES[parsed.encoding_format]
        pieces = encode.body(encoded, parsed.encoding_format)
        return BodyStream(pieces, api.frontend.http.client_timeout, media_type=media_type)


def _add_service_endpoints(app: FastAPI, api: ApiContext) -> None:
    started = int(time.time())
    readiness = Readiness(api.router, api.prompt_builder, sorted(api.tokenizer.eos_token_ids))

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "triptych",
            "root": api.model_name,
            "parent": None if name == api.model_name else api.model_name,
            "max_model_len": api.context_length,
            "input_modalities": api.input_modalities,
            "reasoning_parser": api.prompt_builder.formats.reasoning_parser,
            "tool_call_parser": api.prompt_builder.formats.tool_call_parser,
        }

    @_get(app, "/v1/models", responses=json_responses(objects.ModelList))
    async def models() -> Response:
        """The served model, and those that language servers have beside it, such as LoRAs."""
        names = [api.model_name, *(api.servers.adapters if api.servers else ())]
        return JsonResponse({"object": "list", "data": [model_card(name) for name in dict.fromkeys(names)]})

    @_get(app, "/v1/models/{model:path}", responses=json_responses(objects.ModelCard))
    async def model(model: str) -> Response:
        """A served model."""
        if not model:
            return await models()
        check_model(api, model)
        return JsonResponse(model_card(api.model_name if model in NO_MODEL else model))

    @_get(app, "/version", responses=json_responses(objects.Version))
    async def version() -> Response:
        """Triptych's version."""
        return JsonResponse({"version": __version__})

    @_get(app, "/health", responses=json_responses(objects.Health))
    async def health() -> Response:
        """The HTTP process is alive. Says nothing about the instances; see `/ready`."""
        return JsonResponse({"status": "ok"})

    @_get(app, "/ready", responses=json_responses(objects.Ready) | {503: json_response(objects.Ready)})
    async def ready() -> Response:
        """All stages have recently produced a token, and new requests are admitted."""
        reason = await readiness.why_not_ready()
        return JsonResponse({"ready": False, "reason": reason}, 503) if reason else JsonResponse({"ready": True})

    @_get(app, "/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Metrics of the frontend and all instances, for Prometheus."""
        return Response(generate_latest(api.router.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _get(app: FastAPI, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """Register a handler for GET and, as HTTP requires and some probes expect, for HEAD."""

    def register(handler: Handler) -> Handler:
        app.head(path, include_in_schema=False)(handler)
        return app.get(path, **options)(handler)

    return register


async def _read_request(request: Request, api: ApiContext) -> tuple[bytes, RequestContext]:
    """Read the request; return its JSON and its context.

    Raises what ``read_body`` raises, and InvalidRequest for an invalid header."""
    record: RequestRecord = request.state.record
    record.handler = request.scope["route"].path
    api.history.begin(record)
    charge = api.memory_budget.for_request(record)
    body = await read_body(request, api.frontend.http.max_body_mb * 2**20, charge)
    return body.text, RequestContext(
        record=record,
        scope=scope_of(request.headers),
        deadline=record.clock.now() + _timeout(request, api),
        media=api.media.for_request(body.inline, charge, record.client),
        hold=charge,
        timeline=request.headers.get(TIMELINE_HEADER, "").lower() == "true",
    )


def _timeout(request: Request, api: ApiContext) -> float:
    """Return the request's time limit in seconds: the service's own, or a lower one from the header."""
    timeout = api.frontend.admission.request_timeout
    if (given := request.headers.get(TIMEOUT_HEADER)) is not None:
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT:
            raise InvalidRequest(f"the header {TIMEOUT_HEADER} must be a number of seconds up to {MAX_TIMEOUT:g}")
        timeout = min(timeout, seconds)
    return timeout


async def _stream(
    request: Request,
    api: ApiContext,
    events: AsyncGenerator[bytes, None],
    on_error: Callable[[TriptychError], bytes],
) -> BodyStream:
    """Return a response that streams the events.

    Waits for the first event, so that a request that fails before it gets the error's HTTP status."""
    first = await _cancel_on_disconnect(request, _first(events))
    return BodyStream(_with_errors(first, events, on_error), api.frontend.http.client_timeout)


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. If the client disconnects first, cancel the work and raise ClientDisconnect."""
    working = asyncio.create_task(work)
    disconnect = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _with_errors(
    first: bytes, events: AsyncGenerator[bytes, None], on_error: Callable[[TriptychError], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the events; an error becomes the last event."""
    try:
        yield first
        async for chunk in events:
            yield chunk
    except TriptychError as error:
        yield on_error(error)
    except Exception:  # without an error event, the client would take the answer as complete
        log.exception("an answer failed")
        yield on_error(InternalError("internal error"))
    finally:
        await events.aclose()


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    record: RequestRecord = request.state.record
    record.error = type(error).__name__
    if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    of = anthropic_errors if anthropic_errors.is_for(request.url.path) else errors
    return JsonResponse(of.body_of(error), of.status_of(error), headers_of(error))


async def _on_http_error(_: Request, error: Exception) -> Response:
    """Answer unknown paths and methods in the format of all errors."""
    assert isinstance(error, HTTPException)
    body = error_body(error.detail, "invalid_request_error", "not_found" if error.status_code == 404 else "bad_request")
    return JsonResponse(body, error.status_code, error.headers)


async def _on_unexpected_error(_: Request, error: Exception) -> Response:
    """Log the details of an unexpected error, and send the client none of them."""
    log.error("unexpected error", exc_info=error)
    return JsonResponse(error_body("internal error", "server_error", "internal_error"), 500)
