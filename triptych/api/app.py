"""The HTTP endpoints. Thin: parse, call, answer; every error goes through one table."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from blake3 import blake3
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from triptych import __version__
from triptych.api import chat, completions, objects, responses, tokens
from triptych.api.body import read_body
from triptych.api.completion_schemas import CompletionRequest, DetokenizeRequest, TokenizeConversation, TokenizeText
from triptych.api.errors import body_of, error_body, headers_of, status_of
from triptych.api.fields import MAX_TIMEOUT
from triptych.api.generation import RequestContext, check_model
from triptych.api.json_response import JsonResponse
from triptych.api.observed import Observed
from triptych.api.openapi import add_openapi, answers, streams, takes
from triptych.api.parsing import parse
from triptych.api.readiness import Readiness
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.service import Service
from triptych.api.sse import EventStream, disconnected, error_event
from triptych.errors import InternalError, InvalidRequest, TriptychError
from triptych.observe.requests import CURRENT

log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Callable[..., Any])

TIMELINE_HEADER = "x-triptych-timeline"
"""A request with this header set to ``true`` is told where its time went: ``timeline`` in the (last) answer."""
TIMEOUT_HEADER = "x-request-timeout"
"""Seconds until a request is of no use any more: what the field ``timeout`` says, for those who can't set it."""
CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Triptych", version=__version__)
    app.state.service = service
    app.add_middleware(Observed, observers=(service.router.metrics.answered, *service.observers))
    _add_generating(app, service)
    _add_tokens(app, service)
    _add_about(app, service)
    add_openapi(app)
    app.add_exception_handler(TriptychError, _on_error)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=CLIENT_CLOSED_REQUEST))
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _add_generating(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatCompletionRequest),
        responses=streams(objects.ChatCompletion, objects.ChatChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, which may have images. With `stream: true`, as server-sent events."""
        text, context = await _received(request, service)
        parsed = parse(ChatCompletionRequest, text)
        prepared = await _until_disconnect(request, chat.prepare(service, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _until_disconnect(request, chat.whole(prepared)))
        return await _stream(request, service, chat.chunks(prepared), error_event)

    @app.post(
        "/v1/completions",
        openapi_extra=takes(CompletionRequest),
        responses=streams(objects.TextCompletion, objects.TextCompletion),
    )
    async def text_completions(request: Request) -> Response:
        """Continues texts or tokens, without a chat template. With `stream: true`, as server-sent events."""
        text, context = await _received(request, service)
        parsed = parse(CompletionRequest, text)
        prepared = await _until_disconnect(request, completions.prepare(service, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _until_disconnect(request, completions.whole(prepared)))
        return await _stream(request, service, completions.chunks(prepared), error_event)

    @app.post(
        "/v1/responses",
        openapi_extra=takes(ResponsesRequest),
        responses=streams(objects.ResponseObject, objects.ResponseEvent),
    )
    async def model_responses(request: Request) -> Response:
        """Answers items, as OpenAI's Responses API does, but remembers nothing. With `stream: true`, as events."""
        text, context = await _received(request, service)
        parsed = parse(ResponsesRequest, text)
        prepared = await _until_disconnect(request, responses.prepare(service, parsed, context))
        if not parsed.stream:
            return JsonResponse(await _until_disconnect(request, prepared.whole()))
        return await _stream(request, service, prepared.events(), prepared.on_error)


def _add_tokens(app: FastAPI, service: Service) -> None:
    for prefix in ("", "/v1"):

        @app.post(
            f"{prefix}/tokenize",
            openapi_extra=takes(TokenizeText, TokenizeConversation),
            responses=answers(objects.Tokenized),
        )
        async def tokenize(request: Request) -> Response:
            """The tokens of a text, or of the prompt that messages become."""
            text, context = await _received(request, service)
            parsed = tokens.parse_tokenize(text)
            return JsonResponse(await _until_disconnect(request, tokens.tokenize(service, parsed, context)))

        @app.post(
            f"{prefix}/detokenize", openapi_extra=takes(DetokenizeRequest), responses=answers(objects.Detokenized)
        )
        async def detokenize(request: Request) -> Response:
            """The text of tokens."""
            text, context = await _received(request, service)
            parsed = parse(DetokenizeRequest, text)
            return JsonResponse(await _until_disconnect(request, tokens.detokenize(service, parsed, context)))


def _add_about(app: FastAPI, service: Service) -> None:
    started = int(time.time())
    readiness = Readiness(service.router, service.prompt_builder, sorted(service.tokenizer.eos_token_ids))

    def the_model() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "triptych",
            "max_model_len": service.context_length,
            "input_modalities": service.input_modalities,
        }

    @_get(app, "/v1/models", responses=answers(objects.Models))
    async def models() -> Response:
        """The one model that is served."""
        return JsonResponse({"object": "list", "data": [the_model()]})

    @_get(app, "/v1/models/{model:path}", responses=answers(objects.Model))
    async def model(model: str) -> Response:
        """The model of that name, if it is the one that is served."""
        if not model:
            return await models()
        check_model(service, model)
        return JsonResponse(the_model())

    @_get(app, "/version", responses=answers(objects.Version))
    async def version() -> Response:
        """Triptych's version."""
        return JsonResponse({"version": __version__})

    @_get(app, "/health", responses=answers(objects.Health))
    async def health() -> Response:
        """This process lives: nothing about the instances."""
        return JsonResponse({"status": "ok"})

    @_get(app, "/ready", responses=answers(objects.Ready) | {503: {"model": objects.Ready}})
    async def ready() -> Response:
        """A token came out of all stages within the last seconds, and new requests are admitted."""
        reason = await readiness.reason_against()
        return JsonResponse({"ready": False, "reason": reason}, 503) if reason else JsonResponse({"ready": True})

    @_get(app, "/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """For Prometheus: of the frontend, and of all instances."""
        return Response(generate_latest(service.router.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _get(app: FastAPI, path: str, **described: Any) -> Callable[[Answer], Answer]:
    """Answers HEAD as well, as HTTP wants of whatever answers GET: some probes and proxies ask so."""

    def added(answer: Answer) -> Answer:
        app.head(path, include_in_schema=False)(answer)
        return app.get(path, **described)(answer)

    return added


async def _received(request: Request, service: Service) -> tuple[bytes, RequestContext]:
    """The body's JSON; and who asks, and until when. Raises what ``read_body`` does, and InvalidRequest for a header
    that makes no sense."""
    hold = service.held.for_request()
    body = await read_body(request, service.frontend.http.max_body_mb * 2**20, hold)
    return body.text, RequestContext(
        scope=blake3(request.headers.get("authorization", "").encode()).hexdigest(),
        expires=time.monotonic() + _timeout(request, service),
        media=service.media.for_request(body.inline, hold),
        timeline=request.headers.get(TIMELINE_HEADER, "").lower() == "true",
    )


def _timeout(request: Request, service: Service) -> float:
    """Seconds that the request may take, as far as its headers say."""
    timeout = service.frontend.admission.request_timeout
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
    service: Service,
    events: AsyncGenerator[bytes, None],
    on_error: Callable[[TriptychError], bytes],
) -> EventStream:
    """The response begins only once the first event is there, so that a request that fails before that still gets its
    HTTP status."""
    first = await _until_disconnect(request, _first(events))
    return EventStream(_resumed(first, events, on_error), service.frontend.http.client_timeout)


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. When the client goes away first, the work is cancelled and ClientDisconnect raised."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _resumed(
    first: bytes, events: AsyncGenerator[bytes, None], on_error: Callable[[TriptychError], bytes]
) -> AsyncGenerator[bytes, None]:
    """A failure is an event of its own; then the stream ends."""
    try:
        yield first
        async for chunk in events:
            yield chunk
    except TriptychError as error:
        yield on_error(error)
    except Exception:  # whatever it is, the client must not take the answer for complete
        log.exception("an answer failed")
        yield on_error(InternalError("internal error"))
    finally:
        await events.aclose()


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    if (record := CURRENT.get()) is not None:
        record.error = type(error).__name__
    if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    return JsonResponse(body_of(error), status_of(error), headers_of(error))


async def _on_http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same shape as everything else."""
    assert isinstance(error, HTTPException)
    body = error_body(error.detail, "invalid_request_error", "not_found" if error.status_code == 404 else "bad_request")
    return JsonResponse(body, error.status_code, error.headers)


async def _on_bug(_: Request, error: Exception) -> Response:
    """What nobody expected: the log gets the details, the client doesn't."""
    log.error("unexpected error", exc_info=error)
    return JsonResponse(error_body("internal error", "server_error", "internal_error"), 500)
